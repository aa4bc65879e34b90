"""What users touch of a sharded model: its parameters, their gradients, whole tensors."""
