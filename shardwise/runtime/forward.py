"""Forward: turns the moments that hooks see into triggers of the issuer.

The moments are ``before`` and ``after`` a module's forward; the rest begins and ends passes. The
phase of a pass is decided once, when it begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardwise.core.flight import RECORDER
from shardwise.plans.ops import Phase, Trigger
from shardwise.runtime.unit import Unit
from shardwise.runtime.uses import Uses

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


def in_autograd() -> bool:
    """Whether the current thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Forward:
    """The forward passes of one model."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime, self._units = runtime, runtime.units
        self._issuer, self._issues = runtime.issuer, runtime.issues
        self.uses = Uses(runtime.units, runtime.issuer)
        self.depth = 0
        """How many calls of the model and its units are nested now."""
        self._lone = False

    # --- the moments --------------------------------------------------------------------------

    def before(self, unit: Unit) -> None:
        """A module's forward begins: its unit's values are needed."""
        if in_autograd():  # activation checkpointing
            self._runtime.backward.begin(recomputes=True)
            self._issues.follow(self._issuer.on(Trigger.BEFORE_RECOMPUTE, unit.index))
        else:
            if unit.encloses and self.depth == 0:
                self._begin("forward")
            self.depth += 1
            self.uses.enter(unit)
            self._issues.follow(self._issuer.on(Trigger.BEFORE_FORWARD, unit.index))
        RECORDER.computes("forward", unit.name)

    def after(self, unit: Unit) -> None:
        """A module's forward is over: its unit is freed, except the kept rung."""
        if in_autograd():
            self._issues.follow(self._issuer.on(Trigger.AFTER_RECOMPUTE, unit.index))
            return
        self.depth -= 1
        if self.uses.leave(unit):
            self._issues.follow(self._issuer.on(Trigger.AFTER_FORWARD, unit.index))
        RECORDER.computes()
        if unit.encloses and self.depth == 0:
            self._end()

    def before_lone(self) -> None:
        """A module of the root unit begins its forward, perhaps without the model's."""
        if self.depth or in_autograd():
            return
        self._runtime.steps.require("forward")
        self.depth, self._lone = 1, True
        self._issuer.phase = self._phase()
        self._issues.follow(self._issuer.on(Trigger.BEFORE_FORWARD, 0))

    def after_lone(self) -> None:
        if self._lone and not in_autograd():
            self.depth, self._lone = 0, False
            self._issues.follow(self._issuer.end_forward())

    @contextmanager
    def late(self) -> Iterator[None]:
        """A pass for tiles that a loss uses after the model's forward, outside of it."""
        if self.depth or in_autograd() or self._issuer.opened:
            yield
            return
        self._runtime.homes.check()
        self.depth = 1
        self._begin("late forward")
        try:
            yield
        finally:
            self.depth = 0
            self._end()

    # --- begin and end ------------------------------------------------------------------------

    def _phase(self) -> Phase:
        return self._runtime.phase() if torch.is_grad_enabled() else Phase.EVAL

    def _begin(self, kind: str) -> None:
        if not torch.is_grad_enabled():
            kind += " without gradients"
        self._issues.follow(self._issuer.begin(kind, self._phase()))

    def _end(self) -> None:
        self._issues.end_walk(self._issuer.walk)
        self._issues.follow(self._issuer.end_forward())

    def interrupt(self) -> None:
        """Ends a forward that an exception left unfinished."""
        if not (self.depth or self._issuer.walk is not None):
            return
        self.depth, self._lone = 0, False
        self.uses.forget_running()
        self._issues.end_walk(self._issuer.walk)
        for unit in self._units:
            self._issues.follow(self._issuer.on(Trigger.AFTER_FORWARD, unit.index))
