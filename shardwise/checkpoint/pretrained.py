"""Loads safetensors files into a sharded model, one parameter at a time.

Every rank reads the files itself and keeps its shards. Nothing is written before all ranks have
compared all headers with the model.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shardwise.checkpoint.folder import Source, Stored, read_source
from shardwise.checkpoint.together import together
from shardwise.checkpoint.values import DTYPES, Named, named_tensors
from shardwise.core.errors import SyncError, UsageError
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot

_ROWS_BYTES = 1 << 24
"""Elements compared at once, if a file has a tied parameter twice."""


@dataclass(frozen=True)
class Loaded:
    """What ``load_pretrained`` did not load; both are empty if it was strict."""

    missing: tuple[str, ...]
    """Names that only the model has: their values are unchanged."""
    unexpected: tuple[str, ...]
    """Names that only the files have."""


@dataclass(frozen=True)
class _Match:
    """The files compared with the model."""

    pairs: list[tuple[Named, Stored]]
    loaded: Loaded
    wrong: list[str]
    """Tensors that cannot be loaded, as parts of a sentence."""
    digest: int
    """Digest of all headers: equal on all ranks if they read the same files."""


def load_model(runtime: Runtime, path: Path, *, strict: bool) -> Loaded:
    """Write the files' values into the model's shards and masters; collective."""
    runtime.require_idle("load_pretrained")
    if runtime.opened:
        raise UsageError("load_pretrained cannot run inside full_params; leave it first.")
    control, found = runtime.grid.control, []
    together(
        control, f"reading of '{path}'", lambda: found.append(_match(runtime, path, strict=strict))
    )
    (match,) = found
    _agree_on_files(runtime, path, match)
    # Gathered copies of the old values must not be used after this.
    runtime.release_all()
    for file, pairs in _by_file(match.pairs).items():
        # Ranks meet after each file, so that none waits for all that a slower one has to read.
        together(control, f"loading of '{file}'", partial(_write, runtime, file, pairs))
    runtime.homes.settle()
    runtime.homes.trim()  # buffers of single parameters, which only loading needs
    return match.loaded


def _match(runtime: Runtime, path: Path, *, strict: bool) -> _Match:
    """Compare headers and model; raise one sentence that lists everything that does not fit."""
    source = read_source(path)
    match = _compare(named_tensors(runtime), source)
    problems = list(match.wrong)
    if strict and match.loaded.missing:
        problems.append(f"missing in the files: {_list(match.loaded.missing)}")
    if strict and match.loaded.unexpected:
        problems.append(f"not in the model: {_list(match.loaded.unexpected)}")
    if problems:
        advice = "" if match.wrong else ", or pass strict=False to load the common ones"
        raise UsageError(
            f"'{path}' does not fit this {type(runtime.model).__name__}, and nothing was loaded: "
            f"{'; '.join(problems)}. Give files of this model{advice}."
        )
    return match


def _compare(tensors: list[Named], source: Source) -> _Match:
    pairs, wrong, missing = [], [], []
    for tensor in tensors:
        names = [name for name in tensor.names if name in source.tensors]
        if not names:
            missing.append(tensor.name)
            continue
        stored = [source.tensors[name] for name in names]
        faults = [fault for found in stored if (fault := _fault(tensor, found))]
        if not faults and len(stored) > 1:
            faults = _differing_ties(stored)
        wrong += faults
        pairs.append((tensor, stored[0]))
    known = {name for tensor in tensors for name in tensor.names}
    unexpected = sorted(source.tensors.keys() - known)
    return _Match(pairs, Loaded(tuple(missing), tuple(unexpected)), wrong, _digest(source))


def _fault(tensor: Named, stored: Stored) -> str | None:
    info, dtype = stored.info, DTYPES[stored.info.dtype]
    if info.shape != tensor.shape:
        return f"'{info.name}' has shape {list(info.shape)} instead of {list(tensor.shape)}"
    kinds = [(d.is_floating_point, d.is_complex) for d in (dtype, tensor.tensor.dtype)]
    if kinds[0] != kinds[1]:  # integers of a quantised file are not weights
        return f"'{info.name}' has dtype {info.dtype}, not convertible to {tensor.tensor.dtype}"
    return None


def _differing_ties(stored: list[Stored]) -> list[str]:
    """Faults of tied parameters: they may have several names in the files, but only one value."""
    first, *others = stored
    return [
        f"'{other.info.name}' differs from '{first.info.name}', but they are tied in the model"
        for other in others
        if not _equal(first, other)
    ]


def _equal(left: Stored, right: Stored) -> bool:
    """Whether two stored tensors have the same bits, without holding one in full."""
    if left.info.dtype != right.info.dtype:
        return False
    with _reader(left.file) as one, _reader(right.file) as other:
        if not left.info.shape:
            return _same_bits(one.get_tensor(left.info.name), other.get_tensor(right.info.name))
        slices = one.get_slice(left.info.name), other.get_slice(right.info.name)
        return all(_same_bits(slices[0][rows], slices[1][rows]) for rows in _rows(left))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def _rows(stored: Stored) -> Iterator[slice]:
    length = stored.info.shape[0]
    step = max(1, length * _ROWS_BYTES // max(1, stored.info.num_bytes))
    return (slice(at, min(at + step, length)) for at in range(0, length, step))


def _digest(source: Source) -> int:
    lines = [f"{s.file.name} {s.info}" for s in source.tensors.values()]
    return int.from_bytes(hashlib.sha256("\n".join(sorted(lines)).encode()).digest()[:7], "little")


def _agree_on_files(runtime: Runtime, path: Path, match: _Match) -> None:
    digests = runtime.grid.control.exchange(torch.tensor([match.digest]), f"reading of '{path}'")
    others = [rank for rank, digest in enumerate(digests[:, 0]) if digest != digests[0, 0]]
    if others:
        raise SyncError(
            f"Rank(s) {', '.join(map(str, others))} find other tensors in '{path}' than rank 0; "
            "give all nodes the same files."
        )


def _by_file(pairs: list[tuple[Named, Stored]]) -> dict[Path, list[tuple[Named, str]]]:
    found: dict[Path, list[tuple[Named, str]]] = {}
    for tensor, stored in sorted(pairs, key=lambda pair: pair[1].file):
        found.setdefault(stored.file, []).append((tensor, stored.info.name))
    return found


def _write(runtime: Runtime, file: Path, pairs: list[tuple[Named, str]]) -> None:
    """Load what the model needs from a file, with one tensor in memory at a time."""
    with torch.no_grad(), _reader(file) as opened:
        for tensor, name in pairs:
            for target, value in _values(opened, tensor, name):
                if target is None:
                    tensor.tensor.copy_(value)
                else:
                    runtime.write(target, value)
                del value  # free it before the next one is read


def _values(
    opened: Any, tensor: Named, name: str
) -> Iterator[tuple[ParamSlot | None, torch.Tensor]]:
    """A stored tensor, whole or as the rows of tiles, each with its destination."""
    if len(tensor.slots) < 2:
        yield next(iter(tensor.slots), None), opened.get_tensor(name)
        return
    rows, width = opened.get_slice(name), tensor.shape[1]
    for slot in tensor.slots:
        first = slot.start // width
        yield slot, rows[first : first + slot.spec.param.shape[0]]


def _reader(file: Path) -> Any:
    return safe_open(file, framework="pt", device="cpu")


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
