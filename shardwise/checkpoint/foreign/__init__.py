"""Checkpoints of others: read without executing their pickles, and streamed into our format."""
