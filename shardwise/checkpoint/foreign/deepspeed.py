"""Checkpoints of DeepSpeed's ZeRO-1, 2 and 3: which elements of which file make up a parameter.

Written from the layout that DeepSpeed documents in ``zero_to_fp32.py``, which every checkpoint
carries. ``latest`` names a folder. In it, a rank's ``*_optim_states.pt`` has its part of flat fp32
master weights and of the base optimizer's states, and ``*_model_states.pt`` has names, shapes and
their order, buffers, and parameters that were not trained.

- ZeRO-1 and 2: each parameter group is one flat tensor, padded at its end and cut into equal parts.
- ZeRO-3: each parameter is padded at its end and cut into equal parts; a rank's parts of a subgroup
  are one flat tensor.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.contents import (
    Foreign,
    ForeignTensor,
    Joined,
    Piece,
    State,
    cut,
    number,
    plain_options,
)
from shardwise.checkpoint.foreign.dcp import inside
from shardwise.checkpoint.foreign.zips import LazyTensor, TorchFile, Window
from shardwise.core.errors import UsageError

LATEST_FILE = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_OTHERS = re.compile(r"(layer_\d+.*|expp_rank_\d+.*)_states\.pt")
_PADDING = 2
"""ZeRO-1 and 2 pad a group to a multiple of twice the number of ranks."""
_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "ds_config",
    "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "ds_version",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info",
}  # fmt: skip
"""What DeepSpeed itself puts into a model's file; anything else is the user's own."""


def is_deepspeed(path: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed, or has one that ``latest`` names."""
    if (path / LATEST_FILE).is_file() and not (path / LATEST_FILE).is_symlink():
        return True
    return path.is_dir() and any(_MODEL.fullmatch(file.name) for file in path.iterdir())


def read_deepspeed(path: Path) -> Foreign:
    """The contents of a checkpoint, without its data; executes nothing."""
    return _Reading(_Files(_tagged(path))).contents()


def _tagged(path: Path) -> Path:
    """The folder with the files: given itself, or named by ``latest``."""
    if any(_MODEL.fullmatch(file.name) for file in path.iterdir()):
        return path
    text = Window(path / LATEST_FILE)
    tag = text.read(0, min(text.num_bytes, 256)).decode(errors="replace").strip()
    folder = inside(path, tag)
    if not folder.is_dir():
        raise UsageError(
            f"'{path / LATEST_FILE}' names '{tag}', which is no folder beside it; give the folder "
            "of a checkpoint itself."
        )
    return folder


class _Files:
    """The files of a folder by rank; each is opened once, and its data is not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[int, TorchFile] = {}
        self.optims: dict[int, TorchFile] = {}
        for path in sorted(folder.iterdir()):
            for pattern, found in ((_MODEL, self.models), (_OPTIM, self.optims)):
                if match := pattern.fullmatch(path.name):
                    self._check(path, int(match["mp"]))
                    found[int(match["rank"] or 0)] = TorchFile(Window(inside(folder, path.name)))
            if _OTHERS.fullmatch(path.name):
                raise UsageError(
                    f"'{path}' belongs to a checkpoint of a pipeline or of experts, which is not "
                    "read; only those of plain data parallelism (ZeRO-1, 2, 3) are."
                )
        if not self.models or not self.optims:
            missing = "'*_optim_states.pt'" if self.models else "'*_model_states.pt'"
            raise UsageError(
                f"'{folder}' has no file {missing}; give a whole checkpoint of ZeRO-1, 2 or 3."
            )

    def _check(self, path: Path, model_rank: int) -> None:
        if model_rank:
            raise UsageError(
                f"'{path}' is one of several model-parallel parts, which are not read; only "
                "checkpoints of plain data parallelism (ZeRO-1, 2, 3) are."
            )

    def verify(self) -> Iterator[int]:
        for file in (*self.models.values(), *self.optims.values()):
            yield from file.verify()


@dataclass(frozen=True)
class _Rank:
    """What a rank's optimizer file says."""

    file: TorchFile
    masters: list[LazyTensor]
    """Its flat fp32 weights: per group (ZeRO-1, 2) or per subgroup (ZeRO-3)."""
    states: list[dict[Any, Any]]
    """The base optimizer's states, beside ``masters``; empty where it has none yet."""
    groups: list[dict[Any, Any]]
    """Hyper-parameters; none in an elastic checkpoint."""
    group_of: list[int]
    """The parameter group of each of ``masters``."""

    def tensors(self, key: str) -> list[LazyTensor]:
        """A state of each element, beside ``masters``; none if any of them does not have it."""
        found = [state.get(key) for state in self.states]
        for tensor, master in zip(found, self.masters, strict=True):
            # Masters may have been saved without their padding, and states with it.
            if not isinstance(tensor, LazyTensor) or tensor.numel < master.numel:
                return []
        return [tensor for tensor in found if isinstance(tensor, LazyTensor)]


class _Reading:
    """Checks of what the files say, on the way to the common form."""

    def __init__(self, files: _Files) -> None:
        self.files = files
        first = files.optims[min(files.optims)]
        saved = _get(first, first.value, "optimizer_state_dict", dict)
        self.is_sharded = "fp32_flat_groups" in saved
        """Whether parameters themselves are cut: ZeRO-3."""
        stage = saved.get("zero_stage")
        args = getattr(stage, "args", None)
        stage = args[0] if args else stage
        self.stage = 3 if self.is_sharded else stage if type(stage) is int else 1
        self.world = self._world(first, saved)
        self.ranks = [self._rank(files.optims[rank]) for rank in range(self.world)]
        self.model = files.models[0]

    def contents(self) -> Foreign:
        shared = _get(self.model, self.model.value, "shared_params", dict, {})
        aliases = {a: b for a, b in shared.items() if isinstance(a, str) and isinstance(b, str)}
        trained = list(self._sharded() if self.is_sharded else self._flat())
        known = {tensor.name for tensor in trained} | aliases.keys()
        others = [tensor for tensor in self._untrained() if tensor.name not in known]
        step = self.model.value.get("global_steps")
        return Foreign(
            f"DeepSpeed ZeRO-{self.stage} of {self.world} rank{'s' if self.world > 1 else ''}",
            self.files.folder,
            (*trained, *others),
            {alias: name for alias, name in aliases.items() if name not in aliases},
            step if isinstance(step, int) else None,
            tuple(self._left()),
            self.files.verify,
        )

    # --- what the files have ---

    def _world(self, first: TorchFile, saved: dict[Any, Any]) -> int:
        count = saved.get("partition_count")
        counts = count if isinstance(count, list) else [count]
        world = max((n for n in counts if isinstance(n, int)), default=len(self.files.optims))
        for kind, found, wanted in (
            ("*_optim_states.pt", self.files.optims, world),
            ("*_model_states.pt", self.files.models, world if self.is_sharded else 1),
        ):
            missing = sorted(set(range(wanted)) - found.keys())
            surplus = sorted(found.keys() - set(range(wanted)))
            if missing or surplus:
                which = (
                    f"lacks those of ranks {missing[:5]}" if missing else f"also has {surplus[:5]}"
                )
                raise UsageError(
                    f"'{self.files.folder}' was saved by {world} ranks, but of its files '{kind}' "
                    f"it {which}; copy the whole folder of one checkpoint."
                )
        return world

    def _rank(self, file: TorchFile) -> _Rank:
        saved = _get(file, file.value, "optimizer_state_dict", dict)
        key = "fp32_flat_groups" if self.is_sharded else "single_partition_of_fp32_groups"
        masters = _get(file, saved, key, list)
        if not all(isinstance(master, LazyTensor) for master in masters):
            raise _damaged(file, f"'{key}' has not only tensors")
        base = saved.get("optimizer_state_dict" if self.is_sharded else "base_optimizer_state")
        if isinstance(base, list):  # an elastic checkpoint: states alone
            step = saved.get("base_optimizer_state_step")
            states = [_with_step(state, step) for state in base]
            groups: list[dict[Any, Any]] = []
            group_of = list(range(len(masters)))
        else:
            base = base if isinstance(base, dict) else {}
            groups = _get(file, base, "param_groups", list, [])
            indices = [(i, n) for n, group in enumerate(groups) for i in _params(file, group)]
            by_index = _get(file, base, "state", dict, {})
            states = [_with_step(by_index.get(i), groups[n].get("step")) for i, n in indices]
            group_of = [n for _, n in indices]
        if not states:  # another program removed them
            states, group_of = [{} for _ in masters], [0 for _ in masters]
        if not len(states) == len(masters) == len(group_of):
            raise _damaged(file, f"it has {len(masters)} flat weights and {len(states)} states")
        return _Rank(file, masters, states, groups, group_of)

    @cached_property
    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes in the order of the flat tensors, per group or subgroup."""
        found = []
        for entry in _get(self.model, self.model.value, "param_shapes", list):
            if not isinstance(entry, dict):
                raise _damaged(self.model, "'param_shapes' has not only dicts")
            found.append({name: _shape(self.model, name, shape) for name, shape in entry.items()})
        return found

    # --- ZeRO-1 and 2 ---

    def _flat(self) -> Iterator[ForeignTensor]:
        if any(len(rank.masters) != len(self._shapes) for rank in self.ranks):
            raise _damaged(
                self.model, f"it has {len(self._shapes)} groups, other files have others"
            )
        for group, shapes in enumerate(self._shapes):
            masters = [rank.masters[group] for rank in self.ranks]
            states = {
                key: [found[group] for found in tensors]
                for key, tensors in self._state_tensors.items()
            }
            used = sum(map(math.prod, shapes.values()))
            total = sum(master.numel for master in masters)
            if not used <= total < used + _PADDING * self.world:
                raise _damaged(
                    self.model,
                    f"group {group} has {total} master weights for parameters of {used} elements",
                )
            at = 0
            for name, shape in shapes.items():
                yield self._tensor(
                    name,
                    group,
                    self._joined(name, shape, cut(masters, at, math.prod(shape))),
                    {
                        key: self._joined(name, shape, cut(sources, at, math.prod(shape)))
                        for key, sources in states.items()
                    },
                )
                at += math.prod(shape)

    # --- ZeRO-3 ---

    def _sharded(self) -> Iterator[ForeignTensor]:
        states, at = self._state_tensors, 0
        masters = [rank.masters for rank in self.ranks]
        for place, shapes in enumerate(self._shapes):
            for name, shape in shapes.items():
                yield self._tensor(
                    name,
                    place,
                    self._joined(name, shape, self._parts(masters, at, shape)),
                    {
                        key: self._joined(name, shape, self._parts(sources, at, shape))
                        for key, sources in states.items()
                    },
                )
                at += -(-math.prod(shape) // self.world)
        for rank in self.ranks:
            total = sum(master.numel for master in rank.masters)
            if total != at:
                raise _damaged(rank.file, f"it has {total} master weights instead of {at}")

    def _parts(
        self, sources: list[list[LazyTensor]], at: int, shape: tuple[int, ...]
    ) -> list[Piece] | None:
        """A parameter's part of each rank: equal parts, of which the last ones may be padding."""
        numel = math.prod(shape)
        part, found = -(-numel // self.world), []
        for rank, tensors in enumerate(sources):
            pieces = cut(tensors, at, max(0, min(part, numel - rank * part)))
            if pieces is None:
                return None
            found += pieces
        return found

    # --- both ---

    @cached_property
    def _state_tensors(self) -> dict[str, list[list[LazyTensor]]]:
        """States of each element that all ranks have, such as exp_avg, by rank."""
        keys = {key for state in self.ranks[0].states for key in state} - {"step"}
        found = {key: [rank.tensors(key) for rank in self.ranks] for key in sorted(map(str, keys))}
        return {key: ranks for key, ranks in found.items() if all(ranks)}

    def _joined(self, name: str, shape: tuple[int, ...], pieces: list[Piece] | None) -> Joined:
        if pieces is None:
            raise _damaged(self.model, f"'{name}' of shape {list(shape)} reaches beyond its data")
        dtype = pieces[0].source.dtype if pieces else self.ranks[0].masters[0].dtype
        return Joined(shape, dtype, tuple(pieces))

    def _tensor(
        self, name: str, place: int, value: Joined, states: dict[str, Joined]
    ) -> ForeignTensor:
        rank = self.ranks[0]
        place = min(place, len(rank.states) - 1)
        step = number(rank.states[place].get("step"))
        numbers: dict[str, State] = {} if step is None else {"step": step}
        group = rank.groups[rank.group_of[place]] if rank.groups else {}
        options = {k: v for k, v in plain_options(group).items() if k != "step"}
        return ForeignTensor(name, value, True, {**numbers, **states}, options)

    def _untrained(self) -> Iterator[ForeignTensor]:
        """Frozen parameters and buffers."""
        module = _get(self.model, self.model.value, "module", dict, {})
        buffers = _get(self.model, self.model.value, "buffer_names", list, [])
        frozen = _get(self.model, self.model.value, "frozen_param_shapes", dict, {})
        for name, shape in frozen.items():
            yield ForeignTensor(name, self._frozen(name, _shape(self.model, name, shape)))
        for name, value in module.items():
            # Under ZeRO-3 parameters are placeholders here.
            is_whole = name in buffers or not self.is_sharded
            if isinstance(value, LazyTensor) and name not in frozen and is_whole:
                yield ForeignTensor(str(name), value)

    def _frozen(self, name: str, shape: tuple[int, ...]) -> Joined:
        """A frozen parameter: whole in one file, or in equal parts in all."""
        models = [self.files.models[rank] for rank in range(self.world if self.is_sharded else 1)]
        parts = []
        for model in models:
            part = _get(model, model.value, "frozen_param_fragments", dict).get(name)
            if not isinstance(part, LazyTensor):
                raise _damaged(model, f"it has no part of the frozen parameter '{name}'")
            parts.append(part)
        return self._joined(name, shape, cut(parts, 0, math.prod(shape)))

    def _left(self) -> Iterator[str]:
        value = self.model.value
        if value.get("lr_scheduler") is not None:
            yield "the state of the learning rate scheduler"
        for key in ("data_sampler", "random_ltd"):
            if value.get(key) is not None:
                yield f"'{key}'"
        own = sorted(key for key in value.keys() - _KNOWN if isinstance(key, str))
        if own:
            yield f"the client state ({', '.join(own[:10])})"
        first = _get(self.ranks[0].file, self.ranks[0].file.value, "optimizer_state_dict", dict)
        if first.get("dynamic_loss_scale"):
            yield "the dynamic loss scale"
        taken = {"step", *self._state_tensors}
        lost = sorted({str(key) for state in self.ranks[0].states for key in state} - taken)
        if lost:
            yield f"states of the optimizer that are not of each element ({', '.join(lost[:10])})"
        yield "states of random number generators, which DeepSpeed does not save"


def _with_step(state: Any, step: Any) -> dict[Any, Any]:
    """A state with its step, which some optimizers keep in the group."""
    found = dict(state) if isinstance(state, dict) else {}
    return found if step is None or "step" in found else {**found, "step": step}


def _params(file: TorchFile, group: Any) -> list[int]:
    found = group.get("params") if isinstance(group, dict) else None
    if not isinstance(found, list) or not all(type(index) is int for index in found):
        raise _damaged(file, "a group of its optimizer has no parameters")
    return found


def _shape(file: TorchFile, name: Any, shape: Any) -> tuple[int, ...]:
    is_shape = isinstance(shape, tuple | list) and all(type(n) is int and n >= 0 for n in shape)
    if not isinstance(name, str) or not is_shape:
        raise _damaged(file, "its shapes are not those of parameters")
    return tuple(shape)


def _get(file: TorchFile, value: Any, key: str, kind: type, default: Any = None) -> Any:
    """An entry of a dict in a file; without a default it must be there."""
    found = value.get(key) if isinstance(value, dict) else None
    if found is None and default is not None:
        return default
    if not isinstance(found, kind):
        raise UsageError(
            f"{file.window} has no '{key}' as DeepSpeed's ZeRO writes it; give a whole checkpoint "
            "of ZeRO-1, 2 or 3."
        )
    return found


def _damaged(file: TorchFile, what: str) -> UsageError:
    return UsageError(f"{file.window} does not fit the checkpoint: {what}; copy it again.")
