"""Kernels that encode and decode rows: the choice of a kernel, and the one that always works.

A row kernel works on matrices: row i of ``values`` (rows, numel) becomes row i of ``payload``
(rows, bytes). Elements of a row are contiguous; rows need not be adjacent.
"""

from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.errors import UsageError
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
    """The reference as a kernel: any row length, any device, slow."""

    def __init__(self, spec: Format) -> None:
        self._spec = spec

    def encode(self, values: Tensor, payload: Tensor) -> None:
        reference.encode_rows(self._spec, values, payload)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(reference.decode_rows(self._spec, payload, out.shape[1]))

    def add(self, payload: Tensor, total: Tensor) -> None:
        total.add_(reference.decode_rows(self._spec, payload, total.shape[1]))


def full_rows(spec: Format, device: torch.device) -> RowKernel:
    """The fastest kernel for rows of a whole block on a device."""
    if device.type == "cuda":
        try:
            from shardwise.wire.triton_kernels import TritonRows
        except ImportError as error:
            raise UsageError(
                f"Wire format {spec} on CUDA needs triton, which is not installed: "
                "pip install triton, or use bf16 or fp16."
            ) from error
        return TritonRows(spec)
    if device.type == "cpu":
        from shardwise.wire.cpu import PackedRows, is_exact

        if is_exact(spec):
            return PackedRows(spec)
    return EagerRows(spec)


def tail_rows(spec: Format, device: torch.device) -> RowKernel:
    """The kernel for the shorter rows of ragged ends; on CPU a slow one, as they are few."""
    return full_rows(spec, device) if device.type == "cuda" else EagerRows(spec)
