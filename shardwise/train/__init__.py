"""The reference trainer: configuration, data, model, loop, metrics, local workers, verification."""
