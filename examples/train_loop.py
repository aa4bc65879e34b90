"""A plain PyTorch training loop on a sharded model.

torchrun --nproc-per-node 2 examples/train_loop.py                      # zero3
torchrun --nproc-per-node 4 examples/train_loop.py amsp node=2,world=2  # as two nodes of two ranks
torchrun --nproc-per-node 2 examples/train_loop.py auto                 # the fastest plan that fits
"""

import os
import sys

os.environ.setdefault(
    "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
)  # some CPUs report AMX but cannot run it

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.model.gpt import GPT, sized

SEQ, BATCH = 64, 4  # tokens per sequence, sequences per rank and step


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    plan = sw.Auto(seq=SEQ, micro_batch=BATCH) if name == "auto" else name
    levels = sys.argv[2] if len(sys.argv) > 2 else None

    torch.manual_seed(0)
    with sw.deferred_init():  # parameters take no memory yet
        model = GPT(sized("gpt-tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = sw.shard(model, optimizer, plan=plan, levels=levels)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        start = torch.randint(200, (BATCH, 1), generator=generator)
        tokens = (start + torch.arange(SEQ + 1)) % 256  # a pattern that is learned quickly
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")

    weights = sw.state_dict(model)  # full tensors on rank 0, gathered unit by unit
    if dist.get_rank() == 0:
        print(f"{sum(w.numel() for w in weights.values()):,} values collected; {sw.stats(model)}")
    sw.unshard(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
