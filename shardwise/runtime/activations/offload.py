"""Inputs of units rest on a tier between forward and backward.

[Note: Inputs on a tier]
Autograd saves an input through ``pack`` and gets its values back through ``unpack``. In between it
holds a ``_Saved`` object. When the graph is freed, after backward or without one, this object is
freed as well, and with it the input's space and memory. These stay in memory: tensors smaller than
``SMALL_BYTES``, parameters and views of them, views with holes or overlaps, tensor subclasses, and
tensors inside objects other than tuples, lists and dicts (which keep them alive anyway).
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
"""A read is late if backward has to wait longer than this for it."""


@dataclass
class Moved:
    """Counts of what happened to the inputs of units."""

    out_bytes: int = 0
    in_bytes: int = 0
    num_reads: int = 0
    late_reads: int = 0
    """Reads that backward waited for."""
    waited_s: float = 0.0
    """How long backward waited for reads, in total."""
    recomputed_by_model: int = 0
    """Calls inside the model's own checkpoints, which recompute them from inputs in memory."""


@dataclass(eq=False)
class _Home:
    """Where an input's bytes are, and the transfers in flight."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    """Rounded up to whole pages."""
    buffer: torch.UntypedStorage | None = None
    """Host memory that has the values, or into which they are being read."""
    copied: torch.cuda.Event | None = None
    """On CUDA: the end of the copy to the buffer."""
    coming: tuple[torch.Tensor, torch.cuda.Event] | None = None
    """On CUDA, tier cpu: the values on their way back."""
    record: Record | None = None
    ticket: Ticket | None = None
    """For the last write or read."""
    reading: bool = False

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.stride)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class _Saved:
    """Autograd holds this in place of an input; it is freed with the last graph that needs it."""

    def __init__(self, home: _Home, storage: StorageWeakRef, retired: deque[_Home]) -> None:
        self.home, self.call, self.shared, self.taken = home, 0, False, False
        self._storage = storage  # while this is held, no other storage gets its address
        self._retired = retired

    def __del__(self) -> None:
        # Only this: it may run anywhere, even inside a lock that a release would need.
        self._retired.append(self.home)


class _InMemory:
    """Autograd holds this in place of an input that stays in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def values(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise UsageError(
                f"An input of shape {tuple(self._tensor.shape)} was written in place after its "
                "unit's forward, but the unit is recomputed from it: write into a copy, or set "
                "activations = 'keep' in the plan."
            )
        return self._tensor


class Offload:
    """Keeps inputs of calls on a tier from forward to backward; see [Note: Inputs on a tier].

    When backward takes the inputs of one call, the inputs of the call before it are prefetched.
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
        """Hooks for one call: torch's checkpoint saves only the call's inputs through them."""
        self._call += 1
        return saved_tensors_hooks(self.pack, self.unpack)

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> _Saved | _InMemory:
        """Moves an input to the tier, if it is one to move."""
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
        """An input's values; also prefetches the inputs of the call before."""
        if isinstance(saved, _InMemory):
            return saved.values()
        self.reap()
        saved.taken = True
        values = self._tier.take(saved.home, stays=saved.shared)
        self._fetch_before(saved.call)
        return values

    def reap(self) -> None:
        """Releases inputs whose graphs were freed."""
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
        """Prefetches the inputs of the previous call: backward visits calls in reverse."""
        waiting = [s for s in self._saved.values() if s.call < call and not s.taken]
        nearest = max((saved.call for saved in waiting), default=0)
        for saved in waiting:
            if saved.call == nearest:
                self._tier.fetch(saved.home)


class _Copies:
    """Copies between the device and host memory; on CUDA in a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """Copies; ``target`` has the values after the event, or at once if there is none."""
        if self._stream is None:
            target.copy_(source)
            return None
        on_device = source if source.is_cuda else target
        self._stream.wait_stream(torch.cuda.current_stream(on_device.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        on_device.record_stream(self._stream)  # it may be freed before the copy is over
        return done


def _home_of(tensor: torch.Tensor) -> _Home:
    pages = math.ceil(tensor.nbytes / PAGE_BYTES)
    return _Home(tensor.shape, tensor.stride(), tensor.dtype, pages * PAGE_BYTES)


class OnDisk:
    """Inputs in records of a store; buffers return to the pool as soon as they can."""

    def __init__(self, store: Store, pool: Pool, device: torch.device, moved: Moved) -> None:
        self._store, self._device, self._moved = store, device, moved
        self._pool, self._copies = pool, _Copies(device)
        self._leaving: deque[_Home] = deque()
        """Inputs still in buffers since forward, oldest first."""
        self._idle: dict[int, list[Record]] = defaultdict(list)
        """Free records for reuse, by size."""

    def put(self, tensor: torch.Tensor) -> _Home:
        """Starts to write an input. The input may change at once: its buffer has a copy."""
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
                self._write(home)  # on CUDA with the next input: by then the copy should be over
        except BaseException:
            self.release(home)
            raise
        self._leaving.append(home)
        return home

    def fetch(self, home: _Home) -> None:
        """Starts to read an input, unless a buffer still has it."""
        if home.buffer is not None:
            return
        assert home.record is not None
        home.buffer, home.reading = self._pool.take(home.nbytes), True
        home.ticket = self._store.get(home.record, _bytes(home.buffer))
        self._moved.num_reads += 1
        self._moved.in_bytes += home.nbytes

    def take(self, home: _Home, *, stays: bool) -> torch.Tensor:
        """The values; ``stays``: other calls will need them as well."""
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
        """Nobody needs an input any more: its record and memory can be reused."""
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
        """Waits for an input's write and returns its buffer."""
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
        """Starts to copy an input back; one stream orders this after the copy out."""
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
    """On CUDA: the current stream waits for copies from and to a buffer that is given back."""
    copies = (home.copied, home.coming[1] if home.coming else None)
    for event in copies:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return tensor_on(storage, storage.nbytes(), torch.uint8)
