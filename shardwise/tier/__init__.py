"""Memory and disks where states rest: pools, budgets, and files."""
