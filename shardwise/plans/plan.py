"""What a plan is: where parameters, gradients and optimizer states rest, and what is kept.

[Note: Glossary]
P, G, OS  parameters, gradients, optimizer states: a plan's three states
unit      parameters that are gathered, reduced and updated together; usually one block
flat      a unit's parameters of one (dtype, requires_grad), end to end in one padded buffer
spread    over which ranks a state is sharded: none (every rank has all of it), a level's name, or
          level:n to stop inside a level
rung      how finely a flat is sharded (core/topology.py): rung 0 is the full buffer, and each
          further rung cuts every shard of the rung above
shard     what one rank owns of a flat on some rung; ``part`` in the code
hop       the way between two neighbouring rungs: one collective on the links of one level
gather    all-gather of a unit's parameters, climbing from P's rung towards rung 0, the full buffer
reduce    reduce-scatter of a unit's gradients, descending from rung 0 to OS's rung, summed at each
          hop; where replicas of OS remain, an all-reduce between them at the end
refresh   all-gather of updated parameters after a step, climbing from OS's rung to P's
keep      the rung of P that stays gathered between forward and backward
master    the copy of the parameters that the optimizer updates, where P's memory cannot serve
          (see ``has_master``)
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
    """How one of the three states is sharded, how it travels, and where it rests.

    >>> import shardwise as sw
    >>> sw.Plan(optim=sw.StatePlan(spread="world", tier="cpu")).optim
    StatePlan(spread='world', wire='', tier='cpu')
    """

    spread: str = "none"
    """Over which ranks the state is sharded: ``none`` (every rank has all of it), the name of a
    level, or ``level:n`` to stop inside a level."""
    wire: str = ""
    """How the state travels: ``int8`` on every hop, or by level, as in ``int4,node=int8``. Empty:
    in its own dtype.

    P's wire is that of gathers, G's that of reductions (all-reduces between replicas included), and
    OS's that of the refresh. ``core/wire.py`` has the options."""
    tier: str = "device"
    """Where the state rests between uses: ``device``, ``cpu`` or ``nvme``. On a machine without an
    accelerator, device and cpu are the same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a step, by their torch names.

    >>> import shardwise as sw
    >>> mixed = sw.Precision(compute="bfloat16", reduce="bfloat16")
    >>> mixed.compute_dtype("float32"), mixed.master_dtype("float32")
    ('bfloat16', 'float32')
    """

    compute: str | None = None
    """Of parameters in forward and backward. None: the model's."""
    reduce: str | None = None
    """Of gradients while they travel; they are summed in the master's dtype. None: as computed."""
    master: str | None = None
    """Of what the optimizer updates, and of gradient accumulators. None: float32, or the model's
    dtype if that is wider."""

    def compute_dtype(self, dtype: str) -> str:
        """The dtype in forward and backward of a parameter that the model has in ``dtype``."""
        return self.compute if self.compute and _is_float(dtype) else dtype

    def reduce_dtype(self, dtype: str) -> str:
        """The dtype in which the gradient of such a parameter travels."""
        return self.reduce if self.reduce and _is_float(dtype) else self.compute_dtype(dtype)

    def master_dtype(self, dtype: str) -> str:
        """The dtype in which the optimizer updates such a parameter."""
        wide = dtype if DTYPE_BYTES[dtype] > 4 else "float32"
        return self.master if self.master and _is_float(dtype) else wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What each rank may use of each tier, and how states move to and from tiers.

    >>> import shardwise as sw
    >>> from dataclasses import replace
    >>> budget = sw.Tiers(path="/mnt/fast/scratch", device_bytes=20 << 30)
    >>> replace(sw.presets.infinity(), tiers=budget).rests_on("nvme")
    True
    """

    path: str = ""
    """A folder on the disk of tier ``nvme``; required where a state rests there."""
    device_bytes: int | None = None
    """Budget per rank: holding more raises a BudgetError. None: no limit."""
    cpu_bytes: int | None = None
    """The same for host memory beside an accelerator. Without an accelerator, ``device_bytes``
    limits all memory."""
    nvme_bytes: int | None = None
    """The same for the disk."""
    window_numel: int = 1 << 22
    """Elements of optimizer states on a tier that are updated at once, while the next window is
    read and the previous one written."""
    update: str = "step"
    """When units with gradients or optimizer states on a tier are updated: in the optimizer's
    ``step``, or in ``backward``, as soon as a unit's gradients are reduced; then gradients can
    neither be clipped nor a step skipped."""
    checksum: bool = False
    """Whether data read back from the disk is compared with what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Which layers are computed in tiles, each gathered, reduced and updated on its own.

    >>> import shardwise as sw
    >>> from dataclasses import replace
    >>> replace(sw.presets.zero3(), tiling=sw.Tiling(numel=1 << 26)).tiling.loss
    True
    """

    numel: int = 0
    """Linear layers and embeddings with more elements are cut into tiles of at most this many;
    0: none. Layers whose parameters rest in full on every rank stay whole."""
    loss: bool = True
    """Whether the cross entropy of a tiled projection is computed tile by tile as well, so that
    its logits never exist as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Other settings for some units; what is None stays as in the plan.

    >>> import shardwise as sw
    >>> from dataclasses import replace
    >>> first = sw.Override(unit="blocks.0", keep="full")
    >>> plan = replace(sw.presets.zero3(), overrides=(first,))
    >>> plan.for_unit("blocks.0").keep, plan.for_unit("blocks.1").keep
    ('full', 'none')
    """

    unit: str
    """Which units, by name; ``*`` and ``?`` match as in a shell."""
    params: StatePlan | None = None
    grads: StatePlan | None = None
    optim: StatePlan | None = None
    keep: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained: where P, G and OS rest, what is kept, and in which dtypes.

    Presets return plans; ``dataclasses.replace`` changes one; docs/plans.md has the form as TOML.

    >>> import shardwise as sw
    >>> cut = sw.StatePlan(spread="world")
    >>> plan = sw.Plan(name="mine", grads=cut, optim=cut)  # ZeRO-2
    >>> sw.simulate(plan, "llama-7b", "dgx-a100", seq=2048).step_s < 10
    True
    """

    name: str = "custom"
    """For messages and reports."""
    params: StatePlan = field(default_factory=StatePlan)
    """P."""
    grads: StatePlan = field(default_factory=StatePlan)
    """G; in ``no_sync`` gradients are reduced to its rung and rest there."""
    optim: StatePlan = field(default_factory=StatePlan)
    """OS, master weights included."""
    keep: str = "none"
    """What stays of gathered parameters between forward and backward: ``none`` (only P's own
    shard), a spread, or ``full``."""
    keep_until: str = "backward"
    """When the kept rung is freed: ``backward``, or ``step`` after all micro-batches of a step."""
    activations: str = "keep"
    """What becomes of activations: ``keep`` all that autograd saves, ``recompute`` them from the
    inputs of units, or also move these inputs to ``cpu`` or ``nvme`` until backward."""
    precision: Precision = field(default_factory=Precision)
    prefetch: int = 1
    """How many units ahead of their use are gathered; shards on a tier are read one unit earlier
    than that."""
    tiers: Tiers = field(default_factory=Tiers)
    tiling: Tiling = field(default_factory=Tiling)
    units: tuple[str, ...] = ()
    """Patterns of names of modules that become units; empty: units are found automatically."""
    min_unit_numel: int = 100_000
    """Automatically found units with fewer parameters stay in the root unit."""
    overrides: tuple[Override, ...] = ()
    """Later overrides win over earlier ones."""
    separate_memory: bool = False
    """Whether the device's memory is not the host's. No setting: plan files do not have it, and
    whatever places a plan on a device sets it (``on_accelerator``, ``without_accelerator``)."""

    def for_unit(self, unit: str) -> "Plan":
        """This plan with the overrides that match a unit; a tile has those of its unit."""
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
        """The tier that an update reads from and writes to; None: the device only."""
        states = (self.optim, self.grads, self.params)
        return next((state.tier for state in states if state.tier != "device"), None)

    def on_accelerator(self) -> "Plan":
        """The same plan where the device's memory is not the host's.

        >>> Plan().on_accelerator().separate_memory
        True
        """
        return replace(self, separate_memory=True)

    def without_accelerator(self) -> "Plan":
        """The same plan where the device's memory is the host's, so that tier cpu is the device.

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
            separate_memory=False,
        )
        if self.streams_updates() and not plan.streams_updates():
            plan = replace(plan, tiers=replace(plan.tiers, update="step"))
        return plan

    def streams_updates(self) -> bool:
        """Whether gradients or optimizer states of any unit rest on a tier."""
        owners: list[Plan | Override] = [self, *self.overrides]
        states = [state for owner in owners for state in (owner.grads, owner.optim)]
        return any(state is not None and state.tier != "device" for state in states)

    def rests_on(self, tier: str) -> bool:
        """Whether any state of any unit, or activations, rest on ``tier``.

        >>> Plan(optim=StatePlan(tier="nvme")).rests_on("nvme"), Plan().rests_on("nvme")
        (True, False)
        """
        plans = [self, *(self.for_unit(override.unit) for override in self.overrides)]
        states = [state for plan in plans for state in (plan.params, plan.grads, plan.optim)]
        return self.activations == tier or any(state.tier == tier for state in states)

    def is_lossy(self, dtype: str = "float32") -> bool:
        """Whether a hop of any unit may change values of ``dtype``.

        >>> Plan(grads=StatePlan(wire="world=int4")).is_lossy(), Plan().is_lossy()
        (True, False)
        """
        plans = [self, *(self.for_unit(override.unit) for override in self.overrides)]
        states = [state for plan in plans for state in (plan.params, plan.grads, plan.optim)]
        return any(Wire.parse(state.wire).is_lossy(dtype) for state in states)


@dataclass(frozen=True, slots=True)
class Rungs:
    """A plan resolved for one unit on one topology: the rung of every state on one ladder."""

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
        """Number of shards on the bottom rung; blocks of a wire format never straddle them."""
        return self.ladder.parts[self.bottom]


def format_of(wire: str, step: Step, dtype: str) -> Format | None:
    """The format in which a state of ``dtype`` travels on a step; None: in its own dtype."""
    if not _is_float(dtype):
        return None  # only floats have lossy formats
    return Wire.parse(wire).at(step.level, innermost=step.stride == 1)


def has_master(plan: Plan, rungs: Rungs, dtype: str) -> bool:
    """Whether the optimizer updates a copy of its own rather than P's memory.

    It needs one where the dtypes differ, and where the refresh is lossy: then P holds decoded
    values on all ranks, the sender included, so that replicas hold equal bits. It also needs one
    where the update does not run in the memory that P rests in: on a device or on its host.
    """
    precision = plan.precision
    if precision.master_dtype(dtype) != precision.compute_dtype(dtype):
        return True
    on_device = [state.tier == "device" for state in (plan.params, plan.optim)]
    if plan.separate_memory and on_device[0] != on_device[1]:
        return True
    climb = rungs.ladder.steps[rungs.params : rungs.optim]
    return any(format_of(plan.optim.wire, step, dtype) for step in climb if step.size > 1)


def rests_in_master(plan: Plan, rungs: Rungs, dtype: str) -> bool:
    """Whether P's shard is the master itself, which a gather casts: nothing is there twice, and
    there is nothing to refresh. It saves an accelerator's memory; a CPU would read twice the bytes
    whenever it gathers.
    """
    same_place = rungs.params == rungs.optim and plan.params.tier == plan.optim.tier == "device"
    saves = plan.separate_memory and rungs.params > 0
    return saves and same_place and has_master(plan, rungs, dtype)


def keep_factor(plan: Plan, topology: Topology) -> int:
    """Number of shards on the kept rung: P's when nothing more is kept, 1 when all of it is."""
    if plan.keep == "none":
        return topology.factor(plan.params.spread)
    return 1 if plan.keep == "full" else topology.factor(plan.keep)


def resolve(plan: Plan, topology: Topology, unit: str) -> Rungs:
    """The rungs of a unit's states; the plan must be legal (``validate.check``)."""
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
    """The name of the unit that is a tile: rows ``start`` to ``stop`` of a unit's parameter.

    >>> tile_name("blocks.0", "blocks.0.up.weight", 0, 512)
    'blocks.0/up.weight[0:512]'
    """
    return f"{unit}/{param.removeprefix(unit + '.')}[{start}:{stop}]"


def untiled(unit: str) -> str:
    """The name of the unit that a tile was cut from; that of any other unit as it is.

    >>> untiled("blocks.0/up.weight[0:512]"), untiled("root")
    ('blocks.0', 'root')
    """
    return unit.partition("/")[0]


def _is_float(dtype: str) -> bool:
    return "float" in dtype
