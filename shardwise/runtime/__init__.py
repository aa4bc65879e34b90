"""The runtime: units and their states, hooks, gather, reduce, step, and access to whole tensors."""
