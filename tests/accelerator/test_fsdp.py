"""The control: what is known to be right is found right, with no race."""

import copy

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.accelerators import chosen
from tests.models import UntiedGPT, adamw, batch, lm_loss, make, mine, train_plain

STEPS = 3


def _train_with_fsdp(delay: str) -> tuple[list[float], list[float], list[str] | None, int]:
    from torch.distributed.fsdp import fully_shard

    accelerator = chosen()
    reference = make(UntiedGPT, torch.float32)
    model = copy.deepcopy(reference).to(accelerator.device)
    plain = train_plain(reference, STEPS)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model)
    losses = []
    accelerator.delay(delay)
    try:
        with accelerator.watch() as seen:
            for step in range(STEPS):
                loss = lm_loss(model, *(t.to(accelerator.device) for t in mine(*batch(step))))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
                losses.append(loss.item())
    finally:
        accelerator.delay("none")
    return losses, plain, seen.races, seen.launch_count


@pytest.mark.parametrize("delay", ["none", "main", "side", "random"])
def test_fsdp2_trains_as_one_plain_process_without_a_race(sim_two, delay: str) -> None:
    for losses, plain, races, launches in sim_two.run(_train_with_fsdp, delay):
        assert losses == pytest.approx(plain, abs=1e-5)
        assert launches > 0
        assert not races
