"""Checkpoints in DCP folders of others, in the common form: FSDP2, torchtitan, accelerate.

Their names are the keys of nested state_dicts, joined by dots. Where the optimizer's states are is
seen by ``param_groups``; the model's tensors are those whose names the states have, below whatever
key the program put them.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.foreign.contents import (
    Foreign,
    ForeignTensor,
    State,
    number,
    plain_options,
)
from shardwise.checkpoint.foreign.dcp import DcpFolder, DcpTensor, is_dcp, read_dcp
from shardwise.checkpoint.foreign.pickles import shown
from shardwise.checkpoint.training.boxes import boxes
from shardwise.core.errors import UsageError

_ACCELERATE_MODEL, _ACCELERATE_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
OURS = "a checkpoint of shardwise without its index"
_OURS_ALONE = ("shardwise.", "compute.")
"""Where ``sw.save`` puts what only ``sw.load`` needs."""
_GROUPS = re.compile(r"(?:(?P<prefix>.+?)\.)?param_groups(?:\.(?P<rest>.+))?")


@dataclass(frozen=True)
class Boxed:
    """A tensor of a DCP folder; an interval of its elements is a few boxes."""

    folder: DcpFolder
    tensor: DcpTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def flat(self, begin: int, end: int) -> torch.Tensor:
        found = torch.empty(end - begin, dtype=self.dtype)
        at = 0
        for box in boxes(self.shape, begin, end):
            values = self.folder.read_box(self.tensor.name, box.offsets, box.sizes)
            found[at : at + box.numel] = values.reshape(-1)
            at += box.numel
        return found


def is_folders(path: Path) -> bool:
    """Whether a folder is one of DCP, or has accelerate's two."""
    return is_dcp(path) or is_dcp(path / _ACCELERATE_MODEL)


def read_folders(path: Path) -> Foreign:
    """The contents of a checkpoint, without its data; executes nothing."""
    if is_dcp(path):
        folder = read_dcp(path)
        ours = any(name.startswith("shardwise.rank") for name in folder.tensors)
        return _Reading(path, OURS if ours else "a DCP folder", [folder]).contents()
    folders = [read_dcp(path / _ACCELERATE_MODEL)]
    if is_dcp(path / _ACCELERATE_OPTIMIZER):
        folders.append(read_dcp(path / _ACCELERATE_OPTIMIZER))
    return _Reading(path, "accelerate's FSDP folders", folders).contents()


class _Reading:
    """Which names are the model's and which the optimizer's."""

    def __init__(self, path: Path, kind: str, folders: list[DcpFolder]) -> None:
        self.path, self.kind, self.folders = path, kind, folders
        self.tensors = {name: (f, t) for f in folders for name, t in f.tensors.items()}
        self.objects = {name: f for f in folders for name in f.objects}
        self.prefixes = {
            match["prefix"] or "" for name in self._names() if (match := _GROUPS.fullmatch(name))
        }
        """What comes before ``param_groups`` and ``state``."""
        if len(self.prefixes) > 1:
            names = ", ".join(map(shown, sorted(self.prefixes)))
            raise UsageError(
                f"'{path}' has the states of several optimizers ({names}), which are not read; "
                "only those of one are."
            )

    def contents(self) -> Foreign:
        states = self._states()
        names = self._model_names(set(states))
        unknown = sorted(states.keys() - names.keys())
        if unknown and names:
            raise UsageError(
                f"'{self.path}' has states of '{shown(unknown[0])}'"
                f"{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}, but not such "
                "parameters; give the folder of the whole checkpoint."
            )
        if not names:
            raise UsageError(
                f"'{self.path}' has no tensors of a model; give the folder of the whole checkpoint."
            )
        options = self._options()
        tensors = tuple(
            ForeignTensor(
                name,
                Boxed(*self.tensors[full]),
                name in states or name in options,
                states.get(name, {}),
                options.get(name, {}),
            )
            for name, full in names.items()
        )
        taken = {*names.values(), *(n for n in self._names() if self._of_optimizer(n) is not None)}
        left = tuple(self._left(sorted(self._names() - taken)))
        return Foreign(self.kind, self.path, tensors, {}, None, left, self.verify)

    def verify(self) -> Iterator[int]:
        for folder in self.folders:
            yield from folder.verify()

    def _names(self) -> set[str]:
        return {*self.tensors, *self.objects}

    # --- the optimizer ---

    def _of_optimizer(self, full: str) -> str | None:
        """A name without what comes before ``state`` and ``param_groups``."""
        for prefix in self.prefixes:
            head = f"{prefix}." if prefix else ""
            rest = full.removeprefix(head)
            if full.startswith(head) and rest.split(".")[0] in ("state", "param_groups"):
                return rest
        return None

    def _states(self) -> dict[str, dict[str, State]]:
        found: dict[str, dict[str, State]] = {}
        for full, (folder, tensor) in self.tensors.items():
            rest = self._of_optimizer(full) or ""
            if rest.startswith("state."):
                name, _, key = rest.removeprefix("state.").rpartition(".")
                found.setdefault(name, {})[key] = self._state(folder, tensor)
        for full, folder in self.objects.items():
            rest = self._of_optimizer(full) or ""
            if rest.startswith("state."):
                value = number(folder.read_object(full))
                name, _, key = rest.removeprefix("state.").rpartition(".")
                if value is not None:
                    found.setdefault(name, {})[key] = value
        return found

    def _state(self, folder: DcpFolder, tensor: DcpTensor) -> State:
        """A state of each element, or a number."""
        if tensor.shape or tensor.dtype.is_complex:
            return Boxed(folder, tensor)
        value: int | float = folder.read_box(tensor.name, (), ()).item()
        return value

    def _options(self) -> dict[str, dict[str, Any]]:
        """Hyper-parameters by parameter."""
        found: dict[str, dict[Any, Any]] = {}
        groups: dict[int, dict[Any, Any]] = {}
        for full in self._names():
            rest = self._of_optimizer(full) or ""
            if rest == "param_groups":  # the list of groups as one value
                listed = self._value(full)
                groups |= dict(enumerate(listed if isinstance(listed, list) else []))
            elif rest.startswith("param_groups."):
                name, _, key = rest.removeprefix("param_groups.").rpartition(".")
                if name.isdecimal():
                    groups.setdefault(int(name), {})[key] = self._value(full)
                else:
                    found.setdefault(name, {})[key] = self._value(full)
        for group in groups.values():
            names = group.get("params") if isinstance(group, dict) else None
            for name in names if isinstance(names, list) else []:
                if isinstance(name, str):
                    found[name] = group
        return {name: plain_options(group) for name, group in found.items()}

    def _value(self, full: str) -> Any:
        if full in self.objects:
            return self.objects[full].read_object(full)
        folder, tensor = self.tensors[full]
        if tensor.numel != 1:
            return None
        return folder.read_box(full, (0,) * len(tensor.shape), tensor.shape).item()

    # --- the model ---

    def _model_names(self, stated: set[str]) -> dict[str, str]:
        """The model's tensors: their own names, and their names in the folder."""
        rest = [name for name in self.tensors if self._of_optimizer(name) is None]
        if self.kind == OURS:
            rest = [name for name in rest if not name.startswith(_OURS_ALONE)]
        heads = Counter(self._head(name, stated) for name in rest)
        if not heads:
            return {}
        best = max(heads, key=lambda head: heads[head])
        return {n.removeprefix(best): n for n in rest if self._head(n, stated) == best}

    def _head(self, full: str, stated: set[str]) -> str:
        """What comes before a tensor's own name: the keys above it, where they are known."""
        path = self.tensors[full][0].paths.get(full)
        if path:
            above = ".".join(map(str, path[:-1]))
            return f"{above}." if above else ""
        own = next((name for name in _endings(full) if name in stated), full)
        return full.removesuffix(own)

    def _left(self, names: list[str]) -> Iterator[str]:
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            listed = ", ".join(map(shown, names[:10]))
            yield f"values beside the model and its optimizer ({listed}{more})"
        for pattern, what in (
            ("scheduler*.bin", "the state of the learning rate scheduler"),
            ("random_states_*.pkl", "states of random number generators"),
            ("custom_checkpoint_*.pkl", "objects that the program registered"),
            ("sampler*.bin", "the position in the data"),
        ):
            if any(self.path.glob(pattern)):
                yield f"{what} ('{pattern}')"


def _endings(name: str) -> Iterator[str]:
    """A name and its ends after each dot."""
    yield name
    for match in re.finditer(r"\.", name):
        yield name[match.end() :]
