"""Measures a cluster's links, devices, memory and disks for the planner."""
