"""A training loop that is saved every few steps, and goes on where it was when started again.

torchrun --nproc-per-node 2 examples/resume.py run/ 10
torchrun --nproc-per-node 4 examples/resume.py run/ 20 amsp    # on more ranks, under another plan
"""

import os
import sys

os.environ.setdefault(
    "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
)  # some CPUs report AMX but cannot run it

from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.model.gpt import GPT, sized

SEQ, BATCH = 64, 8  # tokens per sequence, sequences per step over all ranks


def main(run: Path, steps: int, plan: str = "zero3") -> None:
    torch.manual_seed(0)
    with sw.deferred_init():
        model = GPT(sized("gpt-tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = sw.shard(model, optimizer, plan=plan)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    rank, world = dist.get_rank(), dist.get_world_size()

    first = 0
    if (run / "latest").exists():
        first = sw.load(run, model, optimizer, scheduler=scheduler).step
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(step)  # the data's position is the step
        start = torch.randint(200, (BATCH, 1), generator=generator).chunk(world)[rank]
        tokens = (start + torch.arange(SEQ + 1)) % 256
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step:2d}  loss {total.item() / world:.4f}")
        if (step + 1) % 3 == 0:
            sw.save(run / f"step-{step + 1}", model, optimizer, scheduler=scheduler, step=step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
