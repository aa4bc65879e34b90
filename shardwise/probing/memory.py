"""Measures work that moves bytes in memory: copies, the optimizer's update, and wire codecs."""

from collections.abc import Callable

import torch
from torch import nn

from shardwise.core.cluster import Curve
from shardwise.core.wire import Format
from shardwise.probing.clock import Clock
from shardwise.probing.scope import Scope, fitting
from shardwise.wire.codec import make_codec

_PINNED_BYTES = 64 << 20


def measure_copy(clock: Clock, scope: Scope, device: torch.device, room: int) -> Curve:
    """A copy within the device's memory, by bytes."""

    def measure(nbytes: int) -> tuple[float, float]:
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return nbytes, clock.seconds(lambda: target.copy_(source))

    return clock.sweep(fitting(scope.copied_bytes, 2, room), measure)


def measure_update(clock: Clock, scope: Scope, device: torch.device, room: int) -> Curve:
    """AdamW's fused update of a flat shard and its states in float32, by elements."""

    def measure(numel: int) -> tuple[float, float]:
        part = nn.Parameter(torch.ones(numel, device=device))
        part.grad = torch.full_like(part, 1e-3)
        return numel, clock.seconds(torch.optim.AdamW([part], fused=True).step)

    return clock.sweep(fitting(scope.updated_numel, 16, room), measure)


def measure_codec(
    kind: str, clock: Clock, scope: Scope, device: torch.device, room: int
) -> tuple[Curve, Curve]:
    """Encoding and decoding of float32, by elements; decoding with sums if that is slower."""
    amounts = fitting(scope.coded_numel, 12, room)

    def sweep(choose: Callable[["_Coding"], float]) -> Curve:
        return clock.sweep(amounts, lambda numel: (numel, choose(_Coding(kind, numel, device))))

    def decode(coding: "_Coding") -> float:
        return max(clock.seconds(coding.decode), clock.seconds(coding.add))

    return sweep(lambda coding: clock.seconds(coding.encode)), sweep(decode)


class _Coding:
    """A codec with values and a payload."""

    def __init__(self, kind: str, numel: int, device: torch.device) -> None:
        self._codec = make_codec(Format(kind), numel, device)
        self._values = torch.randn(numel, device=device)
        self._out = torch.zeros_like(self._values)
        self._payload = torch.empty(self._codec.nbytes(numel), dtype=torch.uint8, device=device)
        self.encode()

    def encode(self) -> None:
        self._codec.encode(self._values, self._payload)

    def decode(self) -> None:
        self._codec.decode(self._payload, self._out)

    @torch.no_grad()
    def add(self) -> None:
        self._codec.add(self._payload, self._out)


def measure_host_copy(clock: Clock, device: torch.device) -> float:
    """Bytes per second between pinned host memory and the device, in the slower direction."""
    host = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device)
    to_device = clock.seconds(lambda: there.copy_(host, non_blocking=True))
    to_host = clock.seconds(lambda: host.copy_(there, non_blocking=True))
    return float(f"{_PINNED_BYTES / max(to_device, to_host):.4g}")
