"""What each rank has of its own: random numbers, error feedback of lossy wires, its buffers."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import torch

from shardwise.checkpoint.training.contents import MODEL, Contents, Piece, bytes_of, small
from shardwise.checkpoint.training.read import Reader
from shardwise.checkpoint.values import Named
from shardwise.device.abilities import random_states, set_random_states
from shardwise.plans.file import dump_plan
from shardwise.plans.plan import Tiers
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface.access import feedback_state, load_feedback_state


def prefix(rank: int) -> str:
    return f"shardwise.rank{rank}"


def setting(runtime: Runtime) -> str:
    """The plan and the grid in short: what a rank keeps for itself fits the same setting only."""
    plan = replace(runtime.plan, tiers=Tiers(), name="", prefetch=1)
    return f"{runtime.grid.place.topology}\n{dump_plan(plan)}"


def own_pieces(runtime: Runtime, contents: Contents) -> Iterator[Piece]:
    """What this rank keeps for itself. Buffers are among it only if they differ from rank 0's."""
    start = prefix(runtime.grid.place.rank)
    for key, state in random_states(runtime.grid.device).items():
        yield small(f"{start}.random.{key}", state)
    _, numbers, _ = random.getstate()
    yield small(f"{start}.random.python", torch.tensor(numbers, dtype=torch.int64))
    numpy: Any = np.random.get_state(legacy=True)
    words = torch.from_numpy(numpy[1].astype(np.int64))
    yield small(f"{start}.random.numpy", torch.cat([words, torch.tensor([numpy[2]])]))
    for name, lost in feedback_state(runtime).items():
        yield small(f"{start}.feedback.{name}", lost)
    for buffer in _differing(runtime, contents):
        yield small(f"{start}.{MODEL}.{buffer.name}", buffer.tensor)


def own_values(runtime: Runtime) -> dict[str, Any]:
    """What belongs to it and is no tensor."""
    numpy: Any = np.random.get_state(legacy=True)
    return {"python_gauss": random.getstate()[2], "numpy_gauss": list(numpy[3:])}


def _differing(runtime: Runtime, contents: Contents) -> list[Named]:
    """The buffers that are not on all ranks what they are on rank 0; collective."""
    sums = [crc32(bytes_of(b.tensor.cpu().contiguous().reshape(-1))) for b in contents.buffers]
    if not sums:
        return []
    rows = runtime.grid.control.exchange(torch.tensor(sums, dtype=torch.int64), "saving of buffers")
    differ = (rows != rows[0]).any(0).tolist()
    return [b for b, differs in zip(contents.buffers, differ, strict=True) if differs]


def restore_random(runtime: Runtime, reader: Reader, values: dict[str, Any]) -> None:
    """Random generators go on where this rank's were saved."""
    start = f"{prefix(runtime.grid.place.rank)}.random"
    states = {
        key: reader.whole(f"{start}.{key}")
        for key in ("cpu", "device")
        if f"{start}.{key}" in reader.index.tensors
    }
    set_random_states(runtime.grid.device, states)
    numbers = tuple(reader.whole(f"{start}.python").tolist())
    random.setstate((3, numbers, values["python_gauss"]))
    words = reader.whole(f"{start}.numpy").numpy()
    gauss = values["numpy_gauss"]
    np.random.set_state(("MT19937", words[:-1].astype(np.uint32), int(words[-1]), *gauss))


def restore_feedback(runtime: Runtime, reader: Reader) -> None:
    """Error feedback of this rank; what was not saved starts at zero."""
    start = f"{prefix(runtime.grid.place.rank)}.feedback."
    found = {
        name.removeprefix(start): reader.whole(name).to(runtime.grid.device)
        for name in reader.index.tensors
        if name.startswith(start)
    }
    load_feedback_state(runtime, found)
