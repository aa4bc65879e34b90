"""Weights on disk: exchange with other tools in safetensors files, streamed."""
