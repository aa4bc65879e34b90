"""Searching the space of plans for a model on a cluster."""
