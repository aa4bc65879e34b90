"""What training takes on a device: FSDP2's figures, and the same ones of anything else.

Both are measured on ranks of the same pool, in one function or two:

    theirs = fsdp2_figures(TinyGPT)
    ours = figures_of(lambda device: sw.shard(*built(TinyGPT, device), plan="zero3"))

``python -m tests.accelerator.figures`` prints the table of ``docs/gpus.md``: ``zero3`` beside FSDP2.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.model.gpt import GPT
from shardwise.plans.plan import Precision
from tests.accelerator.accelerators import Seen, chosen, prepare
from tests.accelerator.needs import loss_of, shape
from tests.harness import Workers
from tests.models import batch, lm_loss, make, mine

WARM_STEPS = 2
"""The first creates the optimizer's states; what is recorded or cached is there after the second."""

Trained = tuple[nn.Module, Optimizer]


def _tokens(step: int) -> tuple[torch.Tensor, ...]:
    return mine(*batch(step))


@dataclass(frozen=True)
class Task:
    """What a model is trained on; by default a small language model on ``tests.models.batch``."""

    rows: Callable[[int], tuple[torch.Tensor, ...]] = _tokens
    """This rank's batch of a step."""
    loss: Callable[..., torch.Tensor] = lm_loss
    clip: Callable[[nn.Module], object] | None = None
    """Called after each backward."""


@dataclass(frozen=True)
class Figures:
    """What training takes on this rank; memory without what was there before."""

    losses: list[float]
    """Of all steps, mean over ranks."""
    at_rest_bytes: int
    """Device memory between steps, without gradients."""
    peak_bytes: int
    """The most device memory at once in a step."""
    launches: float
    """Kernels, copies and collectives a step."""
    launches_by_name: dict[str, float]
    host_waits: dict[str, float] | None
    """How often the host waited a step, by kind; only the simulated device counts it."""
    races: list[str] | None


def built(
    kind: type[nn.Module], device: torch.device, dtype: torch.dtype = torch.float32
) -> Trained:
    """A model, with equal values on all ranks, and torch's fused AdamW."""
    model = make(kind, dtype).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def fsdp2_figures(
    kind: type[nn.Module], dtype: torch.dtype = torch.float32, *, steps: int = 3, **options: Any
) -> Figures:
    """FSDP2 over all ranks; each of the model's ``blocks`` is gathered on its own. ``options`` are
    those of ``fully_shard``."""
    from torch.distributed.fsdp import fully_shard

    def shard(device: torch.device) -> Trained:
        model, _ = built(kind, device, dtype)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        return model, optimizer

    return figures_of(shard, steps=steps)


def figures_of(
    build: Callable[[torch.device], Trained], *, steps: int = 3, task: Task | None = None
) -> Figures:
    """Builds a model and its optimizer and trains."""
    task = task or Task()
    accelerator = chosen()
    device = accelerator.device
    # There before the rest, so that neither their memory nor their copies count.
    batches = [tuple(t.to(device) for t in task.rows(step)) for step in range(WARM_STEPS + steps)]
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    model, optimizer = build(device)
    losses = []

    def train(part: list[tuple[torch.Tensor, ...]]) -> None:
        for rows in part:
            loss = task.loss(model, *rows)
            loss.backward()
            if task.clip is not None:
                task.clip(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

    with accelerator.watch() as warm:
        train(batches[:WARM_STEPS])
    with accelerator.watch() as seen:
        train(batches[WARM_STEPS:])
    return Figures(
        losses=_mean_over_ranks(losses),
        at_rest_bytes=seen.end_bytes - before,
        peak_bytes=max(warm.peak_bytes, seen.peak_bytes) - before,
        launches=seen.launch_count / steps,
        launches_by_name={name: count / steps for name, count in seen.launches.items()},
        host_waits=_per_step(seen, steps),
        races=None if seen.races is None else [*(warm.races or []), *seen.races],
    )


def _per_step(seen: Seen, steps: int) -> dict[str, float] | None:
    if seen.host_waits is None:
        return None
    return {kind: count / steps for kind, count in seen.host_waits.items()}


def _mean_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    total = torch.stack(losses).double().cpu()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


# --- zero3 beside FSDP2 ----------------------------------------------------------------------------

MAX_NORM = 1e-3
"""So small that gradients are always scaled."""


@dataclass(frozen=True)
class Setting:
    """How both are trained."""

    mixed: bool
    """In bfloat16 with float32 masters, instead of float32."""
    clips: bool

    def __str__(self) -> str:
        dtype = "bfloat16" if self.mixed else "float32"
        return f"{dtype}, clipped" if self.clips else dtype


SETTINGS = [Setting(mixed, clips) for mixed, clips in product((False, True), repeat=2)]


def zero3_beside_fsdp2(setting: Setting) -> tuple[Figures, Figures]:
    """Ours, and FSDP2's: the same GPT on the same batches."""
    ours = figures_of(
        lambda device: _zero3(device, setting),
        task=_gpt_task(setting, lambda model: sw.clip_grad_norm_(model, MAX_NORM)),
    )
    theirs = figures_of(
        lambda device: _fsdp2_gpt(device, setting),
        task=_gpt_task(
            setting, lambda model: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        ),
    )
    return ours, theirs


def _gpt_task(setting: Setting, clip: Callable[[nn.Module], object]) -> Task:
    def rows(step: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1000 + step)
        size = (2 * dist.get_world_size(), 128)
        return mine(torch.randint(shape().vocab, size, generator=generator))

    return Task(rows, loss_of, clip if setting.clips else None)


def _gpt(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with (
        device
    ):  # tied parameters stay tied: `.to` makes new ones on devices that are not torch's own
        return GPT(shape())


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _zero3(device: torch.device, setting: Setting) -> Trained:
    model = _gpt(device)
    precision = Precision(compute="bfloat16" if setting.mixed else None)
    return sw.shard(model, _adamw(model), plan=sw.presets.zero3(precision=precision))


def _fsdp2_gpt(device: torch.device, setting: Setting) -> Trained:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = _gpt(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setting.mixed else None)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, _adamw(model)


def table() -> str:
    """Figures of rank 0 of two, in Markdown."""
    pool = Workers(2, prepare)
    lines = [
        "| | at rest | at peak | launches a step | waits of the host a step |",
        "|---|---|---|---|---|",
    ]
    try:
        for setting in SETTINGS:
            for name, found in zip(
                ("zero3", "FSDP2"), pool.run(zero3_beside_fsdp2, setting)[0], strict=True
            ):
                waits = "" if found.host_waits is None else f"{sum(found.host_waits.values()):.0f}"
                lines.append(
                    f"| {name}, {setting} | {found.at_rest_bytes / 1e6:.2f} MB "
                    f"| {found.peak_bytes / 1e6:.2f} MB | {found.launches:.0f} | {waits} |"
                )
    finally:
        pool.stop()
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
