"""Token sources and batches: same rows for every world size, and clear errors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.train.config import ConfigError, DataConfig
from shardwise.train.data import Batches, load_tokens, validation_of


def batches(**changes: object) -> Batches:
    options: dict[str, object] = {
        "tokens": np.arange(1000) % 251,
        "source": "numbers",
        "seq": 16,
        "global_batch": 12,
        "vocab": 256,
        "seed": 7,
    }
    return Batches(**(options | changes))  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    cut=st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (4, 3), (12, 1), (6, 2)]),
    step=st.integers(0, 10_000),
    seed=st.integers(0, 2**32),
)
def test_the_global_batch_is_the_same_for_every_world_size(
    cut: tuple[int, int], step: int, seed: int
) -> None:
    world, accumulation = cut
    whole = batches(seed=seed).get(step)
    parts = [
        batches(seed=seed, rank=rank, world=world, accumulation=accumulation).get(step, micro)
        for micro in range(accumulation)
        for rank in range(world)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_steps_seeds_and_streams_draw_different_rows() -> None:
    first = batches()
    assert torch.equal(first.get(3), batches().get(3))
    assert not torch.equal(first.get(3), first.get(4))
    assert not torch.equal(first.get(3), batches(seed=8).get(3))
    assert not torch.equal(first.get(3), validation_of(first, first.tokens).get(3))


def test_every_position_can_be_drawn() -> None:
    tokens = np.arange(18)
    starts = {int(row[0]) for step in range(60) for row in batches(tokens=tokens).get(step)}
    assert starts == {0, 1, 2}


def test_the_standard_library_is_the_default_and_is_stable() -> None:
    one, two = load_tokens(DataConfig()), load_tokens(DataConfig())
    assert np.array_equal(one.train, two.train)
    assert len(one.train) > 1_000_000
    assert len(one.validation) / (len(one.train) + len(one.validation)) == pytest.approx(0.05, 1e-3)
    assert b"def " in one.validation.tobytes()


def test_text_bin_and_npy_files(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(bytes(range(200)))
    ids = np.arange(200, dtype=np.uint16) * 300
    ids.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", ids)
    for name, expected in (("a.txt", np.arange(200)), ("a.bin", ids), ("a.npy", ids)):
        split = load_tokens(DataConfig(source=str(tmp_path / name), validation=0.1))
        assert np.array_equal(np.concatenate(split), expected)
        assert len(split.validation) == 20


def test_errors_name_the_source_and_the_remedy(tmp_path: Path) -> None:
    def load(name: str) -> None:
        load_tokens(DataConfig(source=str(tmp_path / name)))

    (tmp_path / "empty.txt").touch()
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "bad.npy").write_bytes(b"nonsense")
    np.save(tmp_path / "float.npy", np.zeros(9))
    for name, message in (
        ("missing.txt", "does not exist"),
        (".", "is a directory"),
        ("empty.txt", "is empty"),
        ("odd.bin", "check data.dtype"),
        ("bad.npy", "is not a .npy file"),
        ("float.npy", "integers in one dimension"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(name)


def test_a_source_shorter_than_a_sequence_is_an_error() -> None:
    with pytest.raises(ConfigError, match="numbers is too short: it has 15 tokens"):
        batches(tokens=np.arange(15))
    assert batches(tokens=np.arange(16)).get(0).shape == (12, 16)


@pytest.mark.parametrize("bad", [256, -1])
def test_a_token_outside_the_vocabulary_is_an_error(bad: int) -> None:
    with pytest.raises(ConfigError, match=f"has token {bad}, but the model knows 0 to 255"):
        batches(tokens=np.full(100, bad)).get(0)
