"""The plain training loop, sharded.

torchrun --nproc-per-node 2 examples/train_loop.py            # zero3
torchrun --nproc-per-node 4 examples/train_loop.py amsp node=2,world=2
"""

import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some CPUs advertise AMX in vain

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.model.gpt import GPT, sized


def main() -> None:
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    levels = sys.argv[2] if len(sys.argv) > 2 else None

    torch.manual_seed(0)
    with sw.deferred_init():  # no memory yet
        model = GPT(sized("gpt-tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = sw.shard(model, optimizer, plan=plan, levels=levels)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        start = torch.randint(200, (4, 1), generator=generator)
        tokens = (start + torch.arange(65)) % 256  # a pattern that is quickly learned
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")

    weights = sw.state_dict(model)  # full tensors on rank 0, streamed
    if dist.get_rank() == 0:
        print(f"{sum(w.numel() for w in weights.values()):,} values collected; {sw.stats(model)}")
    sw.unshard(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
