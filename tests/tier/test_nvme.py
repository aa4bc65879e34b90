"""The store on a disk: right bytes in every case, nothing lost on errors, nothing left behind."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import signal
import socket
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.cli.main import run
from shardwise.core.errors import UsageError
from shardwise.tier import blocks, nvme
from shardwise.tier.budget import Budget, BudgetError
from shardwise.tier.folder import try_direct
from shardwise.tier.nvme import NvmeStore
from shardwise.tier.pool import PAGE_BYTES, zeros
from shardwise.tier.store import TierError

pytestmark = pytest.mark.filterwarnings("ignore:The nvme tier")
DIRECT = not try_direct(Path(tempfile.gettempdir()))
needs_direct = pytest.mark.skipif(not DIRECT, reason="temporary files are on no disk")
CPU = torch.device("cpu")
BLOCK = 4 * PAGE_BYTES
pwritev, preadv = os.pwritev, os.preadv


@pytest.fixture
def store(tmp_path):
    store = NvmeStore(str(tmp_path), rank=0)
    yield store
    store.close()


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes that begin on a page."""
    generator = torch.Generator().manual_seed(seed)
    return zeros(nbytes, torch.uint8, CPU).random_(generator=generator)


def content(store, record, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    out = torch.full((record.nbytes - start if nbytes is None else nbytes,), 77, dtype=torch.uint8)
    store.get(record, out, start).block_host()
    return out


def fail_with(code: int):
    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


# The right bytes


@st.composite
def moves(draw):
    """A size of a record and moves of it: kind, start, length, and the address within a page."""
    nbytes = draw(st.sampled_from([1, 100, PAGE_BYTES, 3 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK - 17]))
    edges = sorted(
        {min(nbytes, edge) for edge in (0, 1, 512, PAGE_BYTES, 5 * PAGE_BYTES, BLOCK, 2 * BLOCK)}
    )
    position = st.one_of(st.sampled_from(edges), st.integers(0, nbytes))
    found = []
    for _ in range(draw(st.integers(1, 14))):
        start, end = sorted((draw(position), draw(position)))
        shift = draw(st.sampled_from([0, 0, 1, 512, start % PAGE_BYTES]))
        found.append((draw(st.sampled_from(["put", "put", "get"])), start, end - start, shift))
    return nbytes, found


@contextlib.contextmanager
def injected(mode: str):
    """Writes that sometimes fail or stop short; reads that always stop short."""
    if mode == "healthy":
        yield
        return
    counter = iter(range(1 << 30))

    def shorten(buffers, nbytes):
        first = buffers[0]
        return [first[: min(nbytes, len(first))]]

    def write(file, buffers, offset):
        turn = next(counter) % 4
        if turn == 1:
            raise OSError(errno.EIO, "injected")
        if turn == 2:  # some of it reaches the disk
            pwritev(file, shorten(buffers, PAGE_BYTES), offset)
            raise OSError(errno.ENOSPC, "injected")
        return pwritev(file, shorten(buffers, PAGE_BYTES) if turn == 3 else buffers, offset)

    def read(file, buffers, offset):
        return preadv(file, shorten(buffers, PAGE_BYTES), offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", write)
        patch.setattr(os, "preadv", read)
        yield


@contextlib.contextmanager
def without_direct():
    """As on a file system that refuses O_DIRECT."""
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT == os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield


PROPERTY = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("mode", ["healthy", "failing"])
@pytest.mark.parametrize("checksum", [False, True])
@settings(PROPERTY, max_examples=50)
@given(case=moves())
def test_moves_agree_with_plain_bytes(small_store, checksum, mode, case):
    _play(small_store(checksum, direct=DIRECT), mode, case)


@settings(PROPERTY, max_examples=20)
@given(case=moves())
def test_moves_agree_with_plain_bytes_without_direct_io(small_store, case):
    _play(small_store(False, direct=False), "healthy", case)


@pytest.fixture
def small_store(tmp_path, monkeypatch):
    """A store with small blocks, the same one for all examples: they get each other's room."""
    made = []
    monkeypatch.setattr(blocks, "CHECKED_BYTES", 2 * PAGE_BYTES)

    def get(checksum, *, direct):
        if not made:
            with contextlib.nullcontext() if direct else without_direct():
                made.append(NvmeStore(str(tmp_path), rank=0, checksum=checksum, block_bytes=BLOCK))
            assert made[0].direct is direct
        return made[0]

    yield get
    made[0].close()


def _play(store, mode, case):
    """Asks for all moves at once; every read has to see exactly the writes before it."""
    nbytes, asked = case
    record, model, tickets, checks = store.reserve(nbytes, "r"), bytearray(nbytes), [], []
    assert record.offset == 0
    with injected(mode):
        for index, (kind, start, length, shift) in enumerate(asked):
            memory = noise(shift + length + 64, seed=index)
            part = memory[shift : shift + length]
            if kind == "put":
                model[start : start + length] = bytes(part.numpy())
                tickets.append(store.put(record, part, start))
            else:
                expected = memory.clone()
                expected.numpy()[shift : shift + length] = list(model[start : start + length])
                tickets.append(store.get(record, part, start))
                checks.append((memory, expected))  # also of what lies beside the tensor
        for ticket in tickets:
            with contextlib.suppress(TierError) if mode == "failing" else contextlib.nullcontext():
                ticket.block_host()
        assert bytes(content(store, record).numpy()) == model
        assert all(torch.equal(memory, expected) for memory, expected in checks)
    store.free(record)


def test_dtypes_and_shapes_are_moved_as_bytes(store):
    record = store.reserve(2 * 3000, "w")
    source = torch.randn(30, 100, dtype=torch.bfloat16)
    store.put(record, source).block_host()
    out = torch.empty_like(source)
    store.get(record, out).block_host()
    assert torch.equal(out, source)


@needs_direct
def test_a_large_aligned_move_needs_no_copy(store, monkeypatch):
    record = store.reserve((9 << 20) + 5, "w")
    source = noise(record.nbytes)
    copied = []
    real = blocks.ctypes.memmove
    monkeypatch.setattr(
        blocks.ctypes, "memmove", lambda to, of, n: (copied.append(n), real(to, of, n))
    )
    store.put(record, source).block_host()
    assert torch.equal(content(store, record), source)
    copied.clear()
    out = zeros(record.nbytes, torch.uint8, CPU)
    store.get(record, out).block_host()
    assert torch.equal(out, source)
    assert sum(copied) < PAGE_BYTES  # the tail


def test_never_written_room_reads_as_zero_even_when_reused(store):
    first = store.reserve(3 * PAGE_BYTES, "first")
    store.put(first, noise(first.nbytes)).block_host()
    store.free(first)
    second = store.reserve(2 * PAGE_BYTES + 9, "second")
    assert second.offset == first.offset
    assert not content(store, second).any()
    store.put(second, torch.ones(1, dtype=torch.uint8), PAGE_BYTES + 1).block_host()
    assert content(store, second).nonzero().tolist() == [[PAGE_BYTES + 1]]


def test_freed_room_is_merged_and_reused(store):
    records = [store.reserve(PAGE_BYTES, str(i)) for i in range(4)]
    for i in (0, 2, 1):
        store.free(records[i])
    assert store.held_bytes == PAGE_BYTES
    assert store.reserve(3 * PAGE_BYTES, "wide").offset == 0


def test_mistakes_are_named(store):
    record = store.reserve(100, "moment of unit 'h.0'")
    with pytest.raises(UsageError, match=r"moment of unit 'h.0' has 100 bytes"):
        store.get(record, torch.empty(51, dtype=torch.int16))
    with pytest.raises(UsageError, match="from -1 on"):
        store.put(record, torch.empty(2), -1)
    with pytest.raises(UsageError, match="contiguous tensor on CPU"):
        store.put(record, torch.empty(4, 4)[:, :2])
    with pytest.raises(UsageError, match="contiguous tensor on CPU, not one on meta"):
        store.put(record, torch.empty(4, device="meta"))
    store.free(record)
    for call in (lambda: store.free(record), lambda: store.get(record, torch.empty(1))):
        with pytest.raises(UsageError, match=r"moment of unit 'h.0' is not a record"):
            call()
    with pytest.raises(UsageError, match="is not a folder"):
        NvmeStore(str(store.path / "absent"), rank=0)


# Order


class Gate:
    """Holds calls back until it is opened."""

    def __init__(self, real):
        self.real, self.open, self.waiting = real, threading.Event(), threading.Event()

    def __call__(self, *args):
        self.waiting.set()
        assert self.open.wait(10)
        return self.real(*args)


def finished(ticket) -> bool:
    return ticket._done.is_set()


def test_a_read_waits_for_an_overlapping_write_and_for_no_other(store, monkeypatch):
    record, other = store.reserve(8 * PAGE_BYTES, "r"), store.reserve(PAGE_BYTES, "other")
    source = noise(record.nbytes)
    gate = Gate(pwritev)
    monkeypatch.setattr(os, "pwritev", gate)
    put = store.put(record, source[: 2 * PAGE_BYTES + 1])
    assert gate.waiting.wait(5)
    overlapping, beside = zeros(9, torch.uint8, CPU), noise(PAGE_BYTES)
    late = store.get(record, overlapping, 2 * PAGE_BYTES - 8)
    store.get(record, beside, 4 * PAGE_BYTES).block_host()
    store.get(other, zeros(PAGE_BYTES, torch.uint8, CPU)).block_host()
    time.sleep(0.02)
    assert not beside.any()
    assert not finished(late)
    assert not finished(put)
    gate.open.set()
    late.block_host()
    assert torch.equal(overlapping, source[2 * PAGE_BYTES - 8 : 2 * PAGE_BYTES + 1])


def test_room_is_free_only_after_the_moves_that_were_asked_for(store, monkeypatch):
    record = store.reserve(PAGE_BYTES, "r")
    gate = Gate(pwritev)
    monkeypatch.setattr(os, "pwritev", gate)
    store.put(record, noise(PAGE_BYTES))
    freeing = threading.Thread(target=store.free, args=(record,))
    freeing.start()
    freeing.join(timeout=0.05)
    assert store.held_bytes == PAGE_BYTES
    gate.open.set()
    freeing.join()
    assert store.held_bytes == 0


def test_of_two_writes_the_later_one_stays(store, monkeypatch):
    record = store.reserve(PAGE_BYTES, "r")
    delays = iter([0.05, 0.0, 0.0])
    monkeypatch.setattr(os, "pwritev", lambda *args: (time.sleep(next(delays)), pwritev(*args))[1])
    tickets = [store.put(record, torch.full((PAGE_BYTES,), i, dtype=torch.uint8)) for i in range(3)]
    for ticket in tickets:
        ticket.block_host()
    assert (content(store, record) == 2).all()


@pytest.fixture
def taken(monkeypatch):
    """Which blocks were taken, in order; none of them is moved before ``taken.begin`` is set."""

    class Taken(list):
        begin = threading.Event()

    order = Taken()

    def note(real, name):
        def call(*args):
            order.append(name)
            assert order.begin.wait(10)
            time.sleep(0.001)
            return real(*args)

        return call

    monkeypatch.setattr(os, "pwritev", note(pwritev, "put"))
    monkeypatch.setattr(os, "preadv", note(preadv, "get"))
    return order


def fill(store, record, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        store.put(record, noise(record.nbytes)).block_host()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("urgent", ["get", "put"])
def test_neither_reads_nor_writes_starve(tmp_path, monkeypatch, taken, threads, urgent):
    store = NvmeStore(str(tmp_path), rank=0, threads=threads, block_bytes=PAGE_BYTES)
    record, other = store.reserve(40 * PAGE_BYTES, "long"), store.reserve(PAGE_BYTES, "short")
    for each in (record, other):
        fill(store, each, monkeypatch)
    queue = (store.put if urgent == "get" else store.get)(record, noise(record.nbytes))
    ticket = getattr(store, urgent)(other, noise(PAGE_BYTES))
    taken.begin.set()
    ticket.block_host()
    queue.block_host()
    assert taken.index(urgent) <= threads + 1
    store.close()


def test_writes_keep_one_thread_while_reads_wait(tmp_path, monkeypatch, taken):
    """Else reads that never stop would keep the memory of writes for ever."""
    store = NvmeStore(str(tmp_path), rank=0, threads=3, block_bytes=PAGE_BYTES)
    record, other = store.reserve(60 * PAGE_BYTES, "read"), store.reserve(60 * PAGE_BYTES, "write")
    fill(store, record, monkeypatch)
    tickets = [store.get(record, noise(record.nbytes)), store.put(other, noise(other.nbytes))]
    taken.begin.set()
    for ticket in tickets:
        ticket.block_host()
    last_read = len(taken) - 1 - taken[::-1].index("get")
    assert taken[:last_read].count("put") >= 5
    store.close()


# Errors


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_told_and_loses_nothing(store, monkeypatch, code):
    record = store.reserve(3 * PAGE_BYTES, "master of unit 'h.0'")
    old, new = noise(record.nbytes, 1), noise(record.nbytes, 2)
    store.put(record, old).block_host()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_with(code))
        ticket = store.put(record, new[: PAGE_BYTES + 10], 100)
        with pytest.raises(TierError) as caught:
            ticket.block_host()
        with pytest.raises(TierError):
            ticket.block_host()
    message = str(caught.value)
    for word in (
        str(store.path), "master of unit 'h.0'", errno.errorcode[code], "kept in memory",
        "bytes 100 to 4206",
    ):  # fmt: skip
        assert word in message
    assert caught.value.errno == code
    assert caught.value.__cause__.errno == code
    expected = old.clone()
    expected[100 : PAGE_BYTES + 110] = new[: PAGE_BYTES + 10]
    assert torch.equal(content(store, record), expected)
    with monkeypatch.context() as patch:  # what is held needs no disk
        patch.setattr(os, "preadv", fail_with(errno.EIO))
        assert torch.equal(content(store, record, 0, PAGE_BYTES), expected[:PAGE_BYTES])
    store.put(record, new).block_host()
    with monkeypatch.context() as patch:  # and after a good write it is held no more
        patch.setattr(os, "preadv", fail_with(errno.EIO))
        with pytest.raises(TierError, match=r"Reading master.*from .* failed: .*\(EIO\)"):
            content(store, record)
    assert torch.equal(content(store, record), new)


def test_a_write_whose_surroundings_cannot_be_read_loses_nothing(store, monkeypatch):
    record = store.reserve(2 * PAGE_BYTES, "r")
    old, new = noise(record.nbytes, 1), noise(10, 2)
    store.put(record, old).block_host()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_with(errno.EIO))
        with pytest.raises(TierError, match="kept in memory"):
            store.put(record, new, 50).block_host()
    expected = old.clone()
    expected[50:60] = new
    assert torch.equal(content(store, record), expected)


def test_one_of_many_blocks_fails(tmp_path, monkeypatch):
    store = NvmeStore(str(tmp_path), rank=3, block_bytes=PAGE_BYTES)
    record, source = store.reserve(20 * PAGE_BYTES, "r"), noise(20 * PAGE_BYTES)

    def write(file, buffers, offset):
        if offset == record.offset + 7 * PAGE_BYTES:
            raise OSError(errno.EIO, "injected")
        return pwritev(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    with pytest.raises(TierError, match=r"r \(bytes 28672 to 32768\) to .* on rank 3 failed"):
        store.put(record, source).block_host()
    assert torch.equal(content(store, record), source)
    store.close()


def test_a_file_that_ends_early_or_takes_nothing_is_an_error(store, monkeypatch):
    record = store.reserve(PAGE_BYTES, "r")
    store.put(record, noise(PAGE_BYTES)).block_host()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(TierError, match="nothing more could be written"):
            store.put(record, noise(PAGE_BYTES)).block_host()
    store.put(record, noise(PAGE_BYTES)).block_host()
    os.ftruncate(store._file, 0)
    with pytest.raises(TierError, match="the file ended early"):
        content(store, record)


def _flip(store, position: int) -> None:
    page = zeros(PAGE_BYTES, torch.uint8, CPU)
    view = memoryview(page.numpy())
    at = position // PAGE_BYTES * PAGE_BYTES
    preadv(store._file, [view], at)
    page[position - at] ^= 1
    pwritev(store._file, [view], at)


def test_a_checksum_finds_a_flipped_bit(tmp_path):
    store = NvmeStore(str(tmp_path), rank=0, checksum=True)
    size = blocks.CHECKED_BYTES
    first = store.reserve(100, "first")
    record = store.reserve(3 * size + 10, "second moment of 'h.1'")
    source = noise(record.nbytes)
    store.put(record, source).block_host()
    store.put(record, source[: size + 9], 0).block_host()  # a part of a block is checked as well
    _flip(store, record.offset + size + 5000)
    for start, nbytes in ((0, record.nbytes), (size + 100_000, 10), (size - 1, 2)):
        with pytest.raises(TierError, match=r"second moment of 'h.1' .* checksum"):
            content(store, record, start, nbytes)
    assert torch.equal(content(store, record, 0, size), source[:size])
    assert torch.equal(content(store, record, 2 * size), source[2 * size :])
    with pytest.raises(TierError, match="kept in memory"):  # its other bytes are not to be trusted
        store.put(record, source[:10], size + 7).block_host()
    store.put(record, source[size : 2 * size], size).block_host()
    assert torch.equal(content(store, record), source)
    assert not content(store, first).any()
    store.close()


# Room and budget


class Statvfs:
    f_bavail, f_frsize = 3, PAGE_BYTES


def test_too_little_space_is_one_sentence_before_anything_is_written(store, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: Statvfs)
    with pytest.raises(TierError) as caught:
        store.reserve(1 << 20, "r")
    assert str(caught.value) == (
        f"The nvme tier of rank 0 needs 1048576 more bytes in {store.path}, where 12288 are "
        "free; free space there, or set tiers.path to a larger disk."
    )
    assert caught.value.errno == errno.ENOSPC
    assert os.fstat(store._file).st_size == os.fstat(store._file).st_blocks == 0
    assert store.held_bytes == 0
    assert store.reserve(3 * PAGE_BYTES, "what fits").offset == 0


def test_a_disk_that_fills_up_between_is_the_same_error(store, monkeypatch):
    real = os.posix_fallocate

    def fill_up(file, begin, nbytes):
        real(file, begin, nbytes // 2)
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with pytest.raises(TierError, match=r"needs .* more bytes"):
        store.reserve(1 << 20, "r")
    assert os.fstat(store._file).st_size == 0


def test_reserved_room_is_taken_on_the_disk_at_once(store):
    store.reserve(1 << 20, "r")
    assert os.fstat(store._file).st_blocks * 512 >= 1 << 20


def test_file_grows_in_steps_and_within_the_budget(tmp_path):
    store = NvmeStore(str(tmp_path), rank=0)
    store.reserve(1, "r")
    assert os.fstat(store._file).st_size == nvme.GROWTH_BYTES
    store.close()
    store = NvmeStore(str(tmp_path), rank=0, budget=Budget("nvme", 9 * PAGE_BYTES))
    store.reserve(1, "r")
    assert os.fstat(store._file).st_size == 9 * PAGE_BYTES
    store.close()


def test_bytes_are_claimed_and_released(tmp_path, monkeypatch):
    budget = Budget("nvme", 20_000)
    store = NvmeStore(str(tmp_path), rank=0, budget=budget)
    record = store.reserve(6000, "a")
    assert budget.held_bytes == store.held_bytes == 6000
    with pytest.raises(BudgetError, match="b needs 15000 bytes of tier nvme"):
        store.reserve(15_000, "b")
    store.free(record)
    assert budget.held_bytes == store.held_bytes == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: Statvfs)
        patch.setattr(store, "_free", nvme.FreeRanges())
        patch.setattr(store, "_file_bytes", 0)
        with pytest.raises(TierError, match="needs 16384 more bytes"):
            store.reserve(3 * PAGE_BYTES + 1, "no room")
    assert budget.held_bytes == 0
    store.reserve(20_000, "c")
    store.close()
    assert budget.held_bytes == 0


# The folder


def folders(path) -> list[Path]:
    return sorted(path.iterdir())


def test_the_file_has_no_name_and_the_folder_is_private(store, tmp_path):
    [folder] = folders(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(folder)) == ["owner.json", "owner.lock"]
    facts = os.fstat(store._file)
    assert (facts.st_mode & 0o777, facts.st_nlink) == (0o600, 0)
    assert facts.st_dev == folder.stat().st_dev
    store.reserve(10, "r")
    note = json.loads((folder / "owner.json").read_text())
    assert (note["pid"], note["host"], note["rank"]) == (os.getpid(), socket.gethostname(), 0)
    assert note["bytes"] == nvme.GROWTH_BYTES
    assert abs(note["started"] - time.time()) < 60


def test_close_waits_and_removes_everything(tmp_path, monkeypatch):
    store = NvmeStore(str(tmp_path), rank=0)
    record = store.reserve(20 * PAGE_BYTES, "r")
    monkeypatch.setattr(os, "pwritev", lambda *args: (time.sleep(0.01), pwritev(*args))[1])
    tickets = [store.put(record, noise(PAGE_BYTES), i * PAGE_BYTES) for i in range(20)]
    store.close()
    assert all(finished(ticket) for ticket in tickets)
    assert folders(tmp_path) == []
    store.close()
    with pytest.raises(UsageError, match="is closed"):
        store.reserve(1, "r")


def test_a_dropped_store_goes_after_its_moves_and_tickets_keep_no_memory(tmp_path):
    store = NvmeStore(str(tmp_path), rank=0)
    record, source = store.reserve(8 << 20, "r"), noise(8 << 20)
    ticket, memory = store.put(record, source), weakref.ref(source)
    del store, source
    ticket.block_host()
    deadline = time.monotonic() + 5
    while (folders(tmp_path) or memory() is not None) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert folders(tmp_path) == []
    assert memory() is None


def test_two_stores_on_one_path_do_not_touch_each_other(tmp_path):
    first, second = (NvmeStore(str(tmp_path), rank=rank) for rank in (0, 1))
    records = [store.reserve(PAGE_BYTES, "r") for store in (first, second)]
    for index, store in enumerate((first, second)):
        store.put(records[index], noise(PAGE_BYTES, index)).block_host()
    NvmeStore(str(tmp_path), rank=2).close()
    assert run(["doctor", str(tmp_path), "--clean"]) == 0
    assert len(folders(tmp_path)) == 2
    first.close()
    assert len(folders(tmp_path)) == 1
    assert torch.equal(content(second, records[1]), noise(PAGE_BYTES, 1))
    second.close()


def fake_folder(path: Path, name: str, **changes) -> Path:
    """What a killed process leaves."""
    note = {"kind": "shardwise run folder", "pid": 1, "host": socket.gethostname(), "rank": 0}
    note |= {"started": 0.0, "bytes": 0, **changes}
    folder = path / name
    folder.mkdir(parents=True)
    (folder / "owner.lock").touch()
    (folder / "owner.json").write_text(json.dumps(note))
    return folder


def test_only_folders_that_we_made_and_left_are_removed(tmp_path):
    outside = fake_folder(tmp_path / "outside", "shardwise-1-00000000")
    path = tmp_path / "path"
    stale = fake_folder(path, "shardwise-1-00000001")
    kept = [
        fake_folder(path, "shardwise-1-0000000g"),
        fake_folder(path, "my-shardwise-1-00000001"),
        fake_folder(path, "shardwise-1-00000002", kind="another program's"),
        fake_folder(path, "shardwise-1-00000003", host="another-host.example"),
        fake_folder(path, "shardwise-1-00000004"),
        fake_folder(path, "shardwise-1-00000005"),
        path / "shardwise-1-00000006",
        path / "shardwise-1-00000007",
        path / "shardwise-1-00000008",
        fake_folder(path, "shardwise-1-00000009"),
    ]
    (kept[4] / "thesis.txt").write_text("years of work")
    (kept[5] / "owner.json").unlink()
    kept[6].symlink_to(outside)
    kept[7].write_text("a file")
    kept[8].mkdir()
    (kept[9] / "owner.lock").unlink()
    (kept[9] / "owner.lock").symlink_to(outside / "owner.lock")
    NvmeStore(str(path), rank=0).close()
    assert run(["doctor", str(path), "--clean"]) == 0
    assert not stale.exists()
    assert folders(path) == sorted(kept)
    assert sorted(os.listdir(kept[4])) == ["owner.json", "owner.lock", "thesis.txt"]
    assert sorted(os.listdir(outside)) == ["owner.json", "owner.lock"]


def test_a_held_lock_keeps_a_folder(tmp_path):
    folder = fake_folder(tmp_path, "shardwise-1-00000001")
    with open(folder / "owner.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        NvmeStore(str(tmp_path), rank=0).close()
        assert folder.exists()
    NvmeStore(str(tmp_path), rank=0).close()
    assert not folder.exists()


def _become_a_job(paths: list[Path], ready: int) -> None:
    """In a forked process: makes stores, forks a process of its own, and lives until killed."""
    try:
        stores = [NvmeStore(str(path), rank=0) for path in paths]
        for store in stores:
            record = store.reserve(1 << 20, "r")
            store.put(record, torch.frombuffer(bytearray(1 << 20), dtype=torch.uint8)).block_host()
        child = os.fork()
        if child:
            os.write(ready, str(child).encode())
        time.sleep(60)
    finally:
        os._exit(1)


def test_a_killed_process_leaves_no_data_and_its_folder_goes(tmp_path):
    """Also while a process that it forked, such as a data loader's worker, lives on."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    ready, tell = os.pipe()
    job = os.fork()
    if job == 0:
        _become_a_job(paths, tell)
    os.close(tell)
    child = int(os.read(ready, 100))
    try:
        assert any("(deleted)" in link for link in _open_files(job) if str(tmp_path) in link)
        NvmeStore(str(paths[0]), rank=0).close()
        assert [len(folders(path)) for path in paths] == [1, 1]
        os.kill(job, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(job, 0)[1])
        assert not [link for link in _open_files(child) if str(tmp_path) in link]
        for path in paths:
            files = [file for file in path.rglob("*") if file.is_file()]
            assert sorted(file.name for file in files) == ["owner.json", "owner.lock"]
            assert sum(file.stat().st_size for file in files) < 1000
        assert run(["doctor", str(paths[0]), "--clean"]) == 0
        NvmeStore(str(paths[1]), rank=0).close()
        assert [folders(path) for path in paths] == [[], []]
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)  # an orphan of ours, asleep


def _open_files(pid: int) -> list[str]:
    directory = f"/proc/{pid}/fd"
    return [os.readlink(f"{directory}/{name}") for name in os.listdir(directory)]


def test_a_forked_child_leaves_everything_to_its_parent(tmp_path):
    store = NvmeStore(str(tmp_path), rank=0)
    record = store.reserve(PAGE_BYTES, "r")
    store.put(record, noise(PAGE_BYTES)).block_host()
    owner = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            store.close()
            nvme._dismantle(store._movers, store._file, store._folder, owner)
            code = 2
            try:
                store.get(record, noise(PAGE_BYTES))
            except UsageError as error:
                code = 0 if "forked" in str(error) and not store._finalizer.alive else 3
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(folders(tmp_path)) == 1
    assert torch.equal(content(store, record), noise(PAGE_BYTES))
    store.close()
    assert folders(tmp_path) == []


# File systems


@needs_direct
@pytest.mark.filterwarnings("error")
def test_a_disk_is_used_directly(tmp_path):
    with contextlib.closing(NvmeStore(str(tmp_path), rank=0)) as store:
        assert store.direct
        assert fcntl.fcntl(store._file, fcntl.F_GETFL) & os.O_DIRECT


def test_a_file_system_without_direct_io_is_told(tmp_path):
    with without_direct(), pytest.warns(RuntimeWarning, match="no direct I/O") as caught:
        store = NvmeStore(str(tmp_path), rank=0)
    assert len(caught) == 1
    assert not store.direct
    store.close()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no tmpfs here")
def test_memory_is_not_taken_for_a_disk():
    with pytest.warns(RuntimeWarning, match="takes memory"):
        store = NvmeStore("/dev/shm", rank=0)
    with contextlib.closing(store):
        assert not store.direct
        record = store.reserve(3 * PAGE_BYTES + 1, "r")
        store.put(record, noise(record.nbytes)).block_host()
        assert torch.equal(content(store, record), noise(record.nbytes))


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    store = NvmeStore(str(tmp_path), rank=0)
    monkeypatch.undo()
    facts = os.fstat(store._file)
    assert (facts.st_mode & 0o777, facts.st_nlink, store.direct) == (0o600, 0, DIRECT)
    store.close()
    assert folders(tmp_path) == []


def test_a_path_that_nothing_can_be_made_in(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", fail_with(errno.EACCES))
    with pytest.raises(TierError, match=r"cannot make and lock a folder in .*Permission denied"):
        NvmeStore(str(tmp_path), rank=0)


def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", fail_with(errno.ENOSPC))
    with pytest.raises(TierError, match="No space left"):
        NvmeStore(str(tmp_path), rank=0)
    assert folders(tmp_path) == []
