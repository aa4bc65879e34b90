"""Codecs on the CPU: bits, error bounds, and everything that is not a nice number."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.core.wire import Format, row_bytes, wire_bytes
from shardwise.device.abilities import chunk_numel
from shardwise.wire import cpu, make_codec, reference
from shardwise.wire.rows import EagerRows, full_rows

BLOCKED = ["int8", "int8/symmetric", "int4", "int4/symmetric"]
VARIED = [*BLOCKED, "int8/32", "int8/4096", "int4/32", "int4/64/symmetric", "int4/4096"]
CASTS = ["fp32", "bf16", "fp16"]


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def encoded(text: str, values: Tensor, granule: int = 0) -> Tensor:
    codec = make_codec(Format.parse(text), granule or max(1, values.numel()))
    payload = torch.full((codec.nbytes(values.numel()),), 0xAB, dtype=torch.uint8)
    codec.encode(values, payload)
    return payload


def travelled(text: str, values: Tensor, granule: int = 0) -> Tensor:
    codec = make_codec(Format.parse(text), granule or max(1, values.numel()))
    out = torch.full_like(values, 123.0)
    codec.decode(encoded(text, values, granule), out)
    return out


def expected(spec: Format, values: Tensor) -> Tensor:
    """The payload that the reference states for one granule."""
    payload = torch.empty(wire_bytes(spec, values.numel()), dtype=torch.uint8)
    full = values.numel() // spec.block
    split = full * row_bytes(spec, spec.block)
    numel = full * spec.block
    if full:
        rows = values[:numel].view(full, -1), payload[:split].view(full, -1)
        reference.encode_rows(spec, *rows)
    if numel < values.numel():
        reference.encode_rows(spec, values[numel:].view(1, -1), payload[split:].view(1, -1))
    return payload


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """Values of a few blocks: any magnitude, offset, spikes, or any floats at all."""
    if draw(st.booleans()):
        number = st.floats(-(2.0**120), 2.0**120, width=32)
        return torch.tensor(draw(st.lists(number, min_size=1, max_size=80)))
    values = gaussian(draw(st.integers(1, 700)), draw(st.integers(0, 1 << 30)))
    if draw(st.booleans()):
        values[:: draw(st.integers(2, 99))] *= draw(st.sampled_from([0.0, 10.0, 1000.0]))
    values += draw(st.sampled_from([0.0, 1.0, -3.0, 1e3, 1e6]))
    return values * 2.0 ** draw(st.integers(-120, 90))


# The format


def test_a_row_of_int8_by_hand() -> None:
    # The span of 5.1 needs a scale of at least 5.1 / 254.98; rounded up to bfloat16: 0.02002.
    row = encoded("int8", torch.tensor([-1.0, 0.0, 4.1, 0.01]))
    scale = torch.tensor([0.02001953125], dtype=torch.bfloat16)
    zero = round(-1.0 / scale.item())
    codes = [0, -zero, round(4.1 / scale.item()) - zero, 0 - zero]
    assert row[:4].tolist() == codes
    assert row[4:6].tolist() == scale.view(torch.uint8).tolist()
    assert row[6:].tolist() == list(zero.to_bytes(2, "little", signed=True))


def test_a_row_of_symmetric_int4_by_hand() -> None:
    # Multiples of 0.5 from -7 to 7 as codes from 0 to 14, the first in the low half of a byte.
    row = encoded("int4/symmetric", torch.tensor([-3.5, 3.5, 0.0, 1.0, -0.5]))
    assert row[:3].tolist() == [0x0 | 0xE << 4, 0x7 | 0x9 << 4, 0x6]
    assert row[3:].clone().view(torch.bfloat16).item() == 0.5


@pytest.mark.parametrize("text", VARIED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_kernel_has_the_references_bits(text: str, dtype: torch.dtype) -> None:
    spec = Format.parse(text)
    assert not isinstance(full_rows(spec), EagerRows)
    # More than one chunk of the kernel, a partial chunk, and a ragged end.
    numel = cpu.CHUNK_NUMEL + 5 * spec.block + 37
    values = gaussian(numel) * torch.logspace(-4, 4, numel)
    values[: spec.block] = 0
    values[spec.block] = torch.nan
    values[2 * spec.block] = -torch.inf
    values[3 * spec.block : 4 * spec.block] += 100
    values = values.to(dtype)
    payload = encoded(text, values)
    assert torch.equal(payload, expected(spec, values))
    full = numel // spec.block
    rows = payload[: full * row_bytes(spec, spec.block)].view(full, -1)
    whole = reference.decode_rows(spec, rows, spec.block).view(-1)
    codec = make_codec(spec, numel)
    for out_dtype in (torch.float32, dtype):
        out = torch.zeros(numel, dtype=out_dtype)
        codec.decode(payload, out)
        assert torch.equal(out[: whole.numel()].nan_to_num(7), whole.to(out_dtype).nan_to_num(7))
    for wide in (torch.float32, torch.float64):
        total = gaussian(numel).to(wide)
        sums = total[: whole.numel()] + whole
        codec.add(payload, total)
        assert torch.equal(total[: whole.numel()].nan_to_num(7), sums.nan_to_num(7))


@settings(max_examples=120)
@given(blocks(), st.sampled_from([*BLOCKED, "int8/32", "int4/32"]))
def test_the_kernel_has_the_references_bits_for_any_values(values: Tensor, text: str) -> None:
    assert torch.equal(encoded(text, values), expected(Format.parse(text), values))


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Format("int8", 1024)
    monkeypatch.setattr(cpu.PackedRows, "encode", lambda self, values, payload: payload.zero_())
    assert not cpu.is_exact.__wrapped__(spec)


# Error


@settings(max_examples=150)
@given(blocks(), st.sampled_from([*BLOCKED, "int8/32", "int4/32", "int4/64/symmetric"]))
def test_errors_stay_within_the_bound(values: Tensor, text: str) -> None:
    spec, out = Format.parse(text), travelled(text, values)
    for start in range(0, values.numel(), spec.block):
        block, got = values[start:][: spec.block], out[start:][: spec.block]
        bound = reference.error_bound(spec, block.min(), block.max())
        assert (block.double() - got.double()).abs().max() <= bound


@pytest.mark.parametrize("text", BLOCKED)
def test_the_bound_is_half_a_step_of_the_range(text: str) -> None:
    spec, values = Format.parse(text), gaussian(4096)
    low, high = values.min().double(), values.max().double()
    levels = {"int8": 255, "int4": 15}[spec.kind]
    step = (high - low) / levels if spec.minmax else torch.maximum(-low, high) / (levels // 2)
    assert reference.error_bound(spec, low, high) <= 1.02 * step / 2


@pytest.mark.parametrize(
    ("text", "rms"),
    [("int8", 0.0066), ("int8/symmetric", 0.0072), ("int4", 0.103), ("int4/symmetric", 0.120)],
)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1.0, 1e30])
def test_relative_error_is_the_same_for_all_magnitudes(
    text: str, rms: float, magnitude: float
) -> None:
    values = gaussian(1 << 16) * magnitude
    error = (travelled(text, values).double() - values.double()).norm() / values.double().norm()
    assert 0.9 * rms < error < rms


@pytest.mark.parametrize(("text", "relative"), [("int8", 1e-4), ("int4", 4e-4)])
def test_nearly_equal_values_keep_their_level(text: str, relative: float) -> None:
    values = 1 + 1e-6 * gaussian(1000)
    assert (travelled(text, values) - values).abs().max() < relative
    for value in (1.0, -1.0, 0.75, -3.0e-5):
        equal = torch.full((1000,), value).to(torch.bfloat16)
        assert torch.equal(travelled(text, equal), equal)


# Values that are not nice


@pytest.mark.parametrize("text", [*VARIED, *CASTS])
def test_zeros_arrive_as_zeros(text: str) -> None:
    assert torch.equal(travelled(text, torch.zeros(1000)), torch.zeros(1000))
    mixed = gaussian(1000)
    mixed[::3] = 0
    assert not travelled(text, mixed)[::3].any()


@pytest.mark.parametrize("text", VARIED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_with_a_bad_value_is_all_nan_and_no_other_is(
    text: str, bad: float, dtype: torch.dtype
) -> None:
    block = Format.parse(text).block
    values = gaussian(3 * block + 5).to(dtype)
    clean = travelled(text, values)
    values[block + 3] = bad
    out = travelled(text, values)
    assert out[block : 2 * block].isnan().all()
    assert torch.equal(out[:block], clean[:block])
    assert torch.equal(out[2 * block :], clean[2 * block :])
    values[-1] = bad
    assert travelled(text, values)[3 * block :].isnan().all()


@pytest.mark.parametrize("text", BLOCKED)
def test_a_bad_block_poisons_the_sum_it_is_added_to(text: str) -> None:
    values = gaussian(512)
    values[7] = torch.inf
    total = torch.ones(512)
    make_codec(Format.parse(text), 512).add(encoded(text, values), total)
    assert total[:128].isnan().all()
    assert total[256:].isfinite().all()


@pytest.mark.parametrize("text", BLOCKED)
def test_the_ends_of_float32(text: str) -> None:
    tiny = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-127, 0.0])
    assert (travelled(text, tiny) - tiny).abs().max() <= 2.0**-127
    top = torch.tensor([torch.finfo(torch.float32).max, 0.0])
    assert travelled(text, top)[0] >= 0.99 * top[0]
    span = torch.tensor([top[0], -top[0]])  # too far apart for a min-max block
    out = travelled(text, span)
    assert out.isnan().all() if Format.parse(text).minmax else (out.abs() > 0.99 * top[0]).all()


# Sizes, granules and pieces


@pytest.mark.parametrize("text", [*VARIED, *CASTS])
def test_nothing_travels_as_nothing(text: str) -> None:
    codec = make_codec(Format.parse(text), 64)
    empty, payload = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    assert codec.nbytes(0) == 0
    codec.encode(empty, payload)
    codec.decode(payload, empty)
    codec.add(payload, empty)
    assert list(codec.chunks(0)) == []


@pytest.mark.parametrize("text", [*BLOCKED, "int8/32", *CASTS])
@pytest.mark.parametrize("granule", [1, 7, 16, 129, 256, 300, 512, 4096])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_payload_is_the_granules_payloads_end_to_end(text: str, granule: int, count: int) -> None:
    spec = Format.parse(text)
    values = gaussian(count * granule)
    codec, payload = make_codec(spec, granule), encoded(text, values, granule)
    nbytes = wire_bytes(spec, granule)
    assert payload.numel() == codec.nbytes(count * granule) == count * nbytes
    for i in range(count):
        own = slice(i * granule, (i + 1) * granule)
        alone = encoded(text, values[own], granule)
        assert torch.equal(alone, payload[i * nbytes : (i + 1) * nbytes])
    out, last = torch.empty_like(values), torch.empty(granule)
    codec.decode(payload, out)
    codec.decode(payload[-nbytes:], last)
    assert torch.equal(last, out[-granule:])


@pytest.mark.parametrize("text", [*BLOCKED, "int8/4096", *CASTS])
@pytest.mark.parametrize(
    ("granule", "count"), [(1, 9), (300, 500), (256, 2000), (400_000, 2), (400_001, 2)]
)
def test_pieces_cover_everything_and_stand_alone(text: str, granule: int, count: int) -> None:
    values = gaussian(granule * count)
    codec, payload = make_codec(Format.parse(text), granule), encoded(text, values, granule)
    whole = torch.empty_like(values)
    codec.decode(payload, whole)
    total, element, byte = torch.ones_like(values), 0, 0
    for elements, run in codec.chunks(values.numel()):
        assert (elements.start, run.start) == (element, byte)
        element, byte = elements.stop, run.stop
        assert 0 < element - elements.start <= chunk_numel(torch.device("cpu"))
        out = torch.empty(element - elements.start)
        codec.decode(payload[run], out)
        assert torch.equal(out, whole[elements])
        codec.add(payload[run], total[elements])
    assert (element, byte) == (values.numel(), payload.numel())
    assert torch.equal(total, 1 + whole)


def test_a_number_of_elements_that_is_no_granules_is_refused() -> None:
    with pytest.raises(AssertionError, match="no granules of 300"):
        make_codec(Format("int8"), 300).nbytes(700)


# Equal bits


@pytest.mark.parametrize("text", BLOCKED)
def test_alignment_does_not_change_bits(text: str) -> None:
    values = gaussian(5000)
    codec, plain = make_codec(Format.parse(text), 5000), encoded(text, values)
    for shift in (1, 2, 3):
        moved = torch.empty(5000 + shift)[shift:].copy_(values)
        payload = torch.empty(plain.numel() + shift, dtype=torch.uint8)[shift:]
        codec.encode(moved, payload)
        assert torch.equal(payload, plain)
        out = torch.empty(5000 + shift)[shift:]
        codec.decode(payload, out)
        assert torch.equal(out, travelled(text, values))


@pytest.mark.parametrize("text", CASTS)
def test_casts_take_any_alignment(text: str) -> None:
    codec, values = make_codec(Format.parse(text), 100), gaussian(100)
    plain = encoded(text, values)
    payload = torch.empty(plain.numel() + 1, dtype=torch.uint8)[1:]
    codec.encode(values, payload)
    assert torch.equal(payload, plain)
    out, total = torch.empty(100), torch.zeros(100)
    codec.decode(payload, out)
    codec.add(payload, total)
    assert torch.equal(out, total)
    assert torch.equal(out, travelled(text, values))


def test_the_number_of_threads_does_not_change_bits() -> None:
    values, threads = gaussian(700_001), torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            results.append(
                [t for text in BLOCKED for t in (encoded(text, values), travelled(text, values))]
            )
        finally:
            torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


def test_one_codec_serves_threads_at_once() -> None:
    codec = make_codec(Format("int4"), 300_000)
    inputs = [gaussian(300_000, seed) for seed in range(4)]
    wanted = [encoded("int4", values) for values in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        payload = torch.empty_like(wanted[i])
        for _ in range(5):
            codec.encode(inputs[i], payload)
            if not torch.equal(payload, wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_codecs_work_after_their_first_use_in_inference_mode() -> None:
    def in_fresh_thread() -> None:
        values = gaussian(1000)
        with torch.inference_mode():
            travelled("int8", values)
        results.append(torch.equal(travelled("int8", values), wanted))

    results: list[bool] = []
    wanted = travelled("int8", gaussian(1000))
    thread = threading.Thread(target=in_fresh_thread)
    thread.start()
    thread.join()
    assert results == [True]


def test_the_users_default_dtype_and_device_do_not_matter() -> None:
    values, wanted = gaussian(1000), [encoded(text, gaussian(1000)) for text in BLOCKED]
    results: list[bool] = []

    def in_fresh_thread() -> None:
        with torch.device("meta"):
            for text, payload in zip(BLOCKED, wanted, strict=True):
                cpu.is_exact.__wrapped__(Format.parse(text))
                codec, got = make_codec(Format.parse(text), 1000), torch.empty_like(payload)
                codec.encode(values, got)
                results.append(torch.equal(got, payload))

    torch.set_default_dtype(torch.float64)
    try:
        thread = threading.Thread(target=in_fresh_thread)
        thread.start()
        thread.join()
    finally:
        torch.set_default_dtype(torch.float32)
    assert results == [True] * len(BLOCKED)


# Dtypes and casts


@pytest.mark.parametrize("text", ["int8", "bf16"])
def test_autograd_does_not_notice(text: str) -> None:
    codec = make_codec(Format.parse(text), 300)
    values = gaussian(300).requires_grad_()
    payload = torch.empty(codec.nbytes(300), dtype=torch.uint8)
    codec.encode(values, payload)
    codec.decode(payload, values)
    assert values.is_leaf
    assert torch.equal(values.detach(), travelled(text, gaussian(300)))


@pytest.mark.parametrize("text", [*BLOCKED, *CASTS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_goes_in_and_comes_out(text: str, dtype: torch.dtype) -> None:
    values = gaussian(1111).to(dtype)
    same = travelled(text, values.float())
    out = travelled(text, values)
    assert out.dtype is dtype
    assert torch.equal(out, same.to(dtype))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_cast_is_torchs_cast(text: str, dtype: torch.dtype) -> None:
    values = torch.cat([gaussian(100), torch.tensor([torch.nan, torch.inf, 1e-30])])
    assert torch.equal(encoded(text, values).view(dtype)[:100], values.to(dtype)[:100])
    out = travelled(text, values)
    assert torch.equal(out.nan_to_num(7), values.to(dtype).float().nan_to_num(7))


def test_float16_overflows_to_infinity() -> None:
    assert travelled("fp16", torch.tensor([1e5, -1e5])).tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("text", CASTS)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_casts_add_in_the_totals_dtype(text: str, wide: torch.dtype) -> None:
    values, total = gaussian(200_000), gaussian(200_000, 1).to(wide)
    sums = total + travelled(text, values).to(wide)
    make_codec(Format.parse(text), 200_000).add(encoded(text, values), total)
    assert torch.equal(total, sums)
