"""Forward and backward of transformer blocks: seconds by operations of their matrix products."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from shardwise.core.cluster import Curve
from shardwise.device.abilities import separate_memory, supports_bfloat16
from shardwise.model.gpt import Block, GPTConfig
from shardwise.probing.clock import Clock, Lap, Points, curve
from shardwise.probing.matmul import has_bfloat16
from shardwise.probing.scope import DTYPES, Scope, Shape

_HEAD_WIDTH = 64


_WEIGHTS_BYTES = 48 << 20
_MOST_BLOCKS = 16


class Passes:
    """A sequence of blocks with an input and a gradient, for forward and backward.

    There are enough blocks that their weights do not stay in a cache: a model's weights come from
    memory in every pass, which takes half as long again on CPUs.
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
        """Run forward and backward."""
        self.backward(self.forward())
        self.forget()

    def forget(self) -> None:
        """Drop the gradients, as every step creates new ones."""
        self._block.zero_grad(set_to_none=True)
        self._input.grad = None


def measure_passes(
    clock: Clock, scope: Scope, dtype: str, device: torch.device
) -> tuple[Curve, Curve]:
    """Measure forward and backward; larger blocks are omitted if they would take too long.

    The speed of a shared machine changes within seconds, so this should be done several times, with
    other measurements in between; see ``Curve.median``.
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
    """Dtypes that training may use here: float32, the requested one, bfloat16 if it works."""
    wanted = {"float32", dtype}
    if separate_memory(device):
        wanted |= {"bfloat16"} if supports_bfloat16(device) else set()
    elif has_bfloat16():
        if _survives_bfloat16():
            wanted.add("bfloat16")
        else:
            wanted.discard("bfloat16")  # an error only after all ranks know it
    return tuple(name for name in DTYPES if name in wanted)


def _survives_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether a process survives a product in bfloat16.

    Some machines advertise AMX and kill the process that uses it. Unless oneDNN is configured not
    to use it, this is tried in another process.
    """
    try:
        risky = "amx_tile" in cpu_info.read_text(encoding="utf-8").split()
    except OSError:
        return True
    if not risky or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return True
    trial = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    return subprocess.run([sys.executable, "-c", trial], check=False).returncode == 0
