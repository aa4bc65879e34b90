"""Writes folders as DeepSpeed's ZeRO-1, 2 and 3 lay them out, with ``torch.save`` and without DeepSpeed.

The layout was compared with folders that DeepSpeed 0.19.8 wrote on two ranks: the same files, and
in them the same entries and kinds, but for a few that are not read (``benchmarks/zero_checkpoints.py``
makes such folders where DeepSpeed is installed, and reads them). What a fixture has:

- ``latest``: the name of the folder beside it.
- ``*_optim_states.pt`` of each rank: ``optimizer_state_dict`` with ``zero_stage`` (an enum of
  DeepSpeed), ``loss_scaler`` (an object of DeepSpeed), the partition count, its part of the flat
  fp32 weights, and the base optimizer's ``state`` and ``param_groups``. Under ZeRO-1 and 2 weights
  come without the padding at the end of a group, and states with it.
- ``*_model_states.pt``: the module's tensors (placeholders for parameters under ZeRO-3), shapes in
  the order of the flat weights, frozen parameters, tied names, buffers.
"""

import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

STATES = ("exp_avg", "exp_avg_sq")
TAG = "global_step3"


@dataclass
class Model:
    """What is saved; the states of a parameter are made from its values."""

    groups: list[dict[str, torch.Tensor]]
    """Trained parameters by parameter group, in fp32."""
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    """Of the weights that a step computes with."""

    def state(self, value: torch.Tensor, key: str) -> torch.Tensor:
        return {"fp32": value, "exp_avg": value * 0.5 + 1, "exp_avg_sq": value * value}[key]


@contextmanager
def _classes() -> Iterator[tuple[type, type, type]]:
    """Classes under the names of DeepSpeed's, for as long as something is pickled."""
    paths = ("", ".runtime", ".runtime.zero", ".runtime.zero.config", ".runtime.fp16", ".utils")
    last = (".runtime.fp16.loss_scaler", ".utils.tensor_fragment")
    modules = {f"deepspeed{p}": types.ModuleType(f"deepspeed{p}") for p in (*paths, *last)}
    config = modules["deepspeed.runtime.zero.config"]
    scaler, fragment = (modules[f"deepspeed{path}"] for path in last)

    class ZeroStageEnum(int, enum.Enum):
        optimizer_states, gradients, weights = 1, 2, 3

    class LossScaler:
        def __init__(self) -> None:
            self.cur_scale = 1

    @dataclass
    class fragment_address:
        numel: int
        start: int

    for kind, module in (
        (ZeroStageEnum, config), (LossScaler, scaler), (fragment_address, fragment),
    ):  # fmt: skip
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    with mock.patch.dict(sys.modules, modules):
        yield ZeroStageEnum, LossScaler, fragment_address


def write(path: Path, model: Model, *, stage: int, world: int, **options: object) -> Path:
    """Write a folder; ``options``: sub_groups (ZeRO-3), elastic and gap
    (ZeRO-1, 2: elements between parameters), extra (client state)."""
    folder = path / TAG
    folder.mkdir(parents=True)
    (path / "latest").write_text(TAG)
    with _classes() as (stage_enum, loss_scaler, address):
        for rank in range(world):
            saved = {"zero_stage": stage_enum(stage), "loss_scaler": loss_scaler()}
            saved |= {"dynamic_loss_scale": False, "overflow": False, "ds_version": "0.19.6"}
            if stage < 3:
                elastic, gap = bool(options.get("elastic")), int(options.get("gap", 0))
                saved |= _flat(model, rank, world, elastic=elastic, gap=gap)
                saved |= {"clip_grad": 1.0, "param_slice_mappings": [{"a": address(3, 0)}]}
            else:
                saved |= _sharded(model, rank, world, int(options.get("sub_groups", 1)))
            prefix = "bf16_" if model.dtype is torch.bfloat16 else ""
            torch.save(
                {
                    "optimizer_state_dict": saved,
                    "ds_config": {"zero": stage},
                    "ds_version": "0.19.6",
                },
                folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
            if stage == 3 or not rank:
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                torch.save(
                    _module(model, stage, rank, world, options),
                    folder / f"{prefix}mp_rank_00_model_states.pt",
                )
    return path


def _sub_groups(model: Model, count: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Parameter groups, each cut into subgroups of ``count`` parameters."""
    found = []
    for number, group in enumerate(model.groups):
        items = list(group.items())
        step = count if count > 1 else len(items)
        found += [(number, dict(items[at : at + step])) for at in range(0, len(items), step)]
    return found


def _module(model: Model, stage: int, rank: int, world: int, options: dict) -> dict:
    every = {name: value for group in model.groups for name, value in group.items()}
    tensors = {**{n: v.to(model.dtype) for n, v in every.items()}, **model.frozen}
    shapes = model.groups
    if stage == 3:
        tensors = {name: torch.empty(0, dtype=model.dtype) for name in tensors}
        shapes = [group for _, group in _sub_groups(model, int(options.get("sub_groups", 1)))]
    tensors |= {alias: tensors[name] for alias, name in model.shared.items()} | model.buffers
    frozen, fragments = None, None
    if stage > 1:
        frozen = OrderedDict((name, value.shape) for name, value in model.frozen.items())
        fragments = OrderedDict(
            (name, _part(value, rank, world) if stage == 3 else value)
            for name, value in model.frozen.items()
        )
    return {
        "module": OrderedDict(tensors), "buffer_names": list(model.buffers), "optimizer": None,
        "param_shapes": [OrderedDict((n, v.shape) for n, v in g.items()) for g in shapes],
        "frozen_param_shapes": frozen, "shared_params": dict(model.shared),
        "frozen_param_fragments": fragments, "lr_scheduler": {"last_batch_iteration": 3},
        "data_sampler": None, "random_ltd": None, "checkpoint_parallel_dimensions": {},
        "skipped_steps": 0, "global_steps": 3, "global_samples": 12, "dp_world_size": world,
        "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.6",
        **(options.get("extra") or {}),
    }  # fmt: skip


def _part(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A rank's part of a tensor that was padded with zeros to equal parts."""
    part = -(-value.numel() // world)
    padded = torch.zeros(part * world, dtype=value.dtype)
    padded[: value.numel()] = value.reshape(-1)
    return padded[rank * part : (rank + 1) * part].clone()


def _groups(model: Model, indices: list[list[int]]) -> list[dict]:
    return [
        {"lr": 0.1 / (g + 1), "betas": (0.9, 0.99), "weight_decay": 0.1 * g, "params": indices[g]}
        for g in range(len(model.groups))
    ]


def _flat(model: Model, rank: int, world: int, *, elastic: bool, gap: int) -> dict:
    masters, states, paddings = [], {}, []
    gaps = [[gap] * (len(group) - 1) + [0] for group in model.groups]
    for number, group in enumerate(model.groups):
        numel = sum(value.numel() for value in group.values()) + sum(gaps[number])
        part = -(-numel // (2 * world)) * 2
        kept = max(0, min(part, numel - rank * part))
        flats = {}
        for key in ("fp32", *STATES):
            flat = torch.full((part * world,), 7.0)  # padding need not be zero
            at = 0
            for value, after in zip(group.values(), gaps[number], strict=True):
                flat[at : at + value.numel()] = model.state(value, key).reshape(-1)
                at += value.numel() + after
            flats[key] = flat[rank * part : (rank + 1) * part].clone()
        masters.append(flats["fp32"][:kept])
        paddings.append(part - kept)
        states[number] = {"step": torch.tensor(3.0), **{key: flats[key] for key in STATES}}
    base: object = {"state": states, "param_groups": _groups(model, [[g] for g in states])}
    more = {}
    if elastic:
        lean = lambda key, value, g: value if key == "step" else value[: masters[g].numel()]  # noqa: E731
        base = [{k: lean(k, v, g) for k, v in state.items()} for g, state in states.items()]
        more["base_optimizer_state_step"] = 3
    return {
        "base_optimizer_state": base, "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings, "partition_count": [world] * len(masters),
        **({"param_alignment_paddings": gaps} if gap else {}), **more,
    }  # fmt: skip


def _sharded(model: Model, rank: int, world: int, count: int) -> dict:
    subs, indices = _sub_groups(model, count), [[] for _ in model.groups]
    flats = {key: [] for key in ("fp32", *STATES)}
    for place, (number, group) in enumerate(subs):
        indices[number].append(place)
        for key, found in flats.items():
            parts = [_part(model.state(value, key), rank, world) for value in group.values()]
            found.append(torch.cat(parts))
    states = {
        place: {"step": torch.tensor(3.0), **{key: flats[key][place] for key in STATES}}
        for place in range(len(subs))
    }
    base = {"state": states, "param_groups": _groups(model, indices)}
    return {
        "optimizer_state_dict": base, "fp32_flat_groups": flats["fp32"], "partition_count": world,
    }  # fmt: skip
