"""What a cluster's links, devices, memory and disks really do, as the planner needs it."""
