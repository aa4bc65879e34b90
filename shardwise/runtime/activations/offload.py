"""Inputs of units on a tier between forward and backward.

[Note: Inputs on a tier]
Autograd asks for a saved input's place (``pack``) and later for its values (``unpack``). In
between it is an object of ours; when the graph dies, in backward or without one, so does this
object, and room and memory are free again. What stays in memory: tensors smaller than
``SMALL_BYTES``, parameters and views of them, views with holes or overlaps, tensor subclasses, and
what hides in objects other than tuples, lists and dicts (those objects keep it alive anyway).
"""

import contextlib
import math
import time
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.core.errors import UsageError
from shardwise.core.ticket import Ticket
from shardwise.core.work import IN_FLIGHT
from shardwise.model.activations import SMALL_BYTES
from shardwise.runtime.runtime import Runtime
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import PAGE_BYTES, Pool
from shardwise.tier.store import Record, Store

_LATE_S = 1e-3
"""A read that takes longer than this, once it is needed, was not there in time."""


@dataclass
class Moved:
    """What happened to the inputs of units."""

    out_bytes: int = 0
    in_bytes: int = 0
    num_reads: int = 0
    late_reads: int = 0
    """Reads that backward had to wait for."""
    waited_s: float = 0.0
    """How long it waited for all reads."""
    recomputed_by_model: int = 0
    """Calls inside checkpoints of the model's own: recomputed by those, with inputs in memory."""


@dataclass(eq=False)
class _Home:
    """Where an input's bytes are, and what is under way."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    """Of whole pages."""
    buffer: torch.UntypedStorage | None = None
    """Host memory that holds the values, or is being filled with them."""
    copied: torch.cuda.Event | None = None
    """On CUDA: after the copy to the buffer."""
    coming: tuple[torch.Tensor, torch.cuda.Event] | None = None
    """On CUDA, from the host: the values on their way back."""
    record: Record | None = None
    ticket: Ticket | None = None
    """Of the last write or read."""
    reading: bool = False

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.stride)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class _Saved:
    """What autograd holds in place of an input; its end is the end of the graphs that need it."""

    def __init__(self, home: _Home, storage: StorageWeakRef, retired: deque[_Home]) -> None:
        self.home, self.call, self.shared, self.taken = home, 0, False, False
        self._storage = storage  # its address is not another tensor's as long as this is held
        self._retired = retired

    def __del__(self) -> None:
        # No more than this: it may run anywhere, inside a lock that giving back would need.
        self._retired.append(self.home)


class _InMemory:
    """What autograd holds in place of an input that stays as it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def values(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise UsageError(
                f"An input of shape {tuple(self._tensor.shape)} that a unit is recomputed from was "
                "written in place after the unit's forward: write into a copy, or set "
                "activations = 'keep' in the plan."
            )
        return self._tensor


class Offload:
    """Inputs of calls, resting on a tier from forward to backward; see [Note: Inputs on a tier].

    When backward takes the inputs of one call, those of the call before it begin to come.
    """

    def __init__(self, tier: "OnDisk | OnHost", runtime: Runtime) -> None:
        self._tier, self._device = tier, runtime.grid.device
        with torch._C.DisableTorchFunctionSubclass():
            self._parameters = {s.parameter.untyped_storage()._cdata for s in runtime.slots}
        self._saved: weakref.WeakValueDictionary[Any, _Saved] = weakref.WeakValueDictionary()
        self._retired: deque[_Home] = deque()
        self._call = 0

    @property
    def num_resting(self) -> int:
        return len(self._saved)

    def hooks(self) -> saved_tensors_hooks:
        """Around one call: torch's checkpoint saves its inputs, and nothing else, through them."""
        self._call += 1
        return saved_tensors_hooks(self.pack, self.unpack)

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> _Saved | _InMemory:
        self.reap()
        if not self._moves(tensor):
            return _InMemory(tensor)
        storage = tensor.untyped_storage()
        where = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*where, tensor.dtype, tensor._version)
        saved = self._saved.get(key)
        if saved is None:
            home = self._tier.put(tensor)
            saved = self._saved[key] = _Saved(home, StorageWeakRef(storage), self._retired)
        else:
            saved.shared = True
        saved.call = self._call
        return saved

    @torch.no_grad()
    def unpack(self, saved: _Saved | _InMemory) -> torch.Tensor:
        if isinstance(saved, _InMemory):
            return saved.values()
        self.reap()
        saved.taken = True
        values = self._tier.take(saved.home, stays=saved.shared)
        self._fetch_before(saved.call)
        return values

    def reap(self) -> None:
        while self._retired:
            self._tier.release(self._retired.popleft())

    def close(self) -> None:
        self.reap()
        self._tier.close()

    def _moves(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.nbytes >= SMALL_BYTES
            and type(tensor) is torch.Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage()._cdata not in self._parameters
            and torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # no holes
        )

    def _fetch_before(self, call: int) -> None:
        """Backward goes through calls in reverse: those of the next one begin to come."""
        waiting = [s for s in self._saved.values() if s.call < call and not s.taken]
        nearest = max((saved.call for saved in waiting), default=0)
        for saved in waiting:
            if saved.call == nearest:
                self._tier.fetch(saved.home)


class _Copies:
    """Copies between the device and host memory; on CUDA beside everything else."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """After the event ``target`` has the values; at once where there is none."""
        if self._stream is None:
            target.copy_(source)
            return None
        on_device = source if source.is_cuda else target
        self._stream.wait_stream(torch.cuda.current_stream(on_device.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        on_device.record_stream(self._stream)  # it may be dropped before the copy is over
        return done


def _home_of(tensor: torch.Tensor) -> _Home:
    pages = math.ceil(tensor.nbytes / PAGE_BYTES)
    return _Home(tensor.shape, tensor.stride(), tensor.dtype, pages * PAGE_BYTES)


class OnDisk:
    """Inputs in records of a store, through buffers that come back as soon as they can."""

    def __init__(self, store: Store, pool: Pool, device: torch.device, moved: Moved) -> None:
        self._store, self._device, self._moved = store, device, moved
        self._pool, self._copies = pool, _Copies(device)
        self._leaving: deque[_Home] = deque()
        """In buffers since forward, oldest first."""
        self._idle: dict[int, list[Record]] = defaultdict(list)
        """Records to use again, by size."""

    def put(self, tensor: torch.Tensor) -> _Home:
        """Begins to move an input out; it may change at once, as a buffer has it."""
        while len(self._leaving) >= IN_FLIGHT:
            self._empty(self._leaving.popleft())
        for earlier in self._leaving:
            self._write(earlier)
        home = _home_of(tensor)
        home.buffer = self._pool.take(home.nbytes)
        try:
            home.copied = self._copies.copy(tensor, home.view(home.buffer))
            home.record = self._room(home.nbytes)
            if home.copied is None:
                self._write(home)  # else with the next one: the copy is to be over by then
        except BaseException:
            self.release(home)
            raise
        self._leaving.append(home)
        return home

    def fetch(self, home: _Home) -> None:
        """Begins to read, unless a buffer has the values."""
        if home.buffer is not None:
            return
        assert home.record is not None
        home.buffer, home.reading = self._pool.take(home.nbytes), True
        home.ticket = self._store.get(home.record, _bytes(home.buffer))
        self._moved.num_reads += 1
        self._moved.in_bytes += home.nbytes

    def take(self, home: _Home, *, stays: bool) -> torch.Tensor:
        """The values; ``stays``: other calls will ask for them, too."""
        start, is_late = time.perf_counter(), home.buffer is None
        self.fetch(home)
        assert home.buffer is not None
        if home.reading and home.ticket is not None:
            home.ticket.wait()
            home.ticket = None
            waited = time.perf_counter() - start
            self._moved.waited_s += waited
            self._moved.late_reads += is_late or waited > _LATE_S
        values = home.empty(self._device)
        arrived = self._copies.copy(home.view(home.buffer), values)
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        if home.reading and not stays:
            self._drop(home)
        return values

    def release(self, home: _Home) -> None:
        """Nobody needs an input any more: its room and memory serve others."""
        if home in self._leaving:
            self._leaving.remove(home)
        if home.ticket is not None:
            with contextlib.suppress(Exception):  # nobody needs the result
                home.ticket.wait()
        self._drop(home)
        if home.record is not None:
            self._idle[home.nbytes].append(home.record)
            home.record = None

    def close(self) -> None:
        for record in (record for records in self._idle.values() for record in records):
            self._store.free(record)
        self._idle.clear()

    def _room(self, nbytes: int) -> Record:
        idle = self._idle[nbytes]
        return idle.pop() if idle else self._store.reserve(nbytes, "inputs of units")

    def _write(self, home: _Home) -> None:
        if home.ticket is None:
            assert home.buffer is not None
            assert home.record is not None
            if home.copied is not None:
                home.copied.synchronize()
            home.ticket = self._store.put(home.record, _bytes(home.buffer))
            self._moved.out_bytes += home.nbytes

    def _empty(self, home: _Home) -> None:
        """Waits for a write; the values are on disk only from then on."""
        self._write(home)
        assert home.ticket is not None
        home.ticket.wait()
        self._drop(home)

    def _drop(self, home: _Home) -> None:
        buffer, home.buffer = home.buffer, None
        home.ticket, home.reading = None, False
        if buffer is not None:
            _order_after(home)
            self._pool.give(buffer)


class OnHost:
    """Inputs of a model on CUDA in pinned host memory."""

    def __init__(self, pool: Pool, device: torch.device, moved: Moved) -> None:
        self._device, self._moved = device, moved
        self._pool, self._copies = pool, _Copies(device)

    def put(self, tensor: torch.Tensor) -> _Home:
        home = _home_of(tensor)
        home.buffer = self._pool.take(home.nbytes)
        home.copied = self._copies.copy(tensor, home.view(home.buffer))
        self._moved.out_bytes += home.nbytes
        return home

    def fetch(self, home: _Home) -> None:
        """Begins to copy back; after the copy out, as both use one stream."""
        if home.coming is None:
            assert home.buffer is not None
            values = home.empty(self._device)
            arrived = self._copies.copy(home.view(home.buffer), values)
            assert arrived is not None
            home.coming = values, arrived
            self._moved.num_reads += 1
            self._moved.in_bytes += home.nbytes

    def take(self, home: _Home, *, stays: bool) -> torch.Tensor:
        self._moved.late_reads += home.coming is None or not home.coming[1].query()
        self.fetch(home)
        assert home.coming is not None
        (values, arrived), home.coming = home.coming, None
        torch.cuda.current_stream(self._device).wait_event(arrived)
        return values

    def release(self, home: _Home) -> None:
        _order_after(home)
        if home.buffer is not None:
            self._pool.give(home.buffer)
        home.buffer = home.coming = None

    def close(self) -> None:
        pass


def _order_after(home: _Home) -> None:
    """On CUDA: the current stream goes on after copies from and to a buffer that is given back."""
    copies = (home.copied, home.coming[1] if home.coming else None)
    for event in copies:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return tensor_on(storage, storage.nbytes(), torch.uint8)
