"""Token data: where it comes from, and which rows each rank trains on.

The global batch of a step depends on (seed, step) alone, and each rank takes a slice of it. So a
job learns from the same rows whatever the number of ranks and micro-batches.
"""

import os
import sysconfig
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.train.config import ConfigError, DataConfig

STDLIB = "stdlib"
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_VALIDATION_STREAM = 1
"""Separates the rows drawn for validation from those drawn for training."""

Tokens = npt.NDArray[np.integer]


class Split(NamedTuple):
    """One source of tokens, split into training and validation."""

    train: Tokens
    validation: Tokens


def load_tokens(config: DataConfig) -> Split:
    """Open the source that `config` names and reserve its end for validation."""
    tokens = _open(config)
    cut = len(tokens) - int(len(tokens) * config.validation)
    return Split(tokens[:cut], tokens[cut:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Random rows of a token array: one rank's slice of every global batch."""

    tokens: Tokens
    source: str
    """The name that errors use."""
    seq: int
    global_batch: int
    vocab: int
    seed: int
    rank: int = 0
    world: int = 1
    accumulation: int = 1
    stream: int = 0
    """Rows of different streams are drawn independently."""

    def __post_init__(self) -> None:
        if len(self.tokens) < self.seq:
            raise ConfigError(
                f"{self.source} is too short: it has {len(self.tokens)} tokens, one sequence has "
                f"{self.seq}; use a larger source, a shorter train.seq or another data.validation"
            )
        assert self.global_batch % (self.world * self.accumulation) == 0

    @property
    def micro_batch(self) -> int:
        """Rows in a micro-batch of one rank."""
        return self.global_batch // (self.world * self.accumulation)

    def global_rows(self, step: int) -> npt.NDArray[np.int64]:
        """Where the rows of a step begin: the same for every rank and world size."""
        generator = np.random.default_rng((self.seed, self.stream, step))
        return generator.integers(len(self.tokens) - self.seq + 1, size=self.global_batch)

    def get(self, step: int, micro: int = 0) -> Tensor:
        """This rank's rows of micro-batch `micro` of `step`: int64, [micro_batch, seq]."""
        first = (micro * self.world + self.rank) * self.micro_batch
        starts = self.global_rows(step)[first : first + self.micro_batch]
        rows = np.stack([self.tokens[s : s + self.seq] for s in starts]).astype(np.int64)
        self._check_vocab(rows)
        return torch.from_numpy(rows)

    def _check_vocab(self, rows: npt.NDArray[np.int64]) -> None:
        # Checked batch by batch: a token file may be far larger than memory.
        for worst in (int(rows.max()), int(rows.min())):
            if not 0 <= worst < self.vocab:
                raise ConfigError(
                    f"{self.source} has token {worst}, but the model knows 0 to {self.vocab - 1};"
                    " use a model that fits the tokenizer, set model.vocab, or check data.dtype"
                )


def validation_of(batches: Batches, tokens: Tokens) -> Batches:
    """Rows of the validation tokens, drawn independently of the training rows."""
    source = f"the validation part of {batches.source}"
    return replace(batches, tokens=tokens, source=source, stream=_VALIDATION_STREAM)


def _open(config: DataConfig) -> Tokens:
    if config.source == STDLIB:
        return _standard_library()
    path = Path(config.source)
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise ConfigError(f"data.source: {path} {what}; give a text, .bin or .npy file, or stdlib")
    if path.stat().st_size == 0:
        raise ConfigError(f"data.source: {path} is empty")
    if path.suffix == ".npy":
        return _open_npy(path)
    dtype = np.dtype(config.dtype) if path.suffix == ".bin" else np.dtype(np.uint8)
    if path.stat().st_size % dtype.itemsize:
        raise ConfigError(
            f"data.source: the {path.stat().st_size} bytes of {path} are not a whole number of "
            f"{dtype} tokens; check data.dtype"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _open_npy(path: Path) -> Tokens:
    try:
        tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"data.source: {path} is not a .npy file: {error}") from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"data.source: {path} has {tokens.dtype} of shape {tokens.shape}; "
            "token ids must be integers in one dimension"
        )
    return tokens


def _standard_library() -> Tokens:
    """Every source file of this Python's standard library, as bytes.

    Files are ordered by a checksum of their names: this order is the same everywhere, and its end,
    used for validation, is a fair sample instead of the last letters of the alphabet.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[tuple[int, str]] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [d for d in subdirectories if d not in _SKIPPED_DIRECTORIES]
        for name in names:
            if name.endswith(".py"):
                relative = (Path(directory) / name).relative_to(root).as_posix()
                files.append((zlib.crc32(relative.encode()), relative))
    text = b"".join((root / relative).read_bytes() for _, relative in sorted(files))
    if not text:
        raise ConfigError(
            f"this Python has no sources of its standard library in {root}; "
            "set data.source to a text file"
        )
    return np.frombuffer(text, dtype=np.uint8)
