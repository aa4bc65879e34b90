"""The issuer: which operations are issued at a trigger, and what must be ready before going on.

It alone decides, for the runtime and for the simulator. At run time hooks fire the triggers, and
``runtime/execute.py`` executes what is issued. ``expected.py`` fires the triggers of an expected
pass, whose events are priced, printed and compared with what happened. It is pure Python: it knows
what each unit holds, but not the memory.

[Note: Distances]
Parameters are gathered ``prefetch`` units ahead of their use. Shards on a tier are fetched the same
number of units before that. In backward a gather ahead waits until a unit has freed its buffer: a
gradient begins the next unit's backward before it ends the current one's, so for a moment both are
gathered. At most ``REDUCTIONS_IN_FLIGHT`` units' full gradients travel while another one fills.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shardwise.plans.holdings import Held, Holdings
from shardwise.plans.inputs import Inputs
from shardwise.plans.ops import Kind, Op, Phase, Trigger
from shardwise.plans.plan import Plan
from shardwise.plans.schedule import UnitOps
from shardwise.plans.sums import Holds
from shardwise.plans.walk import Hold, Walk

REDUCTIONS_IN_FLIGHT = 2
"""At most this many units' full gradients travel while another one is being filled."""

BACKWARD = "backward"


class Asks(Enum):
    """What all ranks must agree on before this rank can go on."""

    NOTHING = 0
    FIRST_USE = 1
    """The pass is being recorded: agree on the unit to gather next."""
    EXTRA_USE = 2
    """A use beyond the recorded order: all ranks must want it."""


@dataclass(slots=True)
class Issue:
    """What a trigger sets off, in the order of these fields."""

    finish: int = 0
    """How many of the oldest reductions in flight must be done first."""
    ops: list[Op] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Units that this rank skipped in backward: other ranks may wait for its zeros."""
    later: list[Op] = field(default_factory=list)
    """Operations that may wait for others of this rank, so they come after all shared ones."""
    wait: int | None = None
    """The unit whose values must be ready at the end."""
    asks: Asks = Asks.NOTHING


class Issuer(Holdings):
    """Decides which operations are issued, for one model on one rank."""

    def __init__(self, units: Sequence[UnitOps], plan: Plan) -> None:
        super().__init__(units, plan.keep_until)
        self.inputs = Inputs(plan)
        """The inputs of units' calls, if they rest on a tier."""
        self.walks: dict[str, Walk] = {}
        self.walk: Walk | None = None
        """The walk of the running forward."""
        self.makes_graph = False
        """Whether backward makes a graph itself, so that another backward needs the values."""
        self.in_flight = 0
        """The number of reductions that were issued and not finished."""
        self._prefetch = plan.prefetch
        self._travels = any(unit.travels for unit in units)
        self._fetches = any(unit.plan.params.tier != "device" for unit in units)
        self._rules: dict[Trigger, Callable[[Held], Issue]] = {
            Trigger.BEFORE_FORWARD: self._use,
            Trigger.BEFORE_BACKWARD: self._use,
            Trigger.BEFORE_RECOMPUTE: self._use,
            Trigger.AFTER_FORWARD: lambda held: Issue(later=self.give_back(held)),
            Trigger.AFTER_RECOMPUTE: self._after_recompute,
            Trigger.AFTER_BACKWARD: self._after_backward,
            Trigger.FIRST_GRAD: lambda held: self.limit(),
        }

    def on(self, trigger: Trigger, unit: int) -> Issue:
        """What a trigger of a unit sets off."""
        return self._rules[trigger](self.units[unit])

    # --- passes -------------------------------------------------------------------------------

    def begin(self, kind: str, phase: Phase) -> Issue:
        """Begins a pass: gathers the first units, and those that stay for the whole pass.

        All gathers of the pass start from what is held now, not from what this rank holds when it
        issues one. Ranks that use units differently keep and drop them at different moments, and
        would otherwise take different hops.
        """
        self.phase = phase
        if kind == BACKWARD:
            self.in_backward = True
        if self.opened or not self._travels:
            return Issue()
        walk = self.walks.setdefault(kind, Walk(self._prefetch))
        if kind == BACKWARD:
            self.backward_walk = walk
        else:
            self.walk = walk
        issue = Issue()
        for held in self.units:
            held.fix_source()
        for held in self.units:  # root first: its forward encloses the others'
            if held.external and held.ops.travels and not held.full:
                issue.ops += held.gather()
        issue.ops += self._issue_all(walk.begin())
        issue.ops += self._fetch_beyond(walk)
        return issue

    def end_walk(self, walk: Walk) -> Issue:
        """Ends a pass on this rank: the gathers that it still owes others, and the end of its
        claims."""
        if walk is self.walk:
            self.walk = None
        if walk is self.backward_walk:
            self.backward_walk = None
        use = walk.end()
        issue = Issue(ops=self._issue_all(use.gathers or []))
        issue.skipped = use.skipped if walk is self.walks.get(BACKWARD) else []
        issue.later = self.give_up(use.given_up)
        if walk.extra:
            walk.stale = True  # the same on all ranks: every extra use was agreed on
        for held in self.units:
            held.fix_source()
            issue.later += held.discard()
        return issue

    def end_forward(self) -> Issue:
        """The model's forward is over: without a backward, what stayed for one is freed."""
        return Issue(later=self.release_external() if self.phase is Phase.EVAL else [])

    def end_backward(self) -> Issue:
        """All gradients are reduced: frees what was gathered for this backward."""
        issue = Issue(finish=self.in_flight)
        self.in_flight = 0
        self.in_backward = False
        if self.makes_graph:
            self.makes_graph = False
            return issue  # the next backward frees what this one keeps
        self.in_backward = True  # so that freeing follows the rules of backward
        for held in self.units:
            issue.later += self.give_back(held)
            if not self.keeps_on:
                issue.later += held.drop_kept()
        issue.later += self.release_external()
        self.in_backward = False
        return issue

    # --- uses beyond the recorded order -------------------------------------------------------

    def agreed(self, unit: int, *, needed: bool, walk: Walk | None) -> Issue:
        """While recording: all ranks gather a unit now; ``needed``: this rank uses it."""
        if walk is not None:
            walk.recording.append(unit)
        issue = Issue(ops=self._issue_all([unit]))
        if not needed:
            issue.later = self.give_up([unit])
        return issue

    def extra(self, unit: int) -> Issue:
        """Gathers a unit for a use beyond the order, which all ranks agreed on.

        From P's own rung, because some ranks may have dropped the kept rung already.
        """
        held = self.units[unit]
        issue = Issue(later=[])
        issue.ops += held.drop_kept()
        held.source = None
        issue.ops += self._issue_all([unit])
        issue.ops += self._ahead(held)
        return issue

    def stays(self, unit: int) -> None:
        """A unit's parameters are read outside its module: it now stays for whole passes."""
        held = self.units[unit]
        if not held.external:
            held.external = True
            for walk in self.walks.values():
                walk.stale = True  # record again, without this unit

    # --- gradients and the step ---------------------------------------------------------------

    def limit(self) -> Issue:
        """A full gradient buffer is needed: finish the oldest reductions if too many travel."""
        finish = max(0, self.in_flight - REDUCTIONS_IN_FLIGHT + 1)
        self.in_flight -= finish
        return Issue(finish=finish)

    def ready(self, unit: int, held: Holds | None = None, summed: Holds | None = None) -> Issue:
        """A unit's gradients are complete; ``held`` and ``summed``: see ``UnitOps.ready``.

        This also ends those of its calls in backward that nothing else ends.
        """
        self.in_flight += 1
        synchronises = self.phase.synchronises
        issue = self._after_backward(self.units[unit])
        issue.ops += self.units[unit].ops.ready(synchronises=synchronises, held=held, summed=summed)
        return issue

    def update_early(self, unit: int) -> list[Op]:
        """Updates a unit in backward: see [Note: Update in backward] in ``runtime/early.py``."""
        return [op for op in self.units[unit].ops.update() if op.kind is Kind.UPDATE]

    def step(self, *, updated: Iterable[int] = ()) -> list[Issue]:
        """The optimizer steps: per unit its update, unless backward made it, and its refresh."""
        early = set(updated)
        found = []
        for held in self.units:
            ops = [
                op
                for op in held.ops.update()
                if not (op.kind is Kind.UPDATE and held.index in early)
            ]
            if held.ops.trained:
                found.append(Issue(ops=self.changed(held.index) + ops))
        return found

    # --- inside -------------------------------------------------------------------------------

    def _use(self, held: Held) -> Issue:
        """A unit's values are needed now."""
        issue = Issue(wait=held.index)
        if not held.ops.travels or self.opened or held.hold is not None:
            return issue
        if held.external:  # gathered when the pass began, unless it is called outside of one
            issue.asks = Asks.NOTHING if held.full else Asks.EXTRA_USE
            return issue
        if self.in_backward and held.leases == 0 and held.full:
            held.hold = Hold(last=True, kept=True)
            return issue
        walk = self.backward_walk if self.in_backward else self.walk
        if walk is None or walk.order is None:
            held.hold = Hold(last=True)
            if walk is not None:
                issue.asks = Asks.NOTHING if held.leases else Asks.FIRST_USE
            elif held.full:
                held.leases += 1
            else:
                issue.asks = Asks.EXTRA_USE
            return issue
        use = walk.use(held.index)
        issue.ops = self._issue_all(use.gathers or [])
        issue.skipped = use.skipped if self.in_backward else []
        issue.later = self.give_up(use.given_up)
        held.hold = use.hold
        if use.gathers is None and not held.full:
            issue.asks = Asks.EXTRA_USE
        else:
            issue.later += self._ahead(held)
        return issue

    def _ahead(self, held: Held) -> list[Op]:
        """Gathers ahead after a use; in backward later, see [Note: Distances]."""
        walk = self.backward_walk if self.in_backward else self.walk
        if held.external or walk is None or (self.in_backward and not walk.is_fresh):
            return []
        return self._gather_ahead(walk)

    def _after_recompute(self, held: Held) -> Issue:
        """Backward uses a recomputed unit next; but of tiles it uses the last ones first."""
        if held.ops.is_tile and held.hold is not None and not held.hold.kept:
            return self._after_backward(held)
        return Issue()

    def _after_backward(self, held: Held) -> Issue:
        issue = Issue()
        if not self.makes_graph:
            issue.later = self.give_back(held)
        if self.backward_walk is not None:
            issue.later += self._gather_ahead(self.backward_walk)
        return issue

    def _gather_ahead(self, walk: Walk) -> list[Op]:
        return self._issue_all(walk.ahead()) + self._fetch_beyond(walk)

    def _fetch_beyond(self, walk: Walk) -> list[Op]:
        ops: list[Op] = []
        if self._fetches:
            for index in walk.beyond(self._prefetch):
                ops += self.units[index].fetch()
        return ops

    def _issue_all(self, units: Iterable[int]) -> list[Op]:
        ops: list[Op] = []
        for index in units:
            self.units[index].leases += 1
            ops += self.units[index].gather()
        return ops
