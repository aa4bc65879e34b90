"""The figures of three papers, measured on their own clusters; one module per paper."""
