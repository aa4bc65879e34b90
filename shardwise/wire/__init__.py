"""Codecs: they encode a hop's floats as payload bytes and decode them, on CPU and on CUDA."""

from shardwise.wire.codec import Codec, make_codec

__all__ = ["Codec", "make_codec"]
