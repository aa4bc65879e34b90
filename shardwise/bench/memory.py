"""The peak memory of one contender: what its ranks hold above a process that has no model yet."""

from pathlib import Path

STEPS = 4
"""The first one makes the states; later ones fill what it left."""


def peak_bytes(contender: str, setting: "dict[str, object]") -> int:
    """Builds and trains a contender; returns the largest rank's peak. Collective.

    To be called once in a process: what was freed may still count.
    """
    import torch
    import torch.distributed as dist

    from shardwise.bench.contenders import batch, build
    from shardwise.bench.messages import Setting

    given = Setting(**setting)  # type: ignore[arg-type]
    _load_libraries()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    built = build(contender, given)
    for index in range(STEPS):
        built.step(batch(given, index))
    built.drain()
    peak = torch.tensor([_status_bytes("VmHWM") - before])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak.item())


def _load_libraries() -> None:
    """Every library that any contender uses, so that only models and states are counted."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    from torch import nn

    import shardwise.api
    import shardwise.train.models  # noqa: F401

    layer = nn.TransformerEncoderLayer(64, 2, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.randn(1, 8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
