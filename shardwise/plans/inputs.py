"""Inputs of units' calls on a tier: when they go there, and when they come back.

Under ``activations = "cpu"`` or ``"nvme"`` the inputs that a call is recomputed from are written
before its forward computes. On their way to a disk they are in buffers, those of ``IN_FLIGHT``
calls at most, and the last ones stay in them. Backward reads inputs one call ahead: while one call
is recomputed, those of the call before it are on their way.

Pure Python: it knows which inputs have values in memory, but not the memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.core.work import IN_FLIGHT
from shardwise.plans.ops import Kind, Lane, Move, Op, Place
from shardwise.plans.plan import Plan


@dataclass(eq=False, slots=True)
class Input:
    """A tensor that one call or several are recomputed from."""

    nbytes: int
    calls: list["InputCall"]
    in_memory: bool = True
    """In a buffer, or on its way into one."""


@dataclass(eq=False, slots=True)
class InputCall:
    """A call of a unit, and its inputs that rest on the tier."""

    index: int
    unit: str
    inputs: list[Input] = field(default_factory=list)

    @property
    def new(self) -> list[Input]:
        """The inputs that no earlier call has."""
        return [each for each in self.inputs if each.calls[0] is self]


class Inputs:
    """The inputs of a model's calls."""

    def __init__(self, plan: Plan) -> None:
        self._tier = plan.activations
        self._num_calls = 0
        self._leaving: dict[int, InputCall] = {}
        """Calls whose inputs are in buffers since their forward, oldest first."""
        self._resting: dict[int, InputCall] = {}
        """Calls that backward has not recomputed yet."""

    @property
    def moves(self) -> bool:
        return self._tier in ("cpu", "nvme")

    # --- forward ------------------------------------------------------------------------------

    def begin(self, unit: str) -> tuple[InputCall, list[Op]]:
        """A call begins; its inputs need buffers, which the oldest calls give back."""
        self._num_calls += 1
        ops = []
        while len(self._leaving) >= IN_FLIGHT:
            oldest = self._leaving.pop(next(iter(self._leaving)))
            for each in oldest.new:
                each.in_memory = False
            ops.append(
                Op(
                    Kind.RELEASE, oldest.unit, source=Place.INPUTS,
                    after=(Kind.SAVE,), call=oldest.index,
                )
            )  # fmt: skip
        return InputCall(self._num_calls, unit), ops

    def add(self, call: InputCall, nbytes: int) -> Input:
        """A tensor that the call is the first to save."""
        added = Input(nbytes, [call])
        call.inputs.append(added)
        return added

    def share(self, call: InputCall, known: Input) -> None:
        """A tensor that an earlier call has saved already."""
        if call not in known.calls:
            known.calls.append(call)
            call.inputs.append(known)

    def save(self, call: InputCall) -> list[Op]:
        """All inputs of a call are known: those that are new are written."""
        if not call.inputs:
            return []
        self._resting[call.index] = call
        new = call.new
        if not new:
            return []
        if self._tier == "nvme":
            self._leaving[call.index] = call
        else:  # what is copied to host memory leaves the device at once
            for each in new:
                each.in_memory = False
        return [
            Op(
                Kind.SAVE, call.unit, Lane.TIER, target=Place.INPUTS,
                moves=(Move(self._tier, writes=_bytes(new)),), call=call.index,
            )
        ]  # fmt: skip

    # --- backward -----------------------------------------------------------------------------

    def load(self, call: InputCall) -> list[Op]:
        """Before a call is recomputed: its own inputs, and those of the call before it."""
        self._resting.pop(call.index, None)
        calls = [call]
        before = [index for index in self._resting if index < call.index]
        if before:
            calls.append(self._resting[max(before)])
        return [op for each in calls for op in self._load(each)]

    def take(self, taken: Input) -> bool:
        """A call gets an input. Returns whether a buffer that it was read into is given back: it is
        unless other calls need it too, or it never left its buffer."""
        if taken.calls[0].index in self._leaving or len(taken.calls) > 1:
            return False
        taken.in_memory = False
        return True

    def forget(self, gone: Input) -> None:
        """The graphs that needed an input are gone."""
        for call in gone.calls:
            call.inputs.remove(gone)
            if not call.inputs:
                self._leaving.pop(call.index, None)
                self._resting.pop(call.index, None)
        gone.calls = []

    def _load(self, call: InputCall) -> list[Op]:
        missing = [each for each in call.inputs if not each.in_memory]
        if not missing:
            return []
        for each in missing:
            each.in_memory = True
        return [
            Op(
                Kind.LOAD, call.unit, Lane.TIER, source=Place.INPUTS,
                moves=(Move(self._tier, reads=_bytes(missing)),), call=call.index,
            )
        ]  # fmt: skip


def _bytes(inputs: Iterable[Input]) -> int:
    return sum(each.nbytes for each in inputs)


class ExpectedInputs:
    """The inputs of expected passes: one for each call, all of one size."""

    def __init__(self, inputs: Inputs, nbytes: int) -> None:
        self._inputs, self._nbytes = inputs, nbytes if inputs.moves else 0
        self._calls: list[InputCall] = []
        self._waiting: dict[str, list[InputCall]] = {}
        """Calls of each unit that were not recomputed yet."""

    def save(self, unit: str, *, reached: bool) -> list[Op]:
        """Before a call's forward computes. If backward does not reach the unit, the call's graph
        is gone when its forward is over."""
        if not self._nbytes:
            return []
        call, ops = self._inputs.begin(unit)
        added = self._inputs.add(call, self._nbytes)
        ops += self._inputs.save(call)
        if reached:
            self._calls.append(call)
            self._waiting.setdefault(unit, []).append(call)
        else:
            self._inputs.forget(added)
        return ops

    def load(self, unit: str) -> list[Op]:
        """Before a call is recomputed; the calls of one unit in reverse order."""
        if not self._waiting.get(unit):
            return []
        call = self._waiting[unit].pop()
        ops = self._inputs.load(call)
        for each in call.inputs:
            self._inputs.take(each)
        return ops

    def end(self) -> None:
        """Backward is over: the graph that needed them is gone."""
        for call in self._calls:
            for each in list(call.inputs):
                self._inputs.forget(each)
        self._calls.clear()
        self._waiting.clear()
