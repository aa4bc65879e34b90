"""Loads a checkpoint into a sharded model, whatever plan and world it was saved under; collective.

Nothing is written before all ranks have compared the checkpoint with the model. Then every rank
reads the intervals that it needs, and ranks meet after each unit.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.checkpoint.foreign.reader import ForeignReader
from shardwise.checkpoint.together import together
from shardwise.checkpoint.training import place, ranks
from shardwise.checkpoint.training.background import finish
from shardwise.checkpoint.training.contents import MODEL, OPTIM, OWN
from shardwise.checkpoint.training.fill import Filler
from shardwise.checkpoint.training.index import INDEX_FILE, Index
from shardwise.checkpoint.training.plain import decode
from shardwise.checkpoint.training.read import Reader
from shardwise.checkpoint.values import Named, named_tensors
from shardwise.core.errors import SyncError, UsageError
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import grads
from shardwise.runtime.unit import Unit

_MOST_LISTED = 10
"""How many names or problems of a kind an error lists."""


@dataclass(frozen=True)
class Resumed:
    """What ``load`` found in a checkpoint beside the model and the optimizer.

    >>> import tempfile, torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> folder = tempfile.mkdtemp()
    >>> sw.save(f"{folder}/step-3", model, step=3)
    >>> found = sw.load(folder, model)
    >>> found.step, found.world
    (3, 1)
    """

    path: str
    """The folder that was read."""
    step: int | None
    """What ``save`` was given."""
    extra: Any
    """What ``save`` was given."""
    plan: str
    """The plan under which it was saved, as TOML."""
    world: int
    """The number of ranks that saved it."""
    notes: tuple[str, ...] = ()
    """What could not be restored, because plan or world differ."""
    missing: tuple[str, ...] = ()
    """Parameters and buffers that only the model has (only if the load is not strict)."""
    unexpected: tuple[str, ...] = ()
    """Those that only the checkpoint has (only if the load is not strict)."""
    bytes_read: int = field(default=0, compare=False)
    """What this rank read of tensors."""


@dataclass(frozen=True)
class Request:
    """What the caller of ``sw.load`` wants to restore."""

    path: Path
    optimizer: Optimizer | None
    scheduler: Any
    strict: bool
    random: bool


def load_checkpoint(runtime: Runtime, request: Request) -> Resumed:
    """Read a checkpoint; all ranks raise the errors of any."""
    finish(runtime)
    control, rank = runtime.grid.control, runtime.grid.place.rank
    found: list[Path] = []
    first = lambda: found.append(place.find(request.path).resolve())  # noqa: E731
    together(control, f"reading of '{request.path}'", first if rank == 0 else lambda: None)
    chosen = control.broadcast_object(str(found[0]) if found else "", "choice of the checkpoint")
    folder = Path(str(chosen))
    opened: list[Reader] = []
    what = f"reading of '{folder}'"
    together(control, what, _advised(folder, lambda: opened.append(_open(folder)), begun=False))
    (reader,) = opened
    with reader:
        return _Loading(runtime, request, reader).run()


def _open(folder: Path) -> Reader:
    if (folder / INDEX_FILE).is_file():
        return Reader(folder)
    reader = ForeignReader(folder)
    if reader.lacks_index:
        raise UsageError(
            f"Checkpoint '{folder}' is damaged: its file '{INDEX_FILE}' is missing (without it "
            "'shardwise import' takes the weights and the optimizer's states)."
        )
    return reader


class _Loading:
    """One rank's part of a load."""

    def __init__(self, runtime: Runtime, request: Request, reader: Reader) -> None:
        self._runtime, self._request, self._reader = runtime, request, reader
        self._values = reader.index.values
        self._tensors = named_tensors(runtime)
        self._saved_names: dict[int, str] = {}
        """What each parameter is called in the checkpoint, by its id."""
        self._names = {id(tensor.tensor): tensor.name for tensor in self._tensors}
        """The same, or its own name if the checkpoint does not have it."""
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._wrong: list[str] = []
        self._notes: list[str] = []

    def run(self) -> Resumed:
        """The whole load."""
        runtime, request, reader = self._runtime, self._request, self._reader
        takeover = None
        if request.optimizer is not None:
            takeover = runtime.steps.takeover_of(request.optimizer)
            assert takeover is not None
            takeover.states.forget_updates()  # a step that failed is of no interest any more
        runtime.require_idle("load")
        if runtime.opened:
            raise UsageError("load cannot run inside full_params; leave it first.")
        self._do("comparison of a checkpoint", self._compare)
        self._agree()
        runtime.release_all()
        runtime.grid.block_host_until_idle()
        numbers, keys = self._state_names()
        filler = Filler(reader, runtime.homes, self._name_of)
        for unit in runtime.units:
            self._do(f"loading of unit '{unit.name}'", partial(_fill_weights, filler, unit))
            if takeover is not None:
                states = partial(filler.states, unit, takeover.states, numbers, keys)
                self._do(f"loading of the states of unit '{unit.name}'", states)
            runtime.changed(unit)
        runtime.homes.settle()
        runtime.homes.trim()
        for face in runtime.faces:
            face.parameter.grad = None  # of other values
        grads.read(runtime)
        self._do("loading of what is no shard", self._rest)
        if takeover is not None:
            takeover.states.forget_updates()
        if self._notes and runtime.grid.place.rank == 0:
            warnings.warn(" ".join(self._notes), UserWarning, stacklevel=4)
        return Resumed(
            path=str(reader.folder),
            step=self._values.get("step"),
            extra=decode(self._values.get("extra"), reader.whole),
            plan=str(self._values.get("plan", "")),
            world=int(self._values.get("world", 0)),
            notes=tuple(self._notes),
            missing=tuple(self._missing),
            unexpected=tuple(self._unexpected),
            bytes_read=reader.bytes_read,
        )

    def _do(self, what: str, action: Callable[[], None]) -> None:
        together(self._runtime.grid.control, what, _advised(self._reader.folder, action))

    # --- comparison ---------------------------------------------------------------------------

    def _compare(self) -> None:
        index, strict = self._reader.index, self._request.strict
        self._match_tensors(index)
        if self._request.optimizer is not None:
            self._match_groups(self._request.optimizer, strict)
        if self._request.scheduler is not None and self._values.get("scheduler") is None:
            self._wrong.append("it has no scheduler's state (omit scheduler=)")
        problems = _shortened(self._wrong)
        if strict and self._missing:
            problems.append(f"missing in it: {_list(self._missing)}")
        if strict and self._unexpected:
            problems.append(f"not in the model: {_list(self._unexpected)}")
        if problems:
            advice = "" if self._wrong else ", or pass strict=False to load the common ones"
            raise UsageError(
                f"Checkpoint '{self._reader.folder}' does not fit this "
                f"{type(self._runtime.model).__name__}, and nothing was loaded: "
                f"{'; '.join(problems)}. Give a checkpoint of this model{advice}."
            )

    def _match_tensors(self, index: Index) -> None:
        trained_only, known = bool(self._values.get("trained")), set()
        for tensor in self._tensors:
            names = [f"{MODEL}.{name}" for name in tensor.names]
            known |= set(names)
            saved = next((name for name in names if index.find(name) is not None), None)
            if saved is None:
                is_trained = bool(tensor.slots) and tensor.slots[0].is_trained
                if is_trained or not trained_only:
                    self._missing.append(tensor.name)
                continue
            name = self._saved_names[id(tensor.tensor)] = saved.removeprefix(f"{MODEL}.")
            self._names[id(tensor.tensor)] = name
            self._check(tensor, saved)
        for name in (*index.tensors, *index.aliases):
            if name.startswith(f"{MODEL}.") and name not in known:
                self._unexpected.append(name.removeprefix(f"{MODEL}."))

    def _check(self, tensor: Named, saved: str) -> None:
        found = self._reader.index.find(saved)
        assert found is not None
        name, dtype = saved.removeprefix(f"{MODEL}."), getattr(torch, found.dtype)
        if found.shape != tensor.shape:
            self._wrong.append(
                f"'{name}' has shape {list(found.shape)} instead of {list(tensor.shape)}"
            )
        kinds = [(d.is_floating_point, d.is_complex) for d in (dtype, tensor.tensor.dtype)]
        if kinds[0] != kinds[1]:
            self._wrong.append(
                f"'{name}' has dtype {found.dtype}, not convertible to {tensor.tensor.dtype}"
            )

    def _match_groups(self, optimizer: Optimizer, strict: bool) -> None:
        saved = self._values.get("groups") or []
        if not saved:
            self._wrong.append("it has no optimizer's state (load without the optimizer)")
            return
        kind = self._values.get("optimizer")  # None: imported from where it is not said
        if kind not in (None, type(optimizer).__name__):
            self._wrong.append(f"its optimizer is {kind}, not {type(optimizer).__name__}")
        listed = {name for group in saved for name in group["params"]}
        ours = set()
        for group in optimizer.param_groups:
            ours |= {self._names.get(id(p), "") for p in group["params"]} - {""}
        if not strict:  # then only parameters that both have must agree
            ours, listed = ours - set(self._missing), listed - set(self._unexpected)
        if absent := sorted(ours - listed):
            self._wrong.append(f"its optimizer does not have {_list(absent)}")
        if absent := sorted(listed - ours):
            self._wrong.append(f"this optimizer does not have {_list(absent)}")

    def _agree(self) -> None:
        """All ranks must read the same checkpoint."""
        control = self._runtime.grid.control
        crc = torch.tensor([self._reader.index.digest])
        rows = control.exchange(crc, "comparison of a checkpoint")
        others = [rank for rank, digest in enumerate(rows[:, 0]) if digest != rows[0, 0]]
        if others:
            raise SyncError(
                f"Rank(s) {', '.join(map(str, others))} find another checkpoint in "
                f"'{self._reader.folder}' than rank 0; give all nodes the same files."
            )

    def _state_names(self) -> tuple[dict[str, dict[str, object]], dict[str, set[str]]]:
        """The optimizer's states by parameter: values of those that are no tensors, and names."""
        keys: dict[str, set[str]] = {}
        for name in self._reader.index.tensors:
            if name.startswith(f"{OPTIM}."):
                parameter, _, key = name.removeprefix(f"{OPTIM}.").rpartition(".")
                keys.setdefault(parameter, set()).add(key)
        numbers: dict[str, dict[str, object]] = decode(self._values.get("numbers") or {})
        return numbers, keys

    def _name_of(self, slot: ParamSlot) -> str:
        return self._saved_names.get(id(slot.face.parameter), "")

    # --- values -------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Buffers, options, the scheduler, and what this rank had of its own."""
        request, reader = self._request, self._reader
        place = self._runtime.grid.place
        same_world = self._values.get("world") == place.world
        for tensor in self._tensors:
            saved = self._saved_names.get(id(tensor.tensor))
            if tensor.slots or saved is None:
                continue
            own = f"{ranks.prefix(place.rank)}.{MODEL}.{saved}"
            name = own if same_world and own in reader.index.tensors else f"{MODEL}.{saved}"
            with torch.no_grad():
                tensor.tensor.copy_(reader.whole(name))
        if request.optimizer is not None:
            self._options(request.optimizer)
        if request.scheduler is not None:
            request.scheduler.load_state_dict(decode(self._values["scheduler"], reader.whole))
        if request.random:
            self._random(same_world)
        self._feedback()

    def _options(self, optimizer: Optimizer) -> None:
        saved = {name: group for group in self._values["groups"] for name in group["params"]}
        for group in optimizer.param_groups:
            names = [self._names.get(id(p), "") for p in group["params"]]
            sources = {id(saved[name]): saved[name] for name in names if name in saved}
            options = [
                {key: value for key, value in source.items() if key != "params"}
                for source in sources.values()
            ]
            if any(other != options[0] for other in options[1:]):
                raise UsageError(
                    "A group of the optimizer has parameters that had different options when they "
                    "were saved; build the groups as they were."
                )
            for key, value in options[0].items() if options else ():
                group[key] = decode(value, self._reader.whole)

    def _random(self, same_world: bool) -> None:
        rank, saved = self._runtime.grid.place.rank, self._values.get("ranks") or []
        if rank < len(saved):
            ranks.restore_random(self._runtime, self._reader, saved[rank])
        if saved and not same_world:
            self._notes.append(
                f"The checkpoint has the random states of {len(saved)} ranks, and "
                f"{self._runtime.grid.place.world} are running: random numbers will differ."
            )

    def _feedback(self) -> None:
        index = self._reader.index
        if self._values.get("setting") == ranks.setting(self._runtime):
            ranks.restore_feedback(self._runtime, self._reader)
        elif any(name.startswith(OWN) and ".feedback." in name for name in index.tensors):
            self._notes.append(
                "The error feedback of lossy wires was dropped, because it belongs to another plan "
                "or world; it starts at zero."
            )


def _fill_weights(filler: Filler, unit: Unit) -> None:
    with torch.no_grad():
        for flat in unit.flats:
            filler.weights(flat)


def _advised(folder: Path, action: Callable[[], None], *, begun: bool = True) -> Callable[[], None]:
    """An action whose error, if the checkpoint is damaged, names the one before."""

    def advised() -> None:
        try:
            action()
        except UsageError as error:
            if not is_damage(error):
                raise
            earlier = place.before(folder)
            advice = (
                f"The checkpoint before it is '{earlier}'."
                if earlier is not None
                else "There is no earlier checkpoint beside it."
            )
            values = ": the model may have values of this one" if begun else ""
            raise UsageError(f"{error} Load another checkpoint{values}. {advice}") from error

    return advised


def is_damage(error: UsageError) -> bool:
    """Whether a checkpoint could not be loaded because it is not as it was saved."""
    return " is damaged" in str(error)


def _list(names: Iterable[str]) -> str:
    return ", ".join(_shortened([f"'{name}'" for name in names]))


def _shortened(texts: list[str]) -> list[str]:
    """The first few: another model differs in thousands of names."""
    rest = len(texts) - _MOST_LISTED
    return [*texts[:_MOST_LISTED], *([f"and {rest} more"] if rest > 0 else [])]
