"""The search for the fastest plan of a model on a cluster."""
