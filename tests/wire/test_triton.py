"""The Triton kernels: the reference's bits in the interpreter, and who gets which kernels."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch

from shardwise.core.errors import UsageError
from shardwise.core.wire import Format
from shardwise.wire import kernels, make_codec
from shardwise.wire.codec import LaunchCodec
from tests.wire.processes import run

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton; a Linux wheel that needs no GPU)",
)
CUDA, OTHER = torch.device("cuda"), torch.device("privateuseone")


@needs_triton
@pytest.mark.parametrize(
    ("formats", "sizes"),
    [
        # Ragged ends of odd length, and of a multiple of 16.
        ("int8/32,int8/32/symmetric", ("37", "80")),
        ("int4/32,int4/32/symmetric", ("37", "80")),
        # Several tiles, of several rows and of one.
        ("int8/1024,int4/2048/symmetric", ("5000",)),
    ],
)
def test_interpreted_kernels_have_the_references_bits(
    tmp_path: Path, formats: str, sizes: tuple[str, ...]
) -> None:
    script = str(Path(__file__).with_name("interpreted.py"))
    assert "equal bits" in run(script, formats, *sizes, folder=tmp_path)


@needs_triton
def test_devices_that_triton_compiles_for_get_its_kernels(tmp_path: Path) -> None:
    script = """
from shardwise.core.wire import Format
from shardwise.wire import make_codec
from shardwise.wire.triton_kernels import TritonPayloads
codec = make_codec(Format("int4"), 300, "cuda")  # nothing is allocated yet
assert isinstance(codec.kernel, TritonPayloads)
print("right")
"""
    assert "right" in run("-c", script, folder=tmp_path)


def test_triton_is_needed_where_it_runs_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shardwise.wire.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UsageError, match=r"on cuda needs triton.*pip install triton"):
        make_codec(Format("int8"), 300, CUDA)
    make_codec(Format("bf16"), 300, CUDA)
    make_codec(Format("int8"), 300)


def test_other_devices_use_the_reference_and_rank_0_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        monkeypatch.setenv("RANK", "1")
        kernels.warn_of_slowness.__wrapped__("npu")
        assert not caplog.records
        monkeypatch.setenv("RANK", "0")
        kernels.warn_of_slowness.cache_clear()
        for text in ("int8", "int4"):
            codec = make_codec(Format(text), 300, OTHER)
            assert isinstance(codec, LaunchCodec)
            assert isinstance(codec.kernel, kernels.EagerPayloads)
    (said,) = caplog.records
    assert "no kernels for devices of type privateuseone" in said.getMessage()


def test_a_backend_may_bring_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAKERS", {})
    made = kernels.EagerPayloads(Format("int8"))
    kernels.register_kernels(OTHER.type, lambda spec: made)
    codec = make_codec(Format("int8"), 300, OTHER)
    assert isinstance(codec, LaunchCodec)
    assert codec.kernel is made
