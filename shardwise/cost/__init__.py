"""What a plan costs on a cluster: clusters, the price of operations, and a step simulated."""
