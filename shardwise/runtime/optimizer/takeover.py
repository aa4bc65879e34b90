"""Taking over the user's optimizer: the same object, stepping on this rank's shards.

The optimizer keeps its class, groups and hyper-parameters, and its groups list the model's
parameters. Only while ``step`` runs do they list this rank's shards of the master weights instead.
Between steps the state of a parameter is the state of its shard. This is done by torch's own step
hooks, so schedulers and wrappers built before or after keep working.

An optimizer that is built after ``shard`` is taken over on its first step.
"""

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.core.errors import UsageError
from shardwise.core.ticket import Ticket
from shardwise.plans.ops import Kind
from shardwise.runtime.optimizer import methods
from shardwise.runtime.optimizer.kinds import check_elementwise
from shardwise.runtime.optimizer.states import States
from shardwise.runtime.optimizer.swap import Swap
from shardwise.runtime.optimizer.windows import WindowedUpdate
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import grads
from shardwise.runtime.surface.face import State
from shardwise.runtime.unit import Unit
from shardwise.runtime.values import make_master
from shardwise.tier.memory import trim_heap


def watch(runtime: Runtime, assume_elementwise: bool) -> None:
    """Also takes over optimizers of this model's parameters that were not passed to shard."""
    watched = weakref.ref(runtime)

    def before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        runtime = watched()
        if runtime is None or optimizer in runtime.steps.optimizers:
            return
        parameters = {face.parameter for face in runtime.faces}
        if any(p in parameters for group in optimizer.param_groups for p in group["params"]):
            check_elementwise(optimizer, assume_elementwise)
            runtime.steps.require(f"The first step of another {type(optimizer).__name__}")
            # Its own hooks run after the global ones, so they already run in this step.
            OptimizerTakeover(runtime, optimizer)

    remove = register_optimizer_step_pre_hook(before_any_step).remove
    runtime.removers.append(remove)
    weakref.finalize(runtime, remove)


class OptimizerTakeover:
    """One user optimizer on one sharded model."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer) -> None:
        self._runtime, self._optimizer = runtime, optimizer
        self._depth = 0
        """How many steps are nested: a subclass may call its base's step, hooks included."""
        self._stepped = False
        methods.check_groups(self._runtime, optimizer.param_groups)
        for unit in runtime.units:
            for flat in unit.trained:
                if flat.params.master is None:
                    make_master(flat)
        windowed = [slot for slot in runtime.trained_slots if slot.flat.updates_in_windows]
        self._windows = WindowedUpdate(runtime, optimizer, windowed)
        self._swap = Swap(runtime, optimizer)
        self._windows.reserve()
        self.states = States(runtime, optimizer, self._windows)
        self.states.adopt()
        self._install()
        runtime.steps.optimizers[optimizer] = weakref.ref(self)

    # --- step ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._depth:
            self._depth += 1
            return None
        args, kwargs = methods.run_closure(args, kwargs)
        runtime = self._runtime
        runtime.require_idle("optimizer.step()", before_step=True)
        self._windows.check_unchanged()
        if runtime.opened:
            raise UsageError("optimizer.step() cannot run inside shardwise.full_params.")
        grads.read(runtime)
        if runtime.accumulated:
            raise UsageError(
                "optimizer.step() after a backward under no_sync: run the last micro-batch of a "
                "step outside shardwise.no_sync, so that gradients are reduced."
            )
        methods.check_groups(self._runtime, optimizer.param_groups)
        runtime.steps.begin()
        runtime.release_all()
        self._swap.put_in()
        self._depth = 1
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        if self._depth == 1:
            self._end_step()
        elif self._depth:
            self._depth -= 1

    def _recover(self) -> None:
        """Finishes a step that raised, because torch then runs no post hook.

        Ranks that did not raise refresh their parameters, so this one does as well.
        """
        if self._depth:
            self._end_step(raised=True)

    def _end_step(self, *, raised: bool = False) -> None:
        self._swap.take_out()
        # Until windows are updated, the hooks of a nested step must not start a new one.
        self._depth = 1
        try:
            self._update_and_refresh(raised)
        finally:
            self._depth = 0

    def _update_and_refresh(self, raised: bool) -> None:
        if not self._stepped:
            # The optimizer's new states lie between free blocks of the first backward; blocks that
            # later passes do not reuse would stay allocated.
            self._stepped = True
            trim_heap()
        runtime, windows = self._runtime, self._windows
        if not raised:
            windows.check_unchanged()  # a hook of the user may have run since
            windows.begin()
        early = {unit.index for unit in windows.updated}
        for unit in runtime.units:
            made = not raised or unit.index in early
            unit.new = windows.new_shards(unit) if made else set()
        runtime.executor.verbs[Kind.UPDATE] = windows.update
        for op in (op for issue in runtime.issuer.step(updated=early) for op in issue.ops):
            # Ranks that did not raise refresh now, so this one does as well.
            if op.kind is not Kind.UPDATE:
                runtime.executor.perform(op)
            elif not raised:
                runtime.executor.perform(op, windows.meters.get(op.unit))
        if not raised:  # otherwise the rest of the units must still be updated
            windows.end()
            runtime.steps.stepped()

    @property
    def updated(self) -> set[Unit]:
        """Units that backward has already updated for this step."""
        return self._windows.updated

    def moves(self, unit: Unit) -> bool:
        """Whether an update beside backward would change any parameter of a unit."""
        return self._windows.moves(unit)

    def update_in_backward(self, unit: Unit, reduced: Ticket) -> Ticket:
        return self._windows.update_in_backward(unit, reduced)

    def state_of(self, slot: ParamSlot) -> State:
        return self.states.state_of(slot)

    def _install(self) -> None:
        optimizer, removers = self._optimizer, self._runtime.removers
        handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        removers += [handle.remove for handle in handles]
        self.states.install()
        removers.append(self.states.drop)  # states of shards mean nothing to plain parameters
        self._runtime.recoveries.append(self._recover)
        methods.wrap(self._runtime, optimizer, self._recover)
