"""Saves beside training: a thread reads the shards while forward and backward only read them too.

Nothing that is saved changes before the optimizer's next step, so nothing is copied first: the step
waits until the thread has read all shards, and memory stays that of a few windows. Ranks' threads
meet on a control group of their own. A failure is agreed on at the next step or save, so that all
ranks raise it at the same place.
"""

import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from shardwise.comm.control import Control
from shardwise.core.errors import UsageError
from shardwise.runtime.runtime import Runtime

_pending: "WeakKeyDictionary[Runtime, Pending]" = WeakKeyDictionary()
_controls: "WeakKeyDictionary[Runtime, Control]" = WeakKeyDictionary()


class Pending:
    """A checkpoint that is being written; what ``save(asynchronous=True)`` returns.

    >>> import tempfile, torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> pending = sw.save(f"{tempfile.mkdtemp()}/step-1", model, asynchronous=True)
    >>> pending.wait()
    >>> pending.path.endswith("step-1")
    True
    """

    def __init__(
        self,
        runtime: Runtime,
        run: Callable[[Control, Callable[[], None]], None],
        path: str,
    ) -> None:
        self.path = path
        """Where it will appear."""
        self._main = runtime.grid.control
        self._run: Callable[[Control, Callable[[], None]], None] | None = run
        self._control = _control_of(runtime)
        self._staged = threading.Event()
        self._error: BaseException | None = None
        self._told = False
        runtime.before_writes.append(self._await_staged)
        runtime.steps.before.append(self._before_step)
        self._removers: list[Callable[[], None]] = [
            lambda: runtime.before_writes.remove(self._await_staged),
            lambda: runtime.steps.before.remove(self._before_step),
        ]
        self._thread = threading.Thread(target=self._work, name="shardwise-save")
        self._thread.start()

    def wait(self) -> None:
        """Return when the checkpoint is on the disk, or raise why it is not; call it on all ranks
        before the program ends."""
        self._thread.join()
        self._end()

    def _work(self) -> None:
        assert self._run is not None
        try:
            self._run(self._control, self._staged.set)
        except BaseException as error:  # raised by the thread that trains
            self._error = error
        finally:
            self._run = None  # it holds the runtime
            self._staged.set()

    def _await_staged(self) -> None:
        self._staged.wait()

    def _before_step(self) -> None:
        """The step may change what is saved as soon as it was read."""
        self._staged.wait()
        over = not self._thread.is_alive()
        state = torch.tensor([int(not over), int(over and self._error is not None)])
        running, failed = self._main.exchange(state, "state of a save").amax(0).tolist()
        if failed:
            self._thread.join()  # it ends on all ranks, because it failed on one
        if failed or not running:
            self._end()

    def _end(self) -> None:
        for remove in self._removers:
            remove()
        self._removers.clear()
        if self._error is not None and not self._told:
            self._told = True
            raise UsageError(
                f"The checkpoint '{self.path}' could not be saved: {self._error} The run itself "
                "lost nothing."
            ) from self._error


def begin(
    runtime: Runtime, run: Callable[[Control, Callable[[], None]], None], path: str
) -> Pending:
    """Run a save beside training; ``run`` gets a control group, and what to call when nothing more
    will be read. Collective."""
    pending = _pending[runtime] = Pending(runtime, run, path)
    return pending


def finish(runtime: Runtime) -> None:
    """Wait for the last save of a model, if it still runs, and raise its error if it failed."""
    pending = _pending.pop(runtime, None)
    if pending is not None:
        pending.wait()


def _control_of(runtime: Runtime) -> Control:
    """The control group of a model's saves; made by the first."""
    if runtime not in _controls:
        place, limit_s = runtime.grid.place, runtime.grid.limit_s
        _controls[runtime] = Control(place.world, place.rank, limit_s)
        runtime.removers.append(lambda: _close(runtime))
    return _controls[runtime]


def _close(runtime: Runtime) -> None:
    finish(runtime)
    control = _controls.pop(runtime, None)
    if control is not None:
        control.close()
