"""Checkpoints that DeepSpeed itself writes, read by us: every weight and state has the same bits.

    PYTHON_WITH_DEEPSPEED benchmarks/zero_checkpoints.py [--world 2] [--keep FOLDER]

Trains a small model for three steps on CPU ranks under ZeRO-1, 2 and 3 (two parameter groups, odd
sizes, tied and frozen parameters, a buffer; in bfloat16 and float32; ZeRO-3 with subgroups), saves
it, asks DeepSpeed for its full fp32 weights and states, and compares them with what
``shardwise import`` reads from the folder. The fixtures of the tests have this layout.
"""

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from shardwise.checkpoint.foreign.deepspeed import read_deepspeed

STEPS, MICRO_BATCH = 3, 2
CASES = [
    *((str(stage), dtype) for stage in (1, 2, 3) for dtype in ("bfloat16", "float32")),
    ("1 aligned", "bfloat16"),
    ("2 round robin", "float32"),
]


class Net(nn.Module):
    """Odd sizes, tied and frozen parameters, a parameter of one element, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.arange(3.0))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(torch.tanh(self.inner(self.embed(tokens))))) * self.scale


def settings(case: str, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": int(case[0])},
    }
    if "aligned" in case:
        found["zero_optimization"]["parameter_alignment"] = True
    if "round robin" in case:
        found["zero_optimization"]["round_robin_gradients"] = True
    if dtype == "bfloat16":
        found["bf16"] = {"enabled": True}
    if case == "3":
        found["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 20,
        }
    return found


def train(rank: int, world: int, port: int, root: str) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", rank=rank, world_size=world)
    for case, dtype in CASES:
        run(rank, world, f"{root}/{folder_of(case, dtype)}", settings(case, dtype))


def folder_of(case: str, dtype: str) -> str:
    return f"zero{case}-{dtype}".replace(" ", "-")


def run(rank: int, world: int, folder: str, config: dict[str, Any]) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(0)
    model = Net()
    small = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    large = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    groups = [{"params": large, "lr": 1e-2}, {"params": small, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        tokens = torch.randint(11, (MICRO_BATCH, 5))
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    full = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            full[name] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                full[f"state.{name}.{key}"] = full_state(engine.optimizer, parameter, key)
    if rank == 0:
        torch.save(full, f"{folder}/truth.pt")


def full_state(optimizer: Any, parameter: Any, key: str) -> torch.Tensor:
    """A state by DeepSpeed's own map of where a parameter's elements are."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, key).clone()
    found = torch.zeros(parameter.numel())
    mapping = parameter._hp_mapping
    if mapping is not None:  # this rank has some of its elements
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
        part = optimizer.optimizer.state[flat][key][there.start : there.start + there.numel]
        found[here.start : here.start + here.numel] = part
    torch.distributed.all_reduce(found)
    return found


def compare(folder: Path) -> int:
    """Compare all that is read with what DeepSpeed said; returns the number of tensors."""
    truth = torch.load(folder / "truth.pt", weights_only=True)
    found, seen = read_deepspeed(folder), set()
    for tensor in found.tensors:
        values = {tensor.name: tensor.value}
        values |= {f"state.{tensor.name}.{key}": state for key, state in tensor.states.items()}
        for name, value in values.items():
            if isinstance(value, int | float):
                assert value == STEPS, (name, value)
            elif name in truth:
                expected = truth[name].reshape(-1).float()
                assert value.dtype == torch.float32, name
                assert torch.equal(value.flat(0, expected.numel()), expected), name
                seen.add(name)
        if tensor.trained:
            large = len(tensor.value.shape) > 1
            assert tensor.options["lr"] == (1e-2 if large else 1e-3), tensor.options
            assert tensor.options["weight_decay"] == (0.1 if large else 0.2), tensor.options
    assert seen == truth.keys(), seen ^ truth.keys()
    names = {tensor.name for tensor in found.tensors}
    assert names | found.aliases.keys() == set(Net().state_dict()), names
    assert found.step == STEPS
    torch.manual_seed(0)
    fresh = Net().state_dict()
    for tensor in found.tensors:
        if tensor.name.startswith("frozen") or tensor.name == "seen":
            value = tensor.value.flat(0, tensor.numel).float()
            expected = fresh[tensor.name].reshape(-1)
            assert torch.equal(value, expected.to(tensor.value.dtype).float()), tensor.name
    assert sum(found.verify()) > 0
    return len(truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where the folders stay")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train, (args.world, port, str(root)), nprocs=args.world)
    for case, dtype in CASES:
        count = compare(root / folder_of(case, dtype))
        print(f"zero{case}, {dtype}, {args.world} ranks: {count} tensors have the same bits")


if __name__ == "__main__":
    sys.exit(main())
