"""Kernels of the CPU: they encode and decode rows; accelerators have those of ``kernels.py``.

A row kernel works on matrices: row i of ``values`` (rows, numel) becomes row i of ``payload``
(rows, bytes). Elements of a row are contiguous; rows need not be adjacent.
"""

from typing import Protocol

from torch import Tensor

from shardwise.core.wire import Format
from shardwise.wire import reference


class RowKernel(Protocol):
    """Encodes and decodes rows of one format, with exactly the bits of ``reference.py``."""

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Fill ``payload`` with the encoded rows of ``values``."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Fill ``out``, of any float dtype, with the rows' values."""

    def add(self, payload: Tensor, total: Tensor) -> None:
        """Add the rows' values to ``total``, which is float32 or wider."""


class EagerRows:
    """The reference as a kernel: any row length, slow."""

    def __init__(self, spec: Format) -> None:
        self._spec = spec

    def encode(self, values: Tensor, payload: Tensor) -> None:
        reference.encode_rows(self._spec, values, payload)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(reference.decode_rows(self._spec, payload, out.shape[1]))

    def add(self, payload: Tensor, total: Tensor) -> None:
        total.add_(reference.decode_rows(self._spec, payload, total.shape[1]))


def full_rows(spec: Format) -> RowKernel:
    """The fastest kernel for rows of a whole block on the CPU."""
    from shardwise.wire.cpu import PackedRows, is_exact

    return PackedRows(spec) if is_exact(spec) else EagerRows(spec)
