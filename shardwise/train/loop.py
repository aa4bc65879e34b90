"""The reference trainer: build, shard, loop, validate, summarise. Plain PyTorch around `sw.shard`.

Meant to be read from top to bottom, and to be copied.
"""

import json
import math
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.auto import choose, compare_soon
from shardwise.core.errors import PlanError, ShardwiseError, UsageError
from shardwise.core.flight import RECORDER
from shardwise.planner.request import Candidate
from shardwise.plans.auto import Auto
from shardwise.plans.file import dump_plan, load_plan
from shardwise.plans.plan import Plan
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.config import ConfigError, OptimConfig, TrainConfig
from shardwise.train.data import Batches, load_tokens, validation_of
from shardwise.train.metrics import (
    METRICS_FILE,
    PLAN_FILE,
    SUMMARY_FILE,
    MetricsWriter,
    StepRecord,
    Summary,
    peak_rss_bytes,
    read_records,
    rss_bytes,
)
from shardwise.train.models import build_model, context_of, count_parameters, loss_of, vocab_of
from shardwise.train.progress import reporter


class DivergedError(ShardwiseError, ArithmeticError):
    """Training diverged: the loss is not finite."""

    exit_code = 1
    is_final = True
    """Another attempt would diverge as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything the loop works with."""

    config: TrainConfig
    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    train: Batches
    validation: Batches
    num_parameters: int
    device: torch.device
    plan: Plan
    """The plan in use: the one that the job names, or the planner's choice."""
    predicted_s: float | None = None
    """Predicted seconds per step, if the planner chose the plan."""


def train_worker(config: dict[str, Any], output: str, restarts: int = 0) -> dict[str, Any]:
    """Entry point of a worker: the job and the answer are plain data."""
    chosen = [output]  # under torchrun each rank has chosen one by its own clock
    dist.broadcast_object_list(chosen)
    ended = train(TrainConfig.model_validate(config), Path(chosen[0]), restarts)
    return {"preempted": str(ended)} if isinstance(ended, Path) else ended.to_dict()


def train(config: TrainConfig, output: Path, restarts: int = 0) -> Summary | Path:
    """Train as one rank of the process group; rank 0 writes into `output`.

    Returns the last checkpoint instead of a summary if the job was preempted.
    """
    job = build(config)
    started = time.perf_counter()
    is_first = dist.get_rank() == 0
    if is_first:
        (output / PLAN_FILE).write_text(dump_plan(job.plan), encoding="utf-8")
    records: list[StepRecord] = []
    checkpoints = Checkpoints.of(config, output, job.model, job.optimizer, job.scheduler)
    done = checkpoints.resume(config.resume)
    RECORDER.stepped(done)
    if restarts and done == config.train.steps:
        records = read_records(output / METRICS_FILE)  # it failed after its last step
    elif done >= config.train.steps:
        raise ConfigError(
            f"train.steps = {config.train.steps}, but the checkpoint was saved after step {done}; "
            "give more steps"
        )
    with (
        MetricsWriter(output / METRICS_FILE if is_first else None, done) as metrics,
        reporter(config.train.steps, visible=is_first) as progress,
    ):
        for step in range(done + 1, config.train.steps + 1):
            record = train_step(job, step)
            records.append(record)
            metrics.write(record)
            progress.show(record)
            checkpoints.after(step, last=step == config.train.steps)
            if sw.preempted(job.model) and step < config.train.steps:
                return checkpoints.save(step)
    summary = summarise(job, records, output, time.perf_counter() - started)
    if is_first:
        (output / SUMMARY_FILE).write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    return summary


def build(config: TrainConfig, *, dropout: bool = True) -> Job:
    """Model, optimizer and data of this rank."""
    torch.manual_seed(config.train.seed)
    with sw.deferred_init():
        model = build_model(config.model, dropout=dropout)
    num_parameters = count_parameters(model)
    train_batches, validation_batches = build_batches(
        config, model, rank=dist.get_rank(), world=dist.get_world_size()
    )
    optimizer: Optimizer = build_optimizer(model, config.optim)
    plan, chosen = _choose_plan(config, model)
    if config.nvme is not None:
        plan = replace(plan, tiers=replace(plan.tiers, path=config.nvme))
    if plan.tiers.update == "backward" and config.train.clip:
        raise ConfigError(
            f"train.clip = {config.train.clip} needs all gradients before anything is updated, but "
            "the plan updates in backward; set train.clip = 0, or tiers.update = 'step'"
        )
    if plan.tiers.update == "backward" and config.train.on_nonfinite == "skip":
        raise ConfigError(
            "train.on_nonfinite = 'skip' needs all gradients before anything is updated, but the "
            "plan updates in backward; set it to 'stop' or 'go on', or tiers.update = 'step'"
        )
    model, optimizer = sw.shard(
        model,
        optimizer,
        plan=plan,
        levels=config.levels,
        timeout_s=config.timeout_s,
        patience_s=config.patience_s,
    )
    if chosen is not None:
        compare_soon(runtime_of(model), chosen)
    # Weights are the same on every rank, dropout masks must differ.
    torch.manual_seed(config.train.seed + 1 + dist.get_rank())
    return Job(
        config=config,
        model=model.train(),
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config.optim, config.train.steps),
        train=train_batches,
        validation=validation_batches,
        num_parameters=num_parameters,
        device=runtime_of(model).grid.device,
        plan=plan,
        predicted_s=chosen.step_s if chosen is not None else None,
    )


def _choose_plan(config: TrainConfig, model: nn.Module) -> tuple[Plan, Candidate | None]:
    """The plan that the job names, or the planner's choice with its prediction."""
    if config.plan != "auto":
        if config.lossless:
            raise ConfigError(
                f"lossless works with plan = 'auto' only; {config.plan} sets its own wires, so "
                "remove one of the two"
            )
        return load_plan(config.plan), None
    batching = config.batching(dist.get_world_size())
    asked = Auto(
        seq=config.train.seq,
        micro_batch=batching.micro_batch,
        accumulate=batching.accumulation,
        lossless=config.lossless,
        path=config.nvme or "",
    )
    try:
        chosen = choose(model, asked, levels=config.levels)
    except (PlanError, UsageError) as error:
        raise ConfigError(f"{error} (Or name a plan instead of auto: --plan zero3.)") from error
    return chosen.plan, chosen


def build_batches(
    config: TrainConfig, model: nn.Module, *, rank: int, world: int
) -> tuple[Batches, Batches]:
    """Training and validation rows of one rank."""
    context = context_of(model)
    if context is not None and config.train.seq > context:
        raise ConfigError(
            f"train.seq = {config.train.seq} exceeds the {context} positions of {config.model.name}"
        )
    tokens = load_tokens(config.data)
    batches = Batches(
        tokens=tokens.train,
        source=config.data.source,
        seq=config.train.seq,
        global_batch=config.train.global_batch,
        vocab=vocab_of(model),
        seed=config.train.seed,
        rank=rank,
        world=world,
        accumulation=config.batching(world).accumulation,
    )
    return batches, validation_of(batches, tokens.validation)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases and norms alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def build_scheduler(optimizer: Optimizer, config: OptimConfig, steps: int) -> LambdaLR:
    """Linear warm-up, then a cosine down to `min_lr_ratio`."""

    def factor(done: int) -> float:
        if done < config.warmup_steps:
            return (done + 1) / config.warmup_steps
        share = (done - config.warmup_steps) / max(1, steps - config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine

    return LambdaLR(optimizer, factor)


def train_step(job: Job, step: int) -> StepRecord:
    """One optimizer step on one global batch."""
    started = time.perf_counter()
    options = job.config.train
    loss = accumulate_gradients(job, step)
    norm = float(sw.clip_grad_norm_(job.model, options.clip or math.inf))
    mean_loss = mean_over_ranks(loss)  # like the norm, the same on all ranks
    updates = (math.isfinite(mean_loss) and math.isfinite(norm)) or goes_on(
        job, step, mean_loss, norm
    )
    lr = float(job.scheduler.get_last_lr()[0])
    if updates:
        job.optimizer.step()
    job.scheduler.step()
    job.optimizer.zero_grad()
    step_s = time.perf_counter() - started
    is_last = step == options.steps
    validates = is_last or (options.eval_every > 0 and step % options.eval_every == 0)
    return StepRecord(
        step=step,
        loss=mean_loss,
        lr=lr,
        grad_norm=norm,
        tokens_per_s=options.global_batch * options.seq / step_s,
        step_s=step_s,
        rss_bytes=rss_bytes(),
        peak_rss_bytes=peak_rss_bytes(),
        val_loss=evaluate(job) if validates else None,
    )


def goes_on(job: Job, step: int, loss: float, norm: float) -> bool:
    """What a NaN or an Inf does: stop here, skip the update, or go on with it."""
    policy = job.config.train.on_nonfinite
    if policy == "go on":
        return True

    def forward() -> list[Tensor]:
        batches = [job.train.get(step, micro) for micro in range(job.train.accumulation)]
        rows = [batch.to(job.device) for batch in batches]
        return [loss_of(job.model(input_ids=row, labels=row)) for row in rows]

    what = "the loss" if not math.isfinite(loss) else "the norm of the gradients"
    sentence = f"{what} is {norm if math.isfinite(loss) else loss} at step {step}"
    if (place := sw.find_nonfinite(job.model, forward)) is not None:
        sentence += f": {place}"
    if policy == "stop":
        raise DivergedError(f"{sentence}; lower optim.lr, or lengthen the warm-up")
    if dist.get_rank() == 0:
        print(f"skipped: {sentence}", file=sys.stderr)
    return False


def accumulate_gradients(job: Job, step: int) -> Tensor:
    """Forward and backward of every micro-batch; returns this rank's mean loss."""
    num_micro = job.train.accumulation
    total = torch.zeros((), dtype=torch.float64, device=job.device)
    for micro in range(num_micro):
        is_last = micro == num_micro - 1
        with nullcontext() if is_last else sw.no_sync(job.model):
            rows = job.train.get(step, micro).to(job.device)
            loss = loss_of(job.model(input_ids=rows, labels=rows)) / num_micro
            loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(job: Job) -> float:
    """Mean loss on a few validation batches, the same ones every time."""
    job.model.eval()
    losses = []
    for batch in range(job.config.train.eval_batches):
        for micro in range(job.validation.accumulation):
            rows = job.validation.get(batch, micro).to(job.device)
            losses.append(loss_of(job.model(input_ids=rows, labels=rows)))
    job.model.train()
    return mean_over_ranks(torch.stack(losses).double().mean())  # half precision would round


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a scalar over all ranks, in double precision."""
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def summarise(job: Job, records: list[StepRecord], output: Path, seconds: float) -> Summary:
    """The summary of a run. Collective: every rank reports its memory."""
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_rss_bytes())
    final = records[-1]
    assert final.val_loss is not None
    return Summary(
        model=job.config.model.name,
        num_parameters=job.num_parameters,
        plan=job.config.plan,
        ranks=dist.get_world_size(),
        steps=final.step,
        first_loss=records[0].loss,
        last_loss=final.loss,
        val_loss=final.val_loss,
        tokens_per_s=statistics.median(record.tokens_per_s for record in records),
        step_s=statistics.median(record.step_s for record in records),
        predicted_step_s=job.predicted_s,
        seconds=seconds,
        peak_rss_bytes=peaks,
        metrics=str(output / METRICS_FILE),
        plan_file=str(output / PLAN_FILE),
    )
