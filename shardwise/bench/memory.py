"""The peak memory of one contender, above that of a process without a model."""

from pathlib import Path

STEPS = 4
"""The first step creates the states; later ones reuse their memory."""


def peak_bytes(contender: str, setting: "dict[str, object]") -> int:
    """Build and train a contender; return the largest peak of all ranks. Collective.

    Call it once per process: freed memory may still count.
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
    """Import every library that a contender uses, so that only models and states are counted."""
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
