"""Updates shards that are not in memory as a whole, window by window.

[Note: Windows]
A window is a run of elements of one flat's shard of OS. The update borrows what it needs of the
window (master, gradient, every optimizer state) from the tiers. The user's optimizer then steps on
the window's *pieces*, one per parameter in it. The result is the same as on whole shards, because
an element's update depends on no other element. While one window is updated, the next one is read
and the last one is written, so three windows are in memory.

Numbers that an optimizer keeps per parameter (Adam's step, all states of a scalar) stay in memory:
all pieces of a parameter start from the same numbers and end with the same ones.

Windows are updated in the optimizer's step or beside backward: see [Note: Update in backward] in
``early.py``.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.lane import HOST
from shardwise.core.errors import UsageError
from shardwise.core.meter import THREAD, Meter, counting
from shardwise.core.ticket import DONE, Ticket
from shardwise.core.trace import span
from shardwise.device.host import host_update
from shardwise.plans.ops import Op
from shardwise.runtime.flat import Flat
from shardwise.runtime.optimizer.at_rest import StatesAtRest, is_per_element
from shardwise.runtime.optimizer.kinds import step_on
from shardwise.runtime.optimizer.window import Window, windows_of
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface.face import State
from shardwise.runtime.unit import Unit
from shardwise.tier.memory import trim_heap

_GROUPS = threading.Lock()
"""Held while an optimizer's groups list pieces: two models may share the optimizer."""


class WindowedUpdate:
    """Updates those parameters of one optimizer that are updated window by window."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer, slots: list[ParamSlot]) -> None:
        self._runtime, self._optimizer = runtime, optimizer
        self._slots = dict.fromkeys(slots)
        self.states = StatesAtRest(optimizer)
        self.meters: dict[str, Meter] = {}
        """Bytes that each unit's update moves, by unit name: windows are read ahead of it."""
        self._queue: deque[Window] = deque()
        self._coming: Window | None = None
        self._members: set[nn.Parameter] = set()
        self._before: dict[ParamSlot, State] = {}
        """The numbers before the current step."""
        self.updated: set[Unit] = set()
        """Units that the backward of this step has updated."""
        self._options: list[dict[str, Any]] = []
        """The groups' options when the update began."""
        self._spent: list[ParamSlot] = []
        """The parameters that backward has updated."""
        self._error: BaseException | None = None
        """The error of an update in this step's backward, if one failed."""

    # --- the update ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Plans the windows that backward has not updated, and starts to read the first."""
        if not self.updated:
            self._open()
        units = [unit for unit in self._runtime.units if unit not in self.updated]
        self.meters = {unit.name: Meter() for unit in units}
        self._queue = deque(self._windows(units))
        self._coming = self._load(self._queue[0]) if self._queue else None

    def update(self, unit: Unit, op: Op) -> Ticket:
        """Updates one unit, while the next window is read and the last one written."""
        while self._queue and self._queue[0].unit is unit:
            window = self._queue.popleft()
            assert window is self._coming
            self._coming = self._load(self._queue[0]) if self._queue else None
            self._update(window)
        return DONE

    def new_shards(self, unit: Unit) -> set[Flat]:
        """The flats for which the update itself writes this rank's elements of P."""
        by_difference = unit.ops.sends_differences
        return {flat for flat in unit.trained if flat.updates_in_windows and not by_difference}

    def end(self) -> None:
        """The step is over, or was cancelled."""
        for slot in self._spent:
            slot.spent -= 1
        self._spent.clear()
        self.updated.clear()
        self._error = None

    # --- beside backward ----------------------------------------------------------------------

    def moves(self, unit: Unit) -> bool:
        """Whether an update beside backward would change any parameter of a unit."""
        if not self.updated:
            with _GROUPS:  # another model's backward may be stepping the same optimizer
                self._open()
        return bool(self._moving(unit))

    def _moving(self, unit: Unit) -> list[ParamSlot]:
        return [slot for slot in unit.slots if slot in self._slots and self._moves(slot)]

    def update_in_backward(self, unit: Unit, reduced: Ticket) -> Ticket:
        """Starts to update a unit; its gradients are reduced after ``reduced``."""
        moving = self._moving(unit)
        self.updated.add(unit)
        self._spent += moving
        for slot in moving:
            slot.spent += 1
        device = self._runtime.grid.device
        return HOST.submit(lambda: self._update_unit(unit, reduced, device), device)

    def _update_unit(self, unit: Unit, reduced: Ticket, device: torch.device) -> None:
        if self._error is not None:
            return  # an update has failed: do not update more units
        try:
            windows = list(self._windows([unit]))
            if windows:
                windows[0].lend_states(self.states)  # states need not wait for gradients
            reduced.block_host()
            if windows:
                windows[0].lend_grad()
            for window, following in zip_longest(windows, windows[1:]):
                if following is not None:
                    self._load(following)
                self._update(window)
        except BaseException as error:
            self._error = error
            raise

    def check_unchanged(self) -> None:
        """Raises if the step would make another update than backward made."""
        if self._error is not None:
            raise UsageError(
                f"An update in the last backward failed ({self._error}), so that some units are "
                "a step ahead of others; load a checkpoint, the optimizer's state first."
            ) from self._error
        if self.updated and not _same(self._options, _options(self._optimizer)):
            raise UsageError(
                "The optimizer's options changed between backward and step(), but backward has "
                "updated units already; change them before backward, or set tiers.update = 'step' "
                "in the plan."
            )

    # --- windows ------------------------------------------------------------------------------

    def _open(self) -> None:
        """Reads what holds for the whole step: groups list pieces while an update runs."""
        groups = self._optimizer.param_groups
        self._members = {p for group in groups for p in group["params"]}
        self._options = _options(self._optimizer)
        self._before = {slot: dict(numbers) for slot, numbers in self.states.numbers.items()}

    def _moves(self, slot: ParamSlot) -> bool:
        return (slot.has_grad or slot.used) and slot.face.parameter in self._members

    def _update(self, window: Window) -> None:
        unit = window.unit
        with span("update", f"update {unit.name}"), _GROUPS:
            self._step(window)
        window.give_back(updates_params=not unit.ops.sends_differences)

    def _windows(self, units: Iterable[Unit]) -> Iterator[Window]:
        size = self._runtime.plan.tiers.window_numel
        for unit in units:
            for flat in unit.trained:
                if flat.updates_in_windows:
                    moving = [slot for slot in flat.slots if self._moves(slot)]
                    yield from windows_of(unit, flat, moving, size)

    def _load(self, window: Window) -> Window:
        """Starts to read everything that an update needs."""
        with counting(self.meters.get(window.unit.name) or THREAD.meter):
            window.lend_grad()
            window.lend_states(self.states)
        return window

    def _step(self, window: Window) -> None:
        """The optimizer's own step, on the pieces of a window."""
        assert window.master is not None
        master, grad = window.master.arrived(), window.arrived_grad()
        for loan in window.states.values():
            loan.arrived()
        pieces = {}
        for slot in window.slots:
            piece = nn.Parameter(window.of(slot, master))
            piece.grad = window.of(slot, grad)
            pieces[slot.face.parameter] = piece
            if slot in self._before:
                self._optimizer.state[piece] = self._state_of_piece(window, slot)
        if pieces:
            with host_update(self._runtime.grid.device):
                step_on(self._optimizer, pieces)
        is_first = any(slot not in self._before for slot in window.slots)
        for slot in window.slots:
            self._keep(window, slot, self._optimizer.state.pop(pieces[slot.face.parameter], {}))
        if is_first:
            trim_heap()  # of the states that the optimizer made, which now rest on a tier

    def _state_of_piece(self, window: Window, slot: ParamSlot) -> State:
        numbers = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self._before[slot].items()
        }
        return numbers | {
            key: window.of(slot, window.states[key].tensor) for key in self.states.tensors[slot]
        }

    def _keep(self, window: Window, slot: ParamSlot, state: State) -> None:
        """Keeps the optimizer's state of a piece: numbers here, tensors where they rest."""
        start, stop = window.inside
        shape = window.of(slot, window.master.tensor).shape  # type: ignore[union-attr]
        numbers, tensors = self.states.forget(slot)
        for key, value in state.items():
            if not is_per_element(value, shape):
                numbers[key] = value
                continue
            tensors.add(key)
            if key not in window.states:
                rest = self.states.rest(window.flat, key, value.dtype)
                window.states[key] = rest.lend(start, stop, reads=False)
                window.states[key].arrived()
            place = window.of(slot, window.states[key].tensor)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        self.states.show(slot)

    # --- before the first step ------------------------------------------------------------------

    def reserve(self) -> None:
        """Reserves all space before the first step, to report a disk that is too small now.

        A step on two elements in place of each group shows which states the optimizer keeps.
        """
        for group in self._optimizer.param_groups:
            members = set(group["params"])
            slots = [slot for slot in self._slots if slot.face.parameter in members]
            if not slots:
                continue
            like = slots[0].flat
            probe = nn.Parameter(torch.zeros(2, dtype=like.dtypes.master))
            probe.grad = torch.zeros_like(probe)
            step_on(self._optimizer, {slots[0].face.parameter: probe})
            for key, value in self._optimizer.state.pop(probe, {}).items():
                if is_per_element(value, probe.shape):
                    for slot in slots:
                        self.states.rest(slot.flat, key, value.dtype)
            for slot in slots:
                slot.flat.grads.make_sums()
            for unit in {slot.unit for slot in slots}:  # planned for one of Adam's kin until now
                unit.ops.with_optim_words(self.states.num_kept(unit.trained))

    def covers(self, slot: ParamSlot) -> bool:
        return slot in self._slots


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups' options as they are now."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "fused", "foreach")  # the choice of kernels changes no update
        }
        for group in optimizer.param_groups
    ]


def _same(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return torch.equal(one, other)
        return one is other or (type(one) is type(other) and bool(one == other))

    return len(before) == len(now) and all(
        one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        for one, other in zip(before, now, strict=True)
    )
