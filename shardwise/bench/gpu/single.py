"""Parts that one process measures on one device: memory, streams, matrix products, codecs."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwise.core.wire import Format
from shardwise.device import memory, streams
from shardwise.device.abilities import HOST, runs_triton, supports_bfloat16
from shardwise.device.facts import first_line
from shardwise.wire.codec import make_codec

Row = dict[str, Any]
Rows = list[Row]
_LONG_ENOUGH_S = 0.05
"""Work is enlarged until it takes this long, so that launches do not count."""
_ROUNDS = 5
_COPIED_NUMEL, _SIDE = 1 << 22, 512
"""What is copied beside products of matrices of this side."""


def copies(device: torch.device) -> Rows:
    """Copies between host and device: whether all bits arrive, and how fast."""
    return [
        {"host_memory": kind, **_copied(make, device)}
        for kind, make in (("pinned", _pinned), ("unpinned", _unpinned))
    ]


def stream_order(device: torch.device) -> Rows:
    """Whether waits between streams order work, and whether copies run beside compute."""
    side = streams.side_stream(device)
    right = True
    values = torch.zeros(1 << 20, device=device)
    for turn in range(20):
        values.fill_(turn)
        written = streams.mark(device)
        with streams.on_stream(side):
            streams.order_after(written)
            doubled = values * 2
            read = streams.mark(device)
        streams.order_after(read)
        doubled.record_stream(streams.current_stream(device))
        right &= bool((doubled == 2 * turn).all())
    in_turn, at_once = _overlap(device, side)
    return [
        {"what": "a wait of a stream orders it", "right": right},
        {"what": "a copy, then products", "seconds_s": in_turn},
        {"what": "a copy on a side stream, beside products", "seconds_s": at_once},
    ]


def products(device: torch.device) -> Rows:
    """The rate of square matrix products."""
    dtypes = [torch.float32, torch.float16]
    if supports_bfloat16(device):
        dtypes.append(torch.bfloat16)
    return [
        _guarded({"dtype": str(dtype).removeprefix("torch.")}, partial(_product, dtype, device))
        for dtype in dtypes
    ]


def codecs(device: torch.device) -> Rows:
    """The device's kernels beside the CPU's, whose bits tests compare with the reference."""
    kernel = "triton" if runs_triton(device) else "torch"
    return [
        _guarded({"format": kind, "kernel": kernel}, partial(_codec, Format.parse(kind), device))
        for kind in ("int8", "int8/256/symmetric", "int4", "int4/symmetric", "bf16", "fp16")
    ]


def _guarded(row: Row, measure: Callable[[], Row]) -> Row:
    try:
        return row | measure()
    except Exception as error:  # of any kind: other rows may work
        return row | {"error": first_line(error)}


# --- copies ---------------------------------------------------------------------------------------


def _pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    storage = memory.pinned_memory(nbytes, device)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _unpinned(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _copied(make: Callable[[int, torch.device], torch.Tensor], device: torch.device) -> Row:
    def attempt(nbytes: int) -> tuple[float, Row]:
        host, back = make(nbytes, device), make(nbytes, device)
        host.copy_(torch.arange(nbytes, dtype=torch.int64).remainder_(251).to(torch.uint8))
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        up = seconds(lambda: there.copy_(host, non_blocking=True), device)
        down = seconds(lambda: back.copy_(there, non_blocking=True), device)
        return min(up, down), {
            "pinned": host.is_pinned(),
            "size_bytes": nbytes,
            "right": torch.equal(host, back),
            "h2d_gb_s": nbytes / up / 1e9,
            "d2h_gb_s": nbytes / down / 1e9,
        }

    return _enlarged(attempt, 1 << 20, 1 << 28)


def _overlap(device: torch.device, side: torch.Stream) -> tuple[float, float]:
    """Seconds of a copy and of products that take as long: one after the other, and at once."""
    host = _pinned(4 * _COPIED_NUMEL, device).view(torch.float32)
    there = torch.empty(_COPIED_NUMEL, device=device)
    matrix = torch.randn(_SIDE, _SIDE, device=device)

    def copy() -> None:
        there.copy_(host, non_blocking=True)

    def multiply(times: int = 1) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    times = max(1, round(seconds(copy, device) / seconds(multiply, device)))

    def in_turn() -> None:
        copy()
        multiply(times)

    def at_once() -> None:
        with streams.on_stream(side):
            copy()
        multiply(times)

    return seconds(in_turn, device), seconds(at_once, device)


# --- compute --------------------------------------------------------------------------------------


def _product(dtype: torch.dtype, device: torch.device) -> Row:
    def attempt(side: int) -> tuple[float, Row]:
        matrix = torch.randn(side, side, device=device).to(dtype)
        spent = seconds(lambda: torch.mm(matrix, matrix), device)
        rate = 2 * side**3 / spent / 1e12
        return spent, {"side": side, "seconds_s": spent, "rate_tflop_s": rate}

    return _enlarged(attempt, 128, 8192)


def _codec(spec: Format, device: torch.device) -> Row:
    block = spec.block or 64
    granule = 5 * block + 3  # so that there are whole blocks and ragged ends
    values = torch.randn(granule * 16, generator=torch.Generator().manual_seed(0))
    values[:granule] = 0.0
    values[granule] = float("inf")
    values[-granule:] *= 1e-30
    here, there = make_codec(spec, granule, HOST), make_codec(spec, granule, device)
    payload = torch.empty(here.nbytes(values.numel()), dtype=torch.uint8)
    on_device = payload.to(device)
    here.encode(values, payload)
    there.encode(values.to(device), on_device)
    decoded, on_device_decoded = torch.empty_like(values), values.to(device)
    here.decode(payload, decoded)
    there.decode(on_device, on_device_decoded)
    total, on_device_total = torch.ones_like(values), torch.ones_like(values).to(device)
    here.add(payload, total)
    there.add(on_device, on_device_total)
    pairs = ((payload, on_device), (decoded, on_device_decoded), (total, on_device_total))
    row: Row = {
        name: _same(ours, theirs.cpu())
        for name, (ours, theirs) in zip(("encode", "decode", "add"), pairs, strict=True)
    }
    row["right"] = all(row.values())
    return row | _codec_speed(spec, device)


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal bits, but a NaN is a NaN."""
    known = ~ours.isnan()
    return torch.equal(known, ~theirs.isnan()) and torch.equal(ours[known], theirs[known])


def _codec_speed(spec: Format, device: torch.device) -> Row:
    def attempt(numel: int) -> tuple[float, Row]:
        codec = make_codec(spec, numel, device)
        values = torch.randn(numel, device=device)
        payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=device)
        encode = seconds(lambda: codec.encode(values, payload), device)
        decode = seconds(lambda: codec.decode(payload, values), device)
        rates = {"encode_gb_s": 4 * numel / encode / 1e9, "decode_gb_s": 4 * numel / decode / 1e9}
        # Of the floats, not of the payload.
        return min(encode, decode), rates

    return _enlarged(attempt, 1 << 16, 1 << 26)


# --- time -----------------------------------------------------------------------------------------


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The mean seconds of work on a device, after one run that is not counted."""
    work()
    streams.synchronize(device)
    begin = time.perf_counter()
    work()
    streams.synchronize(device)
    if time.perf_counter() - begin > _LONG_ENOUGH_S:
        return time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        work()
    streams.synchronize(device)
    return (time.perf_counter() - begin) / _ROUNDS


def _enlarged(attempt: Callable[[int], tuple[float, Row]], first: int, last: int) -> Row:
    """What an attempt measures at the first size, from ``first`` on, that takes long enough."""
    size = first
    while True:
        spent, row = attempt(size)
        if spent > _LONG_ENOUGH_S / _ROUNDS or size * 4 > last:
            return row
        size *= 4
