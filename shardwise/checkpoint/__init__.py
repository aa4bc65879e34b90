"""Weights on disk: streamed to and from safetensors files, to exchange them with other tools."""
