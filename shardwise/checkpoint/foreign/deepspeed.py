"""Checkpoints of DeepSpeed's ZeRO-1, 2 and 3: which elements of which file make up a parameter.

``zero_to_fp32.py``, which DeepSpeed puts beside every checkpoint, documents the layout. ``latest``
names a folder. In it, a rank's ``*_optim_states.pt`` has its part of flat fp32 master weights and
of the base optimizer's states, and ``*_model_states.pt`` has names, shapes and their order,
buffers, and parameters that were not trained.

- ZeRO-1 and 2: each parameter group is one flat tensor, padded at its end (and between parameters,
  if they were aligned) and cut into equal parts.
- ZeRO-3: each parameter is padded at its end and cut into equal parts; a rank's parts of a subgroup
  are one flat tensor.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
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
from shardwise.checkpoint.foreign.deepspeed_files import (
    Files,
    damaged,
    get,
    shape_of,
    tagged,
)
from shardwise.checkpoint.foreign.pickles import shown
from shardwise.checkpoint.foreign.zips import LazyTensor, TorchFile, is_size
from shardwise.core.errors import UsageError

_MASTER = "master weights"
_PADDING = 2
"""ZeRO-1 and 2 pad a group to a multiple of twice the number of ranks."""
_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "ds_config",
    "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "ds_version",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info",
}  # fmt: skip
"""What DeepSpeed itself puts into a model's file; anything else is the user's own."""


def read_deepspeed(path: Path) -> Foreign:
    """The contents of a checkpoint, without its data; executes nothing."""
    return _Reading(Files(tagged(path))).contents()


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

    def __init__(self, files: Files) -> None:
        self.files = files
        first = files.optims[min(files.optims)]
        saved = get(first, first.value, "optimizer_state_dict", dict)
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
        shared = get(self.model, self.model.value, "shared_params", dict, {})
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
            missing = list(islice((rank for rank in range(wanted) if rank not in found), 5))
            surplus = sorted(rank for rank in found if rank >= wanted)[:5]
            if missing or surplus:
                which = f"lacks those of {missing}" if missing else f"also has {surplus}"
                raise UsageError(
                    f"'{self.files.folder}' was saved by {world} ranks, but of files '{kind}' it "
                    f"{which}; copy the whole folder of one checkpoint."
                )
        return world

    def _rank(self, file: TorchFile) -> _Rank:
        saved = get(file, file.value, "optimizer_state_dict", dict)
        key = "fp32_flat_groups" if self.is_sharded else "single_partition_of_fp32_groups"
        masters = get(file, saved, key, list)
        if not all(isinstance(master, LazyTensor) for master in masters):
            raise damaged(file, f"'{key}' has not only tensors")
        base = saved.get("optimizer_state_dict" if self.is_sharded else "base_optimizer_state")
        if isinstance(base, list):  # an elastic checkpoint: states alone
            step = saved.get("base_optimizer_state_step")
            states = [_with_step(state, step) for state in base]
            groups: list[dict[Any, Any]] = []
            group_of = list(range(len(masters)))
        else:
            base = base if isinstance(base, dict) else {}
            groups = get(file, base, "param_groups", list, [])
            indices = [(i, n) for n, group in enumerate(groups) for i in _params(file, group)]
            by_index = get(file, base, "state", dict, {})
            states = [_with_step(by_index.get(i), groups[n].get("step")) for i, n in indices]
            group_of = [n for _, n in indices]
        if not states:  # another program removed them
            states, group_of = [{} for _ in masters], [0 for _ in masters]
        if not len(states) == len(masters) == len(group_of):
            raise damaged(file, f"it has {len(masters)} flat weights and {len(states)} states")
        return _Rank(file, masters, states, groups, group_of)

    @cached_property
    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes in the order of the flat tensors, per group or subgroup."""
        found = []
        for entry in get(self.model, self.model.value, "param_shapes", list):
            if not isinstance(entry, dict):
                raise damaged(self.model, "'param_shapes' has not only dicts")
            found.append({name: shape_of(self.model, name, shape) for name, shape in entry.items()})
        return found

    # --- ZeRO-1 and 2 ---

    def _flat(self) -> Iterator[ForeignTensor]:
        if any(len(rank.masters) != len(self._shapes) for rank in self.ranks):
            raise damaged(self.model, "it has other parameter groups than the optimizer's files")
        for group, shapes in enumerate(self._shapes):
            flats = {key: [found[group] for found in ranks] for key, ranks in self._sources.items()}
            gaps = self._gaps(group, len(shapes))
            used = sum(map(math.prod, shapes.values())) + sum(gaps)
            total = sum(master.numel for master in flats[_MASTER])
            if not used <= total < used + _PADDING * self.world:
                raise damaged(
                    self.model,
                    f"group {group} has {total} master weights for parameters of {used} elements",
                )
            at = 0
            for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
                numel = math.prod(shape)
                pieces = {key: cut(sources, at, numel) for key, sources in flats.items()}
                yield self._tensor(name, group, shape, pieces)
                at += numel + gap

    def _gaps(self, group: int, count: int) -> list[int]:
        """Elements between the parameters of a group, which newer versions may align."""
        file = self.ranks[0].file
        saved = get(file, file.value, "optimizer_state_dict", dict)
        paddings = get(file, saved, "param_alignment_paddings", list, [])
        found = paddings[group] if group < len(paddings) else [0] * count
        if not isinstance(found, list) or len(found) != count or not all(map(is_size, found)):
            raise damaged(file, "its 'param_alignment_paddings' are not those of its parameters")
        return found

    # --- ZeRO-3 ---

    def _sharded(self) -> Iterator[ForeignTensor]:
        at = 0
        for place, shapes in enumerate(self._shapes):
            for name, shape in shapes.items():
                pieces = {k: self._parts(ranks, at, shape) for k, ranks in self._sources.items()}
                yield self._tensor(name, place, shape, pieces)
                at += -(-math.prod(shape) // self.world)
        for rank in self.ranks:
            total = sum(master.numel for master in rank.masters)
            if total != at:
                raise damaged(rank.file, f"it has {total} master weights instead of {at}")

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

    @cached_property
    def _sources(self) -> dict[str, list[list[LazyTensor]]]:
        """Master weights and states, by rank."""
        return {_MASTER: [rank.masters for rank in self.ranks], **self._state_tensors}

    def _joined(self, name: str, shape: tuple[int, ...], pieces: list[Piece] | None) -> Joined:
        if pieces is None:
            raise damaged(
                self.model, f"'{shown(name)}' of shape {list(shape)} reaches beyond its data"
            )
        dtype = pieces[0].source.dtype if pieces else self.ranks[0].masters[0].dtype
        return Joined(shape, dtype, tuple(pieces))

    def _tensor(
        self, name: str, place: int, shape: tuple[int, ...], pieces: dict[str, list[Piece] | None]
    ) -> ForeignTensor:
        rank = self.ranks[0]
        place = min(place, len(rank.states) - 1)
        joined = {key: self._joined(name, shape, found) for key, found in pieces.items()}
        value, states = joined.pop(_MASTER), dict[str, State](joined)
        step = number(rank.states[place].get("step"))
        if step is not None:
            states["step"] = step
        group = rank.groups[rank.group_of[place]] if rank.groups else {}
        options = {k: v for k, v in plain_options(group).items() if k != "step"}
        return ForeignTensor(name, value, True, states, options)

    def _untrained(self) -> Iterator[ForeignTensor]:
        """Frozen parameters and buffers."""
        module = get(self.model, self.model.value, "module", dict, {})
        buffers = get(self.model, self.model.value, "buffer_names", list, [])
        frozen = get(self.model, self.model.value, "frozen_param_shapes", dict, {})
        for name, shape in frozen.items():
            yield ForeignTensor(name, self._frozen(name, shape_of(self.model, name, shape)))
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
            part = get(model, model.value, "frozen_param_fragments", dict).get(name)
            if not isinstance(part, LazyTensor):
                raise damaged(model, f"it has no part of the frozen parameter '{shown(name)}'")
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
            yield f"the client state ({', '.join(map(shown, own[:10]))})"
        first = get(self.ranks[0].file, self.ranks[0].file.value, "optimizer_state_dict", dict)
        if first.get("dynamic_loss_scale"):
            yield "the dynamic loss scale"
        taken = {"step", *self._state_tensors}
        lost = sorted({str(key) for state in self.ranks[0].states for key in state} - taken)
        if lost:
            names = ", ".join(map(shown, lost[:10]))
            yield f"states of the optimizer that are not of each element ({names})"
        yield "states of random number generators, which DeepSpeed does not save"


def _with_step(state: Any, step: Any) -> dict[Any, Any]:
    """A state with its step, which some optimizers keep in the group."""
    found = dict(state) if isinstance(state, dict) else {}
    return found if step is None or "step" in found else {**found, "step": step}


def _params(file: TorchFile, group: Any) -> list[int]:
    found = group.get("params") if isinstance(group, dict) else None
    if not isinstance(found, list) or not all(type(index) is int for index in found):
        raise damaged(file, "a group of its optimizer has no parameters")
    return found
