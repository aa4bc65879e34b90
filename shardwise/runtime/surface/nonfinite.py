"""Finds where a NaN or an Inf came from: only once there is one, so that it costs nothing before.

That there is one is seen in what the host gets anyway, the norm of the gradients. Then all ranks
look in the order in which it could have spread: parameters, outputs of modules while the forward
runs again, gradients in the order of backward. Flags stay on the device until the end of each.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import grads
from shardwise.runtime.surface.opened import open_grads
from shardwise.runtime.unit import Unit
from shardwise.tier.rest import use


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """The first place that has a NaN or an Inf.

    >>> print(Nonfinite("output", "NaN", "blocks.1", "blocks.1.up", 2))
    NaN in the output of 'blocks.1.up' (unit 'blocks.1'), first on rank 2
    """

    place: str
    """``parameter``, ``output`` (of a module's forward) or ``gradient``."""
    value: str
    """``NaN`` or ``Inf``."""
    unit: str
    name: str
    """Of the parameter or the module."""
    rank: int
    """The lowest rank that has it; of gradients, which are summed over ranks, the one with the
    shard."""

    def __str__(self) -> str:
        what = self.place if self.place == "parameter" else f"{self.place} of"
        first = "" if self.place == "gradient" else f", first on rank {self.rank}"
        return f"{self.value} in the {what} '{self.name}' (unit '{self.unit}'){first}"


_Flag = tuple[int, str, str, torch.Tensor]
"""The place in an order that all ranks share, unit, name, and whether the values have a NaN (1) or
an Inf (2), on their device."""


def find_nonfinite(runtime: Runtime, forward: Callable[[], Any] | None) -> Nonfinite | None:
    """The first place of all ranks, or None."""
    runtime.require_idle("find_nonfinite", before_step=True)
    with torch.no_grad():
        found = _first(runtime, "parameter", _parameters(runtime))
        if found is None and forward is not None:
            found = _first(runtime, "output", _outputs(runtime, forward))
        return found or runtime.nonfinite or first_gradient(runtime)


def first_gradient(runtime: Runtime) -> Nonfinite | None:
    """The first gradient in the order of backward; clipping asks before it spreads what it found
    to all of them."""
    grads.read(runtime)
    with torch.no_grad():
        return _first(runtime, "gradient", _gradients(runtime))


def _first(runtime: Runtime, place: str, flags: list[_Flag]) -> Nonfinite | None:
    """The first that is set on any rank."""
    values = _on_host([flag for *_, flag in flags])
    own: tuple[int, str, str, str] | None = None
    for (order, unit, name, _), value in zip(flags, values, strict=True):
        if value:
            own = order, unit, name, "NaN" if value & 1 else "Inf"
            break
    everyone = runtime.grid.control.exchange_objects(own)
    ranks = [(told[0], rank, told) for rank, told in enumerate(everyone) if told is not None]
    if not ranks:
        return None
    _, rank, (_, unit, name, value_name) = min(ranks)
    return Nonfinite(place, value_name, unit, name, rank)


def _on_host(flags: list[torch.Tensor]) -> list[int]:
    """The host waits once a device."""
    values: dict[int, int] = {}
    for device in {flag.device for flag in flags}:
        at = [index for index, flag in enumerate(flags) if flag.device == device]
        values |= dict(zip(at, torch.stack([flags[i] for i in at]).tolist(), strict=True))
    return [values[index] for index in range(len(flags))]


def _flag(value: torch.Tensor) -> torch.Tensor:
    return torch.isnan(value).any().to(torch.int32) + 2 * torch.isinf(value).any().to(torch.int32)


def _parameters(runtime: Runtime) -> list[_Flag]:
    """This rank's shards of P."""
    found, order = [], {slot: index for index, slot in enumerate(runtime.slots)}
    for unit in runtime.units:
        for flat in unit.flats:
            with use(flat.params.shard) as shard:
                for slot in flat.slots:
                    part = slot.of(shard, flat.part_at)
                    if part is not None and part.is_floating_point():
                        found.append((order[slot], unit.name, slot.name, _flag(part)))
    return found


def _gradients(runtime: Runtime) -> list[_Flag]:
    """This rank's shards of the gradients, in the order of backward."""
    found, order = [], {slot: -index for index, slot in enumerate(runtime.slots)}
    for unit in reversed(runtime.units):
        for flat in reversed(unit.trained):
            with open_grads(flat) as opened:
                for slot in reversed(flat.slots):
                    for part in opened.of(slot) if slot.has_grad else ():
                        found.append((order[slot], unit.name, slot.name, _flag(part)))
    return sorted(found, key=lambda flag: flag[0])


def _outputs(runtime: Runtime, forward: Callable[[], Any]) -> list[_Flag]:
    """Outputs of all modules in the order in which they are ready."""
    found: list[_Flag] = []
    owners = _owners(runtime.units)
    with ExitStack() as stack:
        for name, module in runtime.model.named_modules():
            about = owners(name), name or type(module).__name__

            def see(
                module: nn.Module, given: Any, output: Any, about: tuple[str, str] = about
            ) -> None:
                for value in _tensors(output):
                    found.append((len(found), *about, _flag(value)))

            stack.callback(module.register_forward_hook(see).remove)
        loss = forward()
    for value in _tensors(loss):
        found.append((len(found), runtime.root.name, "loss", _flag(value)))
    return found


def _owners(units: list[Unit]) -> Callable[[str], str]:
    """The unit to which a module belongs, by their names."""
    names = sorted((unit.name for unit in units[1:]), key=len, reverse=True)

    def owner(module: str) -> str:
        inside = (name for name in names if f"{module}.".startswith(f"{name}."))
        return next(inside, units[0].name)

    return owner


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Floating-point tensors in an output."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield value.detach()
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
