"""Kernels of accelerators: they encode, decode and sum whole payloads, each in one launch.

A launch costs a device some microseconds, whatever it does, so one call handles all granules. These
are rows of a matrix: contiguous elements each, while granules may lie apart, as the columns of a
flat do (see [Note: Columns] in ``comm/descend.py``). Ragged ends are part of the same launch.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.errors import UsageError
from shardwise.core.wire import Format, row_bytes
from shardwise.device.abilities import runs_triton
from shardwise.wire import reference

NOTHING = slice(0, 0)
_log = logging.getLogger("shardwise")


class PayloadKernel(Protocol):
    """Works on payloads of one format, with exactly the bits of ``reference.py``.

    ``values``, ``own``, ``out`` and ``total`` are granules (count, elements); a ``payload`` is
    theirs (count, bytes), without gaps.
    """

    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        *,
        skip: slice = NOTHING,
        residual: Tensor | None = None,
    ) -> None:
        """Fill ``payload`` with the encoded values, except the granules to ``skip``.

        ``residual`` has a row for every granule that is not skipped: it is added to the values, and
        afterwards has what encoding lost; see ``keep_error``.
        """

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Fill ``out``, of any float dtype, with the payload's values."""

    def add(self, payload: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        """Add the payload's values to ``total``, of any float dtype, in a wider one."""

    def sum(
        self,
        payload: Tensor,
        own: Tensor,
        out: Tensor,
        coordinate: int,
        *,
        scale: float,
        add: bool,
    ) -> None:
        """Set ``out`` to scale times the sum of all members' granules, or with ``add`` add that.

        ``payload`` has a row of bytes for each member; instead of this rank's, at its coordinate,
        ``own`` is used. Sums are taken in the order of members, in float32 or ``own``'s dtype if
        that is wider. ``out`` may be the same memory as ``own``.
        """


Maker = Callable[[Format], PayloadKernel]
MAKERS: dict[str, Maker] = {}
"""Kernels that backends bring along, by the type of their devices."""


def register_kernels(device_type: str, maker: Maker) -> None:
    """From now on devices of a type use these kernels: for backends that triton has none for."""
    MAKERS[device_type] = maker


def payload_kernel(spec: Format, device: torch.device) -> PayloadKernel:
    """The fastest kernel for a format on an accelerator."""
    if (maker := MAKERS.get(device.type)) is not None:
        return maker(spec)
    if not runs_triton(device):
        warn_of_slowness(device.type)
        return EagerPayloads(spec)
    try:
        from shardwise.wire.triton_kernels import TritonPayloads
    except ImportError as error:
        raise UsageError(
            f"Wire format {spec} on {device.type} needs triton, which is not installed: "
            "pip install triton, or use bf16 or fp16."
        ) from error
    return TritonPayloads(spec)


@cache
def warn_of_slowness(device_type: str) -> None:
    """Rank 0 says once that a type of device has no kernels."""
    if os.environ.get("RANK", "0") == "0":
        _log.warning(
            "Wire formats int8 and int4 have no kernels for devices of type %s: they are encoded "
            "with torch's operators, which is slow and takes several times the memory of what is "
            "encoded. Use bf16, or register kernels (shardwise.wire.kernels.register_kernels).",
            device_type,
        )


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of another are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class EagerPayloads:
    """The reference as a kernel: any device, many launches."""

    def __init__(self, spec: Format) -> None:
        self._spec = spec

    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        *,
        skip: slice = NOTHING,
        residual: Tensor | None = None,
    ) -> None:
        for run in (slice(0, skip.start), slice(skip.stop, len(values))):
            if run.start == run.stop:
                continue
            if residual is None:
                self._encode(values[run], payload[run])
                continue
            before = skip.stop - skip.start if run.start else 0
            lost = residual[run.start - before : run.stop - before]
            wanted = values[run] + lost
            self._encode(wanted, payload[run])
            keep_error(wanted, self._decoded(payload[run], wanted.shape[1]), lost)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(self._decoded(payload, out.shape[1]))

    def add(self, payload: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        total.copy_(total.to(dtype) + self._decoded(payload, total.shape[1]))

    def sum(
        self,
        payload: Tensor,
        own: Tensor,
        out: Tensor,
        coordinate: int,
        *,
        scale: float,
        add: bool,
    ) -> None:
        total = None
        for i, arrived in enumerate(payload.unbind(0)):
            value = (
                own if i == coordinate else self._decoded(arrived.view(len(own), -1), own.shape[1])
            )
            value = value.to(wider(own.dtype))
            total = value if total is None else total + value
        assert total is not None
        result = total.to(torch.promote_types(total.dtype, out.dtype)) * scale
        out.copy_(out + result if add else result)

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        for elements, nbytes, row in self._runs(values.shape[1]):
            rows = values[:, elements].reshape(-1, row)
            encoded = rows.new_empty((len(rows), row_bytes(self._spec, row)), dtype=torch.uint8)
            reference.encode_rows(self._spec, rows, encoded)
            payload[:, nbytes].copy_(encoded.view(len(values), -1))

    def _decoded(self, payload: Tensor, size: int) -> Tensor:
        parts = [
            reference.decode_rows(
                self._spec, payload[:, nbytes].reshape(-1, row_bytes(self._spec, row)), row
            ).view(len(payload), -1)
            for _, nbytes, row in self._runs(size)
        ]
        return torch.cat(parts, 1)

    def _runs(self, size: int) -> list[tuple[slice, slice, int]]:
        """Elements, bytes, and elements per row: of full rows, and of the ragged end."""
        block = self._spec.block
        full, tail = divmod(size, block)
        split = full * row_bytes(self._spec, block)
        runs = [(slice(0, full * block), slice(0, split), block)] * bool(full)
        if tail:
            end = slice(split, split + row_bytes(self._spec, tail))
            runs.append((slice(full * block, size), end, tail))
        return runs


def keep_error(wanted: Tensor, arrives: Tensor, residual: Tensor) -> None:
    """What error feedback adds to the next values: what of the wanted ones does not arrive."""
    torch.sub(wanted, arrives, out=residual)
    # An overflow shows in the gradients themselves and must not return in every later step.
    residual.nan_to_num_(0.0, 0.0, 0.0)
