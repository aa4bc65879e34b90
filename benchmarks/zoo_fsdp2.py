"""Which unmodified transformers models train, and equal one process, under FSDP2 and shardwise?

    torchrun --nproc-per-node 2 benchmarks/zoo_fsdp2.py [name ...]

FSDP2 is applied as in its tutorial: ``fully_shard`` on every block, then on the model. Both get the
same tiny models, blocks, batches and optimizer; results are compared with one plain process.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shardwise as sw
from tests.zoo.configs import CASES, Batch, Case, batch, expand, loss_of, make, make_adapted

STEPS = 2


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def part(whole: Batch, rank: int) -> Batch:
    return {name: tensor.chunk(dist.get_world_size())[rank] for name, tensor in whole.items()}


# --- the two ways to shard ------------------------------------------------------------------------


@dataclass(frozen=True)
class FSDP2:
    name = "fsdp2"

    def shard(self, case: Case, model: nn.Module) -> torch.optim.Optimizer:
        for name in expand(case.units):
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        return adamw(model)

    def values(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {
            n: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
            for n, p in model.named_parameters()
        }


@dataclass(frozen=True)
class Shardwise:
    name = "shardwise"

    def shard(self, case: Case, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        plan = replace(sw.presets.zero3(), min_unit_numel=case.min_unit_numel)
        sw.shard(model, optimizer, plan=plan, levels=f"world={dist.get_world_size()}")
        return optimizer

    def values(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return sw.state_dict(model, rank0_only=False)


Engine = FSDP2 | Shardwise

# --- what is tried --------------------------------------------------------------------------------


def try_training(case: Case, engine: Engine, build: Callable[[], nn.Module]) -> str:
    """Train beside a plain model, whose gradients are means over the same slices."""
    world, rank = dist.get_world_size(), dist.get_rank()
    plain, model = build(), build()
    expected_optimizer = adamw(plain)
    optimizer = engine.shard(case, model)
    loss_tolerance, tolerance = case.tolerances
    for step in range(STEPS):
        whole = batch(case, step)
        expected = 0.0
        for index in range(world):
            loss = loss_of(case, plain, part(whole, index)) / world
            loss.backward()
            expected += loss.item()
        expected_optimizer.step()
        expected_optimizer.zero_grad()
        loss = loss_of(case, model, part(whole, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        if abs(total.item() / world - expected) > loss_tolerance:
            return f"loss {total.item() / world:.6g} instead of {expected:.6g} in step {step + 1}"
    values = engine.values(model)
    worst = max(
        (values[n].double() - p.detach().double()).abs().max().item()
        for n, p in plain.named_parameters()
    )
    return "ok" if worst <= tolerance else f"parameters differ by {worst:.1e}"


def try_checkpointing(case: Case, engine: Engine, use_reentrant: bool) -> str:
    def build() -> nn.Module:
        model = make(case)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model

    return try_training(case, engine, build)


def try_generating(case: Case, engine: Engine) -> str:
    plain, model = make(case).eval(), make(case).eval()
    inputs = part({n: t for n, t in batch(case, 0).items() if n != "labels"}, dist.get_rank())
    options = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
    engine.shard(case, model)
    same = torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options))
    return "ok" if same else "other tokens"


def rows() -> dict[str, Callable[[Engine], str]]:
    found: dict[str, Callable[[Engine], str]] = {}
    for name, case in CASES.items():
        found[name] = lambda engine, case=case: try_training(case, engine, lambda: make(case))
    for name in ("gpt2", "t5", "deberta_v2"):
        for reentrant in (False, True):
            label = f"{name}, {'reentrant ' if reentrant else ''}checkpointing"
            found[label] = lambda engine, case=CASES[name], reentrant=reentrant: try_checkpointing(
                case, engine, reentrant
            )
    adapted = replace(CASES["llama"], dtype=torch.float32)
    found["llama, float32 adapters, bfloat16 base"] = lambda engine: try_training(
        adapted, engine, make_adapted
    )
    for name in ("gpt2", "llama", "mixtral", "mamba", "t5", "bart", "whisper"):
        found[f"{name}, generate"] = lambda engine, case=CASES[name]: try_generating(case, engine)
    return found


def attempt(run: Callable[[Engine], str], engine: Engine) -> str:
    try:
        return run(engine)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only rows that begin with one of these")
    names = tuple(parser.parse_args().names)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    show = print if dist.get_rank() == 0 else lambda *_, **__: None
    show("| model | fsdp2 | shardwise |\n|---|---|---|", flush=True)
    good = {"fsdp2": 0, "shardwise": 0}
    chosen = {label: run for label, run in rows().items() if label.startswith(names or "")}
    for label, run in chosen.items():
        results = {engine.name: attempt(run, engine) for engine in (FSDP2(), Shardwise())}
        for name, result in results.items():
            good[name] += result == "ok"
        show(f"| {label} | {results['fsdp2']} | {results['shardwise']} |", flush=True)
    show(f"| of {len(chosen)} | {good['fsdp2']} | {good['shardwise']} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
