"""What a plan is: where parameters, gradients and optimizer states rest, and what is kept.

[Note: Glossary]
unit      parameters that are gathered, reduced and updated together; usually one block
flat      a unit's parameters of one dtype, end to end in one padded buffer
spread    how far a state is cut: none (every rank has all of it), a level's name, or level:n
rung      a step of the ladder (core/topology.py); rung 0 is the full buffer
part      what one rank owns of a flat on some rung
gather    parts climb to a finer-grained owner's view: from P's rung towards rung 0
reduce    gradients descend from rung 0 to OS's rung, summed at each hop
refresh   updated parameters climb from OS's rung to P's
keep      the rung of P that survives between forward and backward
master    the copy of the parameters that the optimizer updates, when its dtype differs
wire      the format in which a state travels on a hop (core/wire.py); raw unless the plan says so
tier      where a state rests between uses: the device, host memory (cpu), or a disk (nvme)
tile      some rows of a matrix that is too large to be gathered at once: a unit of its own
"""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from shardwise.core.layout import DTYPE_BYTES
from shardwise.core.topology import Ladder, Step, Topology
from shardwise.core.wire import Format, Wire

KEEP_UNTIL = ("backward", "step")
TIERS = ("device", "cpu", "nvme")
ACTIVATIONS = ("keep", "recompute", "cpu", "nvme")
UPDATES = ("step", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """How one of the three states rests between uses."""

    spread: str = "none"
    """``none``, the name of a level, or ``level:n`` to stop inside a level."""
    wire: str = ""
    """How the state travels: ``int8`` on every hop, ``int4,node=int8`` by level, nothing: as it is.

    P's wire is that of its gathers, G's of reductions (and of the way back to replicas), OS's of
    the refresh. The options are in ``core/wire.py``."""
    tier: str = "device"
    """Where the state rests between uses: ``device``, ``cpu`` or ``nvme``. On a machine without an
    accelerator the first two are one memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a step, by their torch names; None leaves the choice written beside it."""

    compute: str | None = None
    """Parameters in forward and backward. None: as the model has them."""
    reduce: str | None = None
    """Gradients while they travel; sums are made in the master's dtype. None: as computed."""
    master: str | None = None
    """What the optimizer updates, and accumulators. None: float32, or wider if the model is."""

    def compute_dtype(self, dtype: str) -> str:
        return self.compute if self.compute and _is_float(dtype) else dtype

    def reduce_dtype(self, dtype: str) -> str:
        return self.reduce if self.reduce and _is_float(dtype) else self.compute_dtype(dtype)

    def master_dtype(self, dtype: str) -> str:
        """The master's dtype for a parameter that the model has in ``dtype``."""
        wide = dtype if DTYPE_BYTES[dtype] > 4 else "float32"
        return self.master if self.master and _is_float(dtype) else wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What a rank may use of each tier, and how states move between them."""

    path: str = ""
    """A folder on the disk of tier ``nvme``; needed where a state rests there."""
    device_bytes: int | None = None
    """Budgets: a rank that would hold more raises an error. None: as much as there is."""
    cpu_bytes: int | None = None
    """Of host memory beside an accelerator's; without one ``device_bytes`` is for all memory."""
    nvme_bytes: int | None = None
    window_numel: int = 1 << 22
    """Elements of a slice of optimizer states that is updated at once while the next one is read
    and the last one written."""
    update: str = "step"
    """When units with gradients or optimizer states on a tier are updated: in the optimizer's
    ``step``, or in ``backward``, as soon as a unit's gradients are reduced, which leaves nothing to
    clip or to skip."""
    checksum: bool = False
    """Whether what is read back from the disk is compared with what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Layers that are computed in tiles, each gathered, reduced and updated for itself."""

    numel: int = 0
    """Linear layers and embeddings with more elements are cut into tiles of at most this many;
    0: none. Only where their parameters travel: what rests in full gains nothing."""
    loss: bool = True
    """Whether the cross entropy of a tiled projection is computed tile by tile as well, so that
    its logits never exist as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Other spreads for the units whose name matches ``unit`` (``*`` and ``?`` as in a shell)."""

    unit: str
    params: StatePlan | None = None
    grads: StatePlan | None = None
    optim: StatePlan | None = None
    keep: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where P, G and OS rest, what is kept, and in which dtypes a step runs."""

    name: str = "custom"
    params: StatePlan = field(default_factory=StatePlan)
    grads: StatePlan = field(default_factory=StatePlan)
    optim: StatePlan = field(default_factory=StatePlan)
    keep: str = "none"
    """What survives of gathered parameters after forward: ``none``, a spread, or ``full``."""
    keep_until: str = "backward"
    """``backward`` drops the kept rung there; ``step`` keeps it for all micro-batches of a step."""
    activations: str = "keep"
    """What forward saves for backward: ``keep`` all of it, ``recompute`` it from the inputs of
    units, or rest these inputs on ``cpu`` or ``nvme`` as well."""
    precision: Precision = field(default_factory=Precision)
    prefetch: int = 1
    """How many units ahead of their use are gathered; from a tier they come one unit earlier."""
    tiers: Tiers = field(default_factory=Tiers)
    tiling: Tiling = field(default_factory=Tiling)
    units: tuple[str, ...] = ()
    """Patterns of module names that are units; empty: found automatically."""
    min_unit_numel: int = 100_000
    """Automatically found units smaller than this stay in the root unit."""
    overrides: tuple[Override, ...] = ()
    """Later overrides win over earlier ones."""

    def for_unit(self, unit: str) -> "Plan":
        """This plan with the overrides that match a unit applied; a tile's are its unit's."""
        plan = self
        for override in self.overrides:
            if fnmatchcase(untiled(unit), override.unit):
                plan = replace(
                    plan,
                    params=override.params or plan.params,
                    grads=override.grads or plan.grads,
                    optim=override.optim or plan.optim,
                    keep=override.keep or plan.keep,
                )
        return plan

    @property
    def moving_tier(self) -> str | None:
        """Where an update reads from and writes to; None: all of it is on the device."""
        states = (self.optim, self.grads, self.params)
        return next((state.tier for state in states if state.tier != "device"), None)

    def without_accelerator(self) -> "Plan":
        """The same on a machine where the device's memory is the host's: nothing rests apart.

        >>> Plan(optim=StatePlan(tier="cpu"), activations="cpu").without_accelerator().activations
        'recompute'
        """

        def merged(owner: "Plan | Override") -> dict[str, Any]:
            states = {name: getattr(owner, name) for name in ("params", "grads", "optim")}
            return {
                name: replace(state, tier="device")
                for name, state in states.items()
                if state is not None and state.tier == "cpu"
            }

        plan = replace(
            self,
            **merged(self),
            overrides=tuple(replace(override, **merged(override)) for override in self.overrides),
            activations="recompute" if self.activations == "cpu" else self.activations,
        )
        if (
            self.streams_updates() and not plan.streams_updates()
        ):  # then nothing is left that streams
            plan = replace(plan, tiers=replace(plan.tiers, update="step"))
        return plan

    def streams_updates(self) -> bool:
        """Whether gradients or optimizer states of any unit rest on a tier."""
        owners: list[Plan | Override] = [self, *self.overrides]
        states = [state for owner in owners for state in (owner.grads, owner.optim)]
        return any(state is not None and state.tier != "device" for state in states)

    def rests_on(self, tier: str) -> bool:
        """Whether any state of any unit, or activations, rest on a tier.

        >>> Plan(optim=StatePlan(tier="nvme")).rests_on("nvme"), Plan().rests_on("nvme")
        (True, False)
        """
        plans = [self, *(self.for_unit(override.unit) for override in self.overrides)]
        states = [state for plan in plans for state in (plan.params, plan.grads, plan.optim)]
        return self.activations == tier or any(state.tier == tier for state in states)

    def is_lossy(self, dtype: str = "float32") -> bool:
        """Whether values of a float dtype may change on some hop of some unit.

        >>> Plan(grads=StatePlan(wire="world=int4")).is_lossy(), Plan().is_lossy()
        (True, False)
        """
        plans = [self, *(self.for_unit(override.unit) for override in self.overrides)]
        states = [state for plan in plans for state in (plan.params, plan.grads, plan.optim)]
        return any(Wire.parse(state.wire).is_lossy(dtype) for state in states)


@dataclass(frozen=True, slots=True)
class Rungs:
    """A plan resolved for one unit on one topology: every state's rung on one ladder."""

    ladder: Ladder
    params: int
    grads: int
    optim: int
    keep: int
    """The rung kept between forward and backward; equal to ``params`` when nothing more is kept."""

    @property
    def bottom(self) -> int:
        return self.ladder.bottom

    @property
    def granules(self) -> int:
        """Parts of the bottom rung: blocks of a wire format never straddle them."""
        return self.ladder.parts[self.bottom]


def format_of(wire: str, step: Step, dtype: str) -> Format | None:
    """The format in which a state of ``dtype`` travels on a step; None: as it is."""
    if not _is_float(dtype):
        return None  # numbers that are not floats have no lossy form
    return Wire.parse(wire).at(step.level, innermost=step.stride == 1)


def has_master(plan: Plan, rungs: Rungs, dtype: str) -> bool:
    """Whether the optimizer updates a copy of its own, rather than P's memory.

    It needs one where the dtypes differ, and where a lossy refresh tells others (and, so that all
    replicas hold equal bits, this rank as well) something else than the exact new values.
    """
    precision = plan.precision
    if precision.master_dtype(dtype) != precision.compute_dtype(dtype):
        return True
    climb = rungs.ladder.steps[rungs.params : rungs.optim]
    return any(format_of(plan.optim.wire, step, dtype) for step in climb if step.size > 1)


def keep_factor(plan: Plan, topology: Topology) -> int:
    """Number of parts of the kept rung: P's own when nothing is kept, 1 when all of it is."""
    if plan.keep == "none":
        return topology.factor(plan.params.spread)
    return 1 if plan.keep == "full" else topology.factor(plan.keep)


def resolve(plan: Plan, topology: Topology, unit: str) -> Rungs:
    """The rungs of a unit's states. The plan must be legal (``validate.check``)."""
    plan = plan.for_unit(unit)
    keep = keep_factor(plan, topology)
    params, grads, optim = (
        topology.factor(state.spread) for state in (plan.params, plan.grads, plan.optim)
    )
    ladder = topology.ladder((keep, params, grads, optim))
    return Rungs(
        ladder, ladder.rung(params), ladder.rung(grads), ladder.rung(optim), ladder.rung(keep)
    )


def tile_name(unit: str, param: str, start: int, stop: int) -> str:
    """The unit of some rows of a parameter that is named as in its own unit.

    >>> tile_name("blocks.0", "blocks.0.up.weight", 0, 512)
    'blocks.0/up.weight[0:512]'
    """
    return f"{unit}/{param.removeprefix(unit + '.')}[{start}:{stop}]"


def untiled(unit: str) -> str:
    """The unit that a tile was cut from; any other unit is its own.

    >>> untiled("blocks.0/up.weight[0:512]"), untiled("root")
    ('blocks.0', 'root')
    """
    return unit.partition("/")[0]


def _is_float(dtype: str) -> bool:
    return "float" in dtype
