"""Codecs: what turns a hop's floats into payload bytes and back, on CPU and on CUDA."""

from shardwise.wire.codec import Codec, make_codec

__all__ = ["Codec", "make_codec"]
