"""The facts of any ``nn.Module``, computed without its memory: see ``plans/facts.py``.

[Note: Batches by extrapolation]
What a forward computes and saves grows linearly with the batch, storage by storage. So two runs on
fake tensors, with two and three sequences, give the figures of all larger batches. One sequence is
a special case, in which many copies are views. If the two runs do not match, the batch itself is
run.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.utils import flop_counter

from shardwise.core.calls import Call, Forward, Input
from shardwise.core.errors import PlanError, ShardwiseError
from shardwise.core.layout import ModelSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.model.activations import forward_of
from shardwise.model.inspect import ROOT, find_members
from shardwise.model.units import describe
from shardwise.plans.facts import Run
from shardwise.plans.plan import Plan
from shardwise.plans.tiles import TWO_RANKS, may_cut, on_two_ranks

_UNEVEN = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
"""Errors of fake tensors when shapes depend on values."""


def _attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    flops: int = flop_counter.sdpa_flop_count(q, k, v)
    return flops


def _grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Experts: every row is multiplied with one of the matrices."""
    return 2 * a.numel() * b[-1]


_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
}
"""Operators that torch's own counter omits."""


def language_model(model: nn.Module, micro_batch: int, seq: int) -> Any:
    """A forward of a model that takes (input_ids, labels)."""
    tokens = torch.zeros(micro_batch, seq, dtype=torch.int64)
    return model(tokens, labels=tokens)


class ModuleFacts:
    """The facts of the module that ``build`` makes, on fake tensors that never compute."""

    def __init__(
        self, build: Callable[[], nn.Module], run: Run | None = None, name: str = "the model"
    ) -> None:
        self.name = name
        self._build, self._run = build, run or language_model
        self._measured: dict[Hashable, _Measured] = {}

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self._module.parameters())

    def spec(self, plan: Plan, topology: Topology) -> ModelSpec:
        return describe(self._module, plan, topology)

    def work(
        self, micro_batch: int, seq: int, plan: Plan, topology: Topology | None = None
    ) -> Work:
        if topology is None:
            plan, topology = on_two_ranks(plan), TWO_RANKS
        whole = self._of(micro_batch, seq, plan, None)
        tiled = self._of(micro_batch, seq, plan, topology) if may_cut(plan, topology) else whole
        return Work(
            tokens=micro_batch * seq,
            dtype=plan.precision.compute_dtype(self._dtype),
            forward_flops=dict(whole.flops),
            saved=tiled.forward.saved,
        )

    @cached_property
    def _module(self) -> nn.Module:
        with torch.device("meta"):
            return self._build()

    @cached_property
    def _dtype(self) -> str:
        return main_dtype(self._module)

    def _of(self, micro_batch: int, seq: int, plan: Plan, topology: Topology | None) -> "_Measured":
        """See [Note: Batches by extrapolation]."""
        if micro_batch <= 3:
            return self._measure(micro_batch, seq, plan, topology)
        two, three = (self._measure(size, seq, plan, topology) for size in (2, 3))
        if two.shape != three.shape:
            return self._measure(micro_batch, seq, plan, topology)
        return two.towards(three, micro_batch - 2)

    def _measure(self, size: int, seq: int, plan: Plan, topology: Topology | None) -> "_Measured":
        key: Hashable = (size, seq, plan.precision.compute, plan.units, plan.min_unit_numel)
        if topology is not None:
            key = (key, topology, plan.tiling, plan.params, plan.overrides)
        if key not in self._measured:
            try:
                self._measured[key] = _measure(
                    self._build, lambda model: self._run(model, size, seq), plan, topology
                )
            except ShardwiseError:
                raise
            except _UNEVEN:
                raise PlanError(
                    f"What {self.name} computes depends on its values (for example experts that "
                    "tokens choose), so it is not known without running it; plan with a dense "
                    "model of about the same size, such as gpt:layers=24,width=2048,heads=16."
                ) from None
            except Exception as error:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise PlanError(
                    f"A forward of {self.name} on {size} sequences of {seq} tokens failed on fake "
                    f"tensors ({reason}); pass run= to say how to run it, choose other sizes "
                    "or another compute dtype, or plan with a similar built-in model."
                ) from error
        return self._measured[key]


def main_dtype(model: nn.Module) -> str:
    """The float dtype of most of a model's elements, in which it computes by itself."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] += parameter.numel()
    found = counts.most_common(1)[0][0] if counts else torch.float32
    return str(found).removeprefix("torch.")


def facts_of_module(model: nn.Module, run: Run | None = None) -> ModuleFacts:
    """The facts of an existing module, which is not changed."""

    def build() -> nn.Module:
        """A copy of the module with tensors that have no values."""
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
        return copy.deepcopy(model, memo)

    return ModuleFacts(build, run, name=type(model).__name__)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A forward: operations by unit, and what it saves."""

    flops: Mapping[str, float]
    forward: Forward

    @property
    def shape(self) -> object:
        """Which storages are saved where, whatever their sizes."""
        calls = [(tuple(call.inputs), tuple(call.inner)) for call in self.forward.calls]
        return tuple(self.forward.root), calls

    def towards(self, other: "_Measured", steps: int) -> "_Measured":
        """Extrapolate by ``steps`` times the difference to ``other``."""

        def further(here: Any, there: Any) -> Any:
            return here + steps * (there - here)

        def each(these: Mapping[Any, Any], those: Mapping[Any, Any]) -> dict[Any, Any]:
            return {key: further(value, those[key]) for key, value in these.items()}

        def inputs(these: Mapping[Any, Input], those: Mapping[Any, Input]) -> dict[Any, Input]:
            return {key: Input(*map(further, given, those[key])) for key, given in these.items()}

        pairs = zip(self.forward.calls, other.forward.calls, strict=True)
        calls = tuple(Call(inputs(a.inputs, b.inputs), each(a.inner, b.inner)) for a, b in pairs)
        root = each(self.forward.root, other.forward.root)
        return _Measured(each(self.flops, other.flops), Forward(root, calls))


def _measure(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module], Any],
    plan: Plan,
    topology: Topology | None,
) -> _Measured:
    meter = _Meter()

    def built() -> nn.Module:
        model = build()
        if plan.precision.compute:
            _convert(model, getattr(torch, plan.precision.compute))
        return model

    def metered(model: nn.Module) -> Any:
        with meter.watching(model, plan):
            return run(model)

    # Operations are counted without tiles: they are equal, and the counter would read the logits.
    with _quietly():
        forward = forward_of(built, metered if topology is None else run, plan, topology)
    return _Measured(meter.flops, forward)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence fake tensors, which log a stack trace before they raise."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters only, as the runtime does; buffers stay as they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class _Meter:
    """Operations of matrix products, each counted for the innermost unit that is being called."""

    def __init__(self) -> None:
        self.flops: dict[str, float] = {}
        self._counter = flop_counter.FlopCounterMode(display=False, custom_mapping=_FLOPS)
        self._units = [ROOT]
        self._seen = 0

    def watching(self, model: nn.Module, plan: Plan) -> ExitStack:
        """While it is open, operations of the model are counted."""
        stack = ExitStack()
        for unit in find_members(model, plan):
            self.flops[unit.name] = 0.0
            if unit.name != ROOT:
                before = unit.module.register_forward_pre_hook(self._enter(unit.name))
                after = unit.module.register_forward_hook(self._leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        stack.callback(self._count)
        stack.enter_context(self._counter)
        return stack

    def _enter(self, unit: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._count()
            self._units.append(unit)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._count()
        self._units.pop()

    def _count(self) -> None:
        total = self._counter.get_total_flops()
        self.flops[self._units[-1]] += total - self._seen
        self._seen = total
