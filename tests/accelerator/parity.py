"""One way to train under a plan, on an accelerator and as one plain process, and what they differ in.

``test_parity.py`` chooses the ways. The plain process works on the CPU on the batches of all ranks.
For mixed precision it computes what the plan says: each rank's gradients in bfloat16, from weights
that are rounded, summed and updated in float32.
"""

import contextlib
import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.plans.plan import Plan, Precision, Tiers, Tiling
from shardwise.runtime.activations import offload
from tests.accelerator.accelerators import Seen, chosen
from tests.models import TinyGPT, batch, largest_difference, make, mine

STEPS = 3
MIXED = Precision(compute="bfloat16", reduce="float32", master="float32")
FROZEN = ("blocks.1.", "blocks.0.up.bias")
"""A whole unit, and one parameter of another."""


def _kept(keep: str) -> Plan:
    return replace(sw.presets.zero3(keep=keep), keep_until="step")


PLANS: dict[str, tuple[str, Plan]] = {
    "alone": ("world=1", sw.presets.zero3()),
    "zero3": ("node=1,world=2", sw.presets.zero3()),
    "fsdp keep=full": ("world=2", sw.presets.fsdp(reshard_after_forward=False)),
    "keep=full until step": ("node=1,world=2", _kept("full")),
    "ddp": ("node=1,world=2", sw.presets.ddp()),
    "zero1": ("node=1,world=2", sw.presets.zero1()),
    "zero2": ("node=1,world=2", sw.presets.zero2()),
    "zero3 keep=node": ("node=2,world=2", sw.presets.zero3(keep="node")),
    "keep=node until step": ("node=2,world=2", _kept("node")),
    "amsp": ("node=2,world=2", sw.presets.amsp()),
    "hsdp": ("node=2,world=2", sw.presets.hsdp()),
}
"""Each with its grid of ranks."""
TIERS: dict[str, tuple[str, str, str]] = {
    "none": ("device", "device", "device"),
    "P cpu": ("cpu", "device", "device"),
    "G cpu": ("device", "cpu", "device"),
    "OS cpu": ("device", "device", "cpu"),
    "all cpu": ("cpu", "cpu", "cpu"),
    "P nvme": ("nvme", "device", "device"),
    "G nvme": ("device", "nvme", "device"),
    "OS nvme": ("device", "device", "nvme"),
    "all nvme": ("nvme", "nvme", "nvme"),
    "mixed": ("device", "cpu", "nvme"),
}
"""Where P, G and OS rest."""


@dataclass(frozen=True)
class Way:
    """One way to train; ``test_parity.py`` has the choices."""

    plan: str = "zero3"
    tiers: str = "none"
    activations: str = "keep"
    dtype: str = "float64"
    rounds: str = "one"
    """``one`` micro-batch a step, or three: with ``no_sync``, or each ``reduced``."""
    clip: bool = False
    tiled: bool = False
    deferred: bool = False
    checkpoint: str = "none"
    """The model's own: ``reentrant`` or ``plain`` (not reentrant)."""
    update: str = "step"
    optimizer: str = "adamw"
    frozen: bool = False
    delay: str = "none"

    def __str__(self) -> str:
        default = Way()
        names = (name for name in self.__dataclass_fields__ if name != "plan")
        changed = [n for n in names if getattr(self, n) != getattr(default, n)]
        words = [n if (v := getattr(self, n)) is True else f"{n}={v}" for n in changed]
        return ", ".join([self.plan, *words])

    @property
    def world(self) -> int:
        world = 1
        for level in PLANS[self.plan][0].split(","):
            world *= int(level.partition("=")[2])
        return world

    @property
    def micro_batches(self) -> int:
        return 1 if self.rounds == "one" else 3

    @property
    def on_device(self) -> bool:
        """Whether nothing rests on a tier."""
        return self.tiers == "none" and self.activations in ("keep", "recompute")

    def full_plan(self, folder: str) -> Plan:
        plan = PLANS[self.plan][1]
        states = ("params", "grads", "optim")
        rests = {
            state: replace(getattr(plan, state), tier=tier)
            for state, tier in zip(states, TIERS[self.tiers], strict=True)
        }
        return replace(
            plan,
            **rests,
            activations=self.activations,
            precision=MIXED if self.dtype == "mixed" else plan.precision,
            tiling=Tiling(numel=700) if self.tiled else plan.tiling,
            # Windows cut every flat of the model.
            tiers=Tiers(path=folder, window_numel=4096, update=self.update),
            min_unit_numel=1000,
        )


@dataclass
class Outcome:
    """What was seen on a rank, and how far it is from the plain process."""

    loss_difference: float
    """Relative."""
    norm_difference: float
    """Relative."""
    parameter_difference: float
    seen: Seen
    """Of the last step; races of all."""
    extra_gathers: int
    offloaded_bytes: int
    """Activations that went to a tier."""


class Checkpointed(TinyGPT):
    """Recomputes its blocks by itself."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x)) * self.temperature


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


KINDS = {"none": TinyGPT, "plain": Checkpointed, "reentrant": CheckpointedReentrantly}


def build(way: Way) -> nn.Module:
    model = make(KINDS[way.checkpoint], torch.float64 if way.dtype == "float64" else torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (way.frozen and name.startswith(FROZEN)))
    return model


def optimizers(name: str, model: nn.Module) -> list[Optimizer]:
    """One optimizer, with groups or without, or two for parts of the model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    some, rest = parameters[:5], parameters[5:]
    adamw, options = torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}
    if name == "groups":
        return [adamw([{"params": some, "lr": 2e-2}, {"params": rest, "foreach": True}], **options)]
    if name == "two":
        return [adamw(some, **options), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]
    return [adamw(parameters, **options, fused=True if name == "fused" else None)]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- the plain process ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


@cache
def expected(way: Way, world: int) -> Expected:
    """What one plain process gets; ``way`` has defaults wherever only shardwise sees a difference."""
    model, mixed = build(way), way.dtype == "mixed"
    opts = optimizers(way.optimizer, model)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for index in range(way.micro_batches):
            rows = batch(step * way.micro_batches + index)
            if mixed:
                total += _mixed_backward(model, rows, world)
            else:
                loss = loss_of(model, *rows)
                loss.backward()
                total += loss.item()
        if way.clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for optimizer in opts:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
    return Expected(losses, norms, {n: p.detach() for n, p in model.named_parameters()})


def _mixed_backward(model: nn.Module, rows: tuple[torch.Tensor, ...], world: int) -> float:
    """Gradients of each rank's rows in bfloat16, added to the model's in float32; the mean loss."""
    total = 0.0
    for rank in range(world):
        rounded = copy.deepcopy(model).bfloat16()
        for parameter in rounded.parameters():
            parameter.grad = None
        loss = loss_of(rounded, *(t.chunk(world)[rank] for t in rows))
        loss.backward()
        total += loss.item() / world
        for parameter, computed in zip(model.parameters(), rounded.parameters(), strict=True):
            if computed.grad is not None:
                grad = computed.grad.float() / world
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    return total


# --- the accelerator ------------------------------------------------------------------------------


@contextlib.contextmanager
def late(delay: str) -> Iterator[None]:
    """Inside, streams are late."""
    chosen().delay(delay, 300)
    try:
        yield
    finally:
        chosen().delay("none")


def on_device(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """This rank's rows; from pinned memory, so that the host does not wait for the copies."""
    return tuple(t.pin_memory().to(chosen().device, non_blocking=True) for t in mine(*rows))


def sharded(way: Way, folder: str) -> tuple[nn.Module, list[Optimizer]]:
    """The model and its optimizers under a plan."""
    offload.SMALL_BYTES = 1 << 8  # inputs of this model's units are large enough to leave memory
    gc.collect()  # the lanes of a model that is not used any more wait for their streams
    levels, _ = PLANS[way.plan]
    with sw.deferred_init() if way.deferred else contextlib.nullcontext():
        model = build(way)
    made = optimizers(way.optimizer, model)
    sw.shard(model, made[0], way.full_plan(folder), levels=levels, timeout_s=30.0)
    if way.deferred:  # draws other numbers than a model that is made at once
        copy_values(model, build(way))
    return model, made


def copy_values(model: nn.Module, like: nn.Module) -> None:
    with sw.full_params(model, write=True), torch.no_grad():
        values = dict(like.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


class Training:
    """Steps of a sharded model; losses and norms stay where they are computed."""

    def __init__(self, model: nn.Module, made: list[Optimizer], way: Way) -> None:
        self.model, self.optimizers, self.way = model, made, way
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def backwards(self, step: int) -> None:
        """Forward and backward of a step's micro-batches."""
        count, total = self.way.micro_batches, []
        for index in range(count):
            rows = on_device(batch(step * count + index))
            waits = self.way.rounds == "no_sync" and index < count - 1
            with sw.no_sync(self.model) if waits else contextlib.nullcontext():
                loss = loss_of(self.model, *rows)
                loss.backward()
            total.append(loss.detach())
        self.losses.append(torch.stack(total).sum())

    def update(self) -> None:
        if self.way.clip:
            self.norms.append(sw.clip_grad_norm_(self.model, 0.5))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, step: int) -> None:
        self.backwards(step)
        self.update()

    def mean_losses(self) -> list[float]:
        totals = torch.stack([loss.double().cpu() for loss in self.losses])
        dist.all_reduce(totals)
        return (totals / dist.get_world_size()).tolist()


def reference(way: Way) -> Expected:
    """The plain process's result for what it is told of a way."""
    known = ("dtype", "clip", "optimizer", "frozen")
    told = {name: getattr(way, name) for name in known}
    rounds = "one" if way.rounds == "one" else "reduced"
    return expected(Way(**told, rounds=rounds), way.world if way.dtype == "mixed" else 1)


def compare(way: Way, training: Training, seen: Seen) -> Outcome:
    """How far a finished training is from the plain process; ends it."""
    model, plain = training.model, reference(way)
    got = sw.state_dict(model, rank0_only=False, master=True)
    got = {name: got[name] for name in plain.parameters}
    outcome = Outcome(
        loss_difference=_relative(training.mean_losses(), plain.losses),
        norm_difference=_relative([float(norm) for norm in training.norms], plain.norms),
        parameter_difference=largest_difference(got, plain.parameters),
        seen=seen,
        extra_gathers=sw.stats(model)["extra_gathers"],
        offloaded_bytes=runtime_of(model).activations.moved.out_bytes,
    )
    sw.unshard(model)
    return outcome


def _relative(got: list[float], wanted: list[float]) -> float:
    pairs = zip(got, wanted, strict=True)
    return max((abs(one - other) / abs(other) for one, other in pairs), default=0.0)


def train(way: Way, folder: str) -> Outcome:
    """Runs on every rank: some steps of a way, the last of them watched on its own."""
    with late(way.delay):
        model, made = sharded(way, folder)
        assert {p.device for p in model.parameters()} == {chosen().device}
        training = Training(model, made, way)
        with chosen().watch() as first:
            for step in range(STEPS - 1):
                training.step(step)
        with chosen().watch() as seen:
            training.step(STEPS - 1)
    if seen.races is not None:
        seen.races += first.races or []
    return compare(way, training, seen)
