"""The passes of transformer blocks: seconds by the operations of their matrix products."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from shardwise.core.cluster import Curve
from shardwise.model.gpt import Block, GPTConfig
from shardwise.probing.clock import Clock, Lap, Points, curve
from shardwise.probing.matmul import has_bfloat16
from shardwise.probing.scope import DTYPES, Scope, Shape

_HEAD_WIDTH = 64


_WEIGHTS_BYTES = 48 << 20
_MOST_BLOCKS = 16


class Passes:
    """Blocks one after the other, with an input and a gradient, to run forward and backward on.

    So many that their weights do not stay in a cache: a model's come from memory in every pass,
    which on CPUs takes half as long again.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        heads = max(1, shape.width // _HEAD_WIDTH)
        weights = 12 * shape.width**2 * dtype.itemsize
        self.num_blocks = min(_MOST_BLOCKS, max(2, _WEIGHTS_BYTES // weights))
        config = GPTConfig(num_layers=self.num_blocks, width=shape.width, num_heads=heads)
        blocks = (Block(config) for _ in range(self.num_blocks))
        self._block = nn.Sequential(*blocks).to(device=device, dtype=dtype)
        size = (shape.batch, shape.seq, shape.width)
        self._input = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
        self._grad = torch.randn(size, device=device, dtype=dtype)

    @torch.enable_grad()
    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self._block(self._input)
        return out

    def backward(self, out: torch.Tensor) -> None:
        torch.autograd.backward(out, self._grad)

    def run(self) -> None:
        """Both passes."""
        self.backward(self.forward())
        self.forget()

    def forget(self) -> None:
        """Drops the gradients, which are made anew in every step."""
        self._block.zero_grad(set_to_none=True)
        self._input.grad = None


def measure_passes(
    clock: Clock, scope: Scope, dtype: str, device: torch.device
) -> tuple[Curve, Curve]:
    """Forward and backward; larger blocks are left out where they would take too long.

    A machine that others share changes its pace within seconds, so that this should be done more
    than once, with other things between; see ``Curve.median``.
    """
    forward: Points = []
    backward: Points = []
    for shape in scope.blocks:
        if len(forward) > 1:
            expected = (forward[-1][1] + backward[-1][1]) * shape.flops / forward[-1][0]
            if expected > scope.patience_s:
                break
        passes = Passes(shape, getattr(torch, dtype), device)
        seconds = clock.measure(_lap(clock, passes), scope.passes)
        forward.append((shape.flops, seconds[0] / passes.num_blocks))
        backward.append((2 * shape.flops, seconds[1] / passes.num_blocks))
    return curve(forward), curve(backward)


def _lap(clock: Clock, passes: Passes) -> Lap:
    def lap(count: int) -> tuple[float, float]:
        spent = [0.0, 0.0]
        for _ in range(count):
            begin = clock.now()
            out = passes.forward()
            middle = clock.now()
            passes.backward(out)
            end = clock.now()
            del out
            passes.forget()
            spent[0] += middle - begin
            spent[1] += end - middle
        return spent[0] / count, spent[1] / count

    return lap


def measured_dtypes(dtype: str, device: torch.device) -> tuple[str, ...]:
    """Those that training might use here: float32, what was asked for, bfloat16 where it runs."""
    wanted = {"float32", dtype}
    if device.type == "cuda":
        wanted |= {"bfloat16"} if torch.cuda.is_bf16_supported() else set()
    elif has_bfloat16():
        if _survives_bfloat16():
            wanted.add("bfloat16")
        else:
            wanted.discard("bfloat16")  # which others must know before it is an error
    return tuple(name for name in DTYPES if name in wanted)


def _survives_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether a product in bfloat16 leaves a process alive.

    Some machines advertise AMX and end the process that uses it. Where oneDNN was not told to
    leave it alone, another process tries.
    """
    try:
        risky = "amx_tile" in cpu_info.read_text(encoding="utf-8").split()
    except OSError:
        return True
    if not risky or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return True
    trial = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    return subprocess.run([sys.executable, "-c", trial], check=False).returncode == 0
