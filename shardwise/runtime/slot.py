"""The slot of a parameter, or of one of its tiles, in its unit's flat."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.core.layout import Slot
from shardwise.core.topology import Interval
from shardwise.runtime.flat import Flat

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime
    from shardwise.runtime.surface.face import Face
    from shardwise.runtime.unit import Unit


class ParamSlot:
    """The slot of a parameter, or of one of its tiles, in its unit's flat.

    It answers accesses to the parameter while it is guarded.
    """

    unit: "Unit"
    runtime: "Runtime"

    def __init__(
        self, parameter: nn.Parameter, spec: Slot, flat: Flat, face: "Face", start: int = 0
    ) -> None:
        self.name, self.spec, self.flat = spec.param.name, spec, flat
        self.parameter = parameter
        """The parameter used in compute: the user's own, or a tile's."""
        self.face, self.start = face, start
        """The parameter as the user sees it, and the element of it where this slot begins."""
        face.slots.append(self)
        self.is_trained = spec.param.requires_grad
        self.place = spec.interval.relative_to(0)
        """Its elements in the flat's full buffers."""
        self.segment = spec.interval.intersect(flat.optim_at)
        """The elements of this parameter in this rank's shard of OS; may be empty."""
        self.has_grad = False
        """Whether it has a gradient that was not dropped; after reduction the same on all ranks."""
        self.accumulate: torch.autograd.graph.Node | None = None
        """Autograd's node that puts gradients into ``parameter.grad``; see ``hooks.py``."""
        self.arrivals = 0
        """Local gradients that arrived in the current backward."""
        self.pending = False
        """Whether the flat's full gradient buffer has a gradient of this parameter."""
        self.used = False
        """Whether any local gradient arrived since the last synchronisation."""
        self.spent = 0
        """How many optimizers have updated the parameter in backward with its gradient."""

    def require_unspent(self) -> None:
        """Raises if backward has already updated the parameter with its gradient."""
        if self.spent:
            raise UsageError(
                f"The gradient of '{self.name}' cannot be changed any more: backward has updated "
                "the parameter with it; set tiers.update = 'step' in the plan."
            )

    def access(self, what: str) -> None:
        """Makes the values of the guarded parameter readable, or raises."""
        self.runtime.access(self, what)

    def write(self, value: torch.Tensor) -> None:
        """Overwrites the parameter with a full value, which must be equal on all ranks."""
        self.runtime.write(self, value)

    def of(self, buffer: torch.Tensor | None, place: Interval) -> torch.Tensor | None:
        """This parameter's elements of a buffer that covers ``place``; None if there are none."""
        common = self.spec.interval.intersect(place)
        if buffer is None or not common.numel:
            return None
        return buffer[common.relative_to(place.start)]

    @property
    def part_shape(self) -> torch.Size:
        """The shape of this rank's shard of it and of its states: flat, but () for a scalar."""
        scalar = self.spec.param.shape == () and self.segment.numel
        return torch.Size(() if scalar else (self.segment.numel,))

    @property
    def own(self) -> slice:
        """The elements of the user's parameter in this rank's shard of OS, from this slot."""
        return self.segment.relative_to(self.spec.interval.start - self.start)

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This slot's elements of a value of the user's parameter, flattened."""
        return whole.reshape(-1)[self.start : self.start + self.spec.param.numel]
