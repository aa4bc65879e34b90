"""Kernels of the wire formats for the simulated device: the reference, as one launch a call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.core.wire import Format
from shardwise.wire.kernels import NOTHING, EagerPayloads, register_kernels
from tests.accelerator.device import sim


class SimulatedPayloads:
    """A ``PayloadKernel`` with the interface of Triton's: each call is one launch."""

    def __init__(self, spec: Format) -> None:
        self._on_host = EagerPayloads(spec)

    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        *,
        skip: slice = NOTHING,
        residual: Tensor | None = None,
    ) -> None:
        # Granules that are skipped are neither read nor written: others may use their memory.
        runs = [
            r for r in (slice(0, skip.start), slice(skip.stop, len(values))) if r.start < r.stop
        ]
        lost = [] if residual is None else [residual]

        def kernel(reads: list[Tensor], writes: list[Tensor]) -> None:
            errors, done = (writes[0], writes[1:]) if lost else (None, writes)
            row = 0
            for some, encoded in zip(reads[len(lost) :], done, strict=True):
                mine = None if errors is None else errors[row : row + len(some)]
                self._on_host.encode(some, encoded, residual=mine)
                row += len(some)

        self._launch(
            "encode", [*lost, *(values[r] for r in runs)], [*lost, *(payload[r] for r in runs)],
            kernel,
        )  # fmt: skip

    def decode(self, payload: Tensor, out: Tensor) -> None:
        def kernel(reads: list[Tensor], writes: list[Tensor]) -> None:
            self._on_host.decode(reads[0], writes[0])

        self._launch("decode", [payload], [out], kernel)

    def add(self, payload: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        def kernel(reads: list[Tensor], writes: list[Tensor]) -> None:
            self._on_host.add(reads[0], writes[0], dtype)

        self._launch("add", [payload, total], [total], kernel)

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
        def kernel(reads: list[Tensor], writes: list[Tensor]) -> None:
            self._on_host.sum(reads[0], reads[1], writes[0], coordinate, scale=scale, add=add)

        self._launch("sum", [payload, own, *([out] if add else [])], [out], kernel)

    def _launch(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], kernel: sim.Kernel
    ) -> None:
        sim.launch(f"wire {name}", reads, writes, kernel)


def install() -> None:
    """Codecs on the simulated device use these kernels from now on."""
    register_kernels("sim", SimulatedPayloads)
