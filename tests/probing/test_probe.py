"""The probe: what it measures, that ranks agree on it, how it is stored, and the command."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import shardwise as sw
from shardwise.cli.main import run
from shardwise.core.cluster import Cluster, Curve
from shardwise.core.ticket import DONE
from shardwise.cost.file import dump_cluster, load_cluster, parse_cluster
from shardwise.probing import links, room
from shardwise.probing.clock import Clock
from shardwise.probing.probe import VISITS
from shardwise.probing.scope import FULL, QUICK, Scope
from tests import harness

harness.PRELOAD += ["shardwise.probing.cache"]
pytestmark = pytest.mark.timeout(120)
KINDS = {"fp32", "bf16", "fp16", "int8", "int4"}


def curves(cluster: Cluster) -> list[Curve]:
    device = cluster.device
    links = [curve for level in cluster.levels for curve in (level.gather, level.reduce)]
    many = (device.forward, device.backward, device.encode, device.decode)
    found = [curve for curves in many for curve in curves.values()]
    return [*(curve for curve in links if curve), *found, device.update, device.copy]


def probe_quickly(levels: str | None = None, path: str | None = None) -> str:
    return dump_cluster(sw.probe(levels, path=path, quick=True))


def check(text: str, levels: str) -> Cluster:
    cluster = parse_cluster(text)
    assert dump_cluster(cluster) == text
    assert str(cluster.topology) == levels
    for level in cluster.levels:
        assert (level.gather is not None) == (level.reduce is not None) == (level.size > 1)
        assert 0 <= level.busy <= 1
    for curve in curves(cluster):
        assert all(a[1] <= b[1] for a, b in pairwise(curve.points))  # more never takes less
    assert "float32" in cluster.device.forward
    assert set(cluster.device.forward) == set(cluster.device.backward)
    assert set(cluster.device.encode) == set(cluster.device.decode) == KINDS
    assert 0 < cluster.device.memory_bytes < 1 << 50
    assert cluster.host is None  # of CPUs it is the same memory
    return cluster


class TestProbe:
    def test_two_ranks_of_one_node(self, two: harness.Workers, tmp_path: Path) -> None:
        texts = two.run(probe_quickly, path=str(tmp_path))
        assert texts[0] == texts[1]
        cluster = check(texts[0], "node=2,world=1")
        assert cluster.level("node").source == "shared memory"
        sent = [amount for amount, _ in cluster.level("node").gather.points]
        assert sent == list(QUICK.sent_bytes)
        assert cluster.disk is not None
        assert cluster.disk.read > 0
        assert cluster.disk.write > 0
        assert not list(tmp_path.iterdir())  # the store is gone

    def test_two_nodes_of_one_rank(self, two: harness.Workers) -> None:
        texts = two.run(probe_quickly, "node=1,world=2")
        assert texts[0] == texts[1]
        check(texts[0], "node=1,world=2")

    def test_one_rank(self, one: harness.Workers) -> None:
        (text,) = one.run(probe_quickly)
        check(text, "node=1,world=1")
        (text,) = one.run(probe_quickly, "world=1")
        check(text, "world=1")

    def test_ranks_share_a_host_and_its_memory(self, two: harness.Workers) -> None:
        shares = two.run(share)
        assert shares[0] == shares[1]
        assert shares[0][1] == 2
        assert shares[0][0] <= shares[0][2] / 2
        assert shares[0][3] == shares[1][3] == os.sched_getaffinity(0)

    def test_ranks_that_have_processors_of_their_own(self, two: harness.Workers) -> None:
        """Both count for the host, and each works on its own."""
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) < 2:
            pytest.skip("one processor")
        assert two.run(share, allowed[:2])[0][3] == set(allowed[:2])

    def test_a_folder_that_is_none_is_an_error_on_all_ranks(self, two: harness.Workers) -> None:
        for sentence in two.run(refused, path="/nowhere/at/all"):
            assert "/nowhere/at/all is not a folder" in sentence

    def test_a_dtype_that_is_none(self, two: harness.Workers) -> None:
        for sentence in two.run(refused, dtype="int3"):
            assert sentence.startswith("'int3' is not a dtype")

    def test_a_dtype_that_ends_processes_on_one_rank_is_an_error_on_all(
        self, two: harness.Workers
    ) -> None:
        for sentence in two.run(refused_on_one_rank):
            assert sentence.startswith("A product in bfloat16 kills a process")

    def test_progress_ends_where_it_said_and_passes_are_visited_again(
        self, one: harness.Workers
    ) -> None:
        ((told, dtypes),) = one.run(told_of)
        assert [done for done, _, _ in told] == list(range(told[0][1]))
        for dtype in dtypes:
            places = [done for done, _, what in told if what.endswith(f"blocks in {dtype}")]
            assert len(places) == VISITS
            assert all(b - a >= len(dtypes) for a, b in pairwise(places))
            assert places[-1] > max(done for done, _, what in told if "codec" in what)

    def test_the_users_random_numbers_stay(self, one: harness.Workers) -> None:
        assert one.run(random_numbers) == [True]

    def test_sw_probe_stays_a_function_whatever_was_imported(self) -> None:
        import shardwise.probing.scope  # noqa: F401

        assert callable(sw.probe)


def share(processors: list[int] | None = None) -> tuple[int, int, int, frozenset[int]]:
    import psutil

    before = os.sched_getaffinity(0)
    if processors is not None:
        os.sched_setaffinity(0, {processors[int(os.environ["RANK"])]})

    from shardwise.comm.control import Control

    control = Control(2, int(os.environ["RANK"]), 60.0)
    found = room.find_room(control)
    control.close()
    os.sched_setaffinity(0, before)
    total = psutil.virtual_memory().total
    return found.host_bytes, found.ranks_on_host, total, found.processors


def told_of() -> tuple[list[tuple[int, int, str]], list[str]]:
    told: list[tuple[int, int, str]] = []
    cluster = sw.probe(quick=True, progress=lambda *row: told.append(row))
    return told, list(cluster.device.forward)


def refused(**arguments: Any) -> str:
    with pytest.raises(sw.UsageError) as raised:
        sw.probe(quick=True, **arguments)
    return str(raised.value)


def refused_on_one_rank() -> str:
    from shardwise.probing import probe

    with pytest.MonkeyPatch.context() as monkeypatch:
        able = ("float32", "bfloat16") if os.environ["RANK"] == "0" else ("float32",)
        monkeypatch.setattr(probe, "measured_dtypes", lambda *_: able)
        return refused(dtype="bfloat16")


def random_numbers() -> bool:
    import torch

    before = torch.random.get_rng_state()
    sw.probe(quick=True)
    return torch.equal(before, torch.random.get_rng_state())


class Slowed:
    """A device whose products take a millisecond, and others while hops run beside them."""

    def __init__(self, beside_s: float) -> None:
        self._now, self._running, self._beside_s = 0.0, False, beside_s

    def perf_counter(self) -> float:
        return self._now

    def mm(self, *_: Any, **__: Any) -> None:
        self._now += self._beside_s if self._running else 1e-3

    def begin_hops(self) -> "Slowed":
        self._running = True
        return self

    def block_host(self) -> None:
        self._running = False


@pytest.mark.parametrize(("beside_s", "lost"), [(1e-3, 0.0), (1.25e-3, 0.2), (4e-3, 0.75)])
def test_what_compute_loses_to_hops(
    monkeypatch: pytest.MonkeyPatch, beside_s: float, lost: float
) -> None:
    """As it is measured of GPUs."""
    import torch

    from shardwise.comm.control import Control
    from shardwise.probing import links
    from shardwise.probing.clock import Clock

    slowed, device = Slowed(beside_s), torch.device("cpu")
    monkeypatch.setattr(links, "time", slowed)
    monkeypatch.setattr(torch, "mm", slowed.mm)
    clock = Clock(Control(1, 0, 1.0), device, QUICK)
    assert links.lost_to_hops(slowed.begin_hops, device, clock, 0.3) == pytest.approx(lost)
    assert not slowed._running


def test_processors_are_busy_when_they_do_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that no tick has seen counts: of two seconds of two processors these rest 1.5, or are
    somebody else's; a third one is not this host's to use."""
    seconds, rested = iter([10.0, 12.0]), iter([(5.0, 5.0, 5.0, 5.0), (5.5, 5.4, 5.6, 7.0)])

    def cpu_times(*, percpu: bool) -> list[SimpleNamespace]:
        assert percpu
        idle, iowait, steal, other = next(rested)
        return [
            SimpleNamespace(user=1.0, idle=idle, iowait=iowait, steal=0.0),
            SimpleNamespace(user=1.0, idle=7.0, iowait=0.0, steal=steal),
            SimpleNamespace(user=1.0, idle=other, iowait=0.0, steal=0.0),
        ]

    monkeypatch.setattr(links.psutil, "cpu_times", cpu_times)
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    alone = cast("Clock", SimpleNamespace(slowest=list))
    busy = links._kept_busy(lambda: DONE, alone, {0, 1})
    assert busy == pytest.approx(1 - 1.5 / 4)


class TestSweep:
    """Which amounts are measured, with a device that takes as long as it is told."""

    def points(self, bytes_per_s: float, scope: Scope = FULL) -> tuple[tuple[float, float], ...]:
        import torch

        from shardwise.comm.control import Control
        from shardwise.probing.clock import Clock

        clock = Clock(Control(1, 0, 1.0), torch.device("cpu"), scope)
        return clock.sweep(scope.sent_bytes, lambda n: (n, n / bytes_per_s)).points

    def test_a_fast_link_is_measured_to_the_end(self) -> None:
        assert [amount for amount, _ in self.points(1e9)] == list(FULL.sent_bytes)

    def test_a_slow_link_ends_where_patience_does(self) -> None:
        *others, last = self.points(3e6)
        assert [amount for amount, _ in others] == list(FULL.sent_bytes[:3])
        assert last[1] == pytest.approx(FULL.patience_s, rel=0.01)

    def test_a_hopeless_link_still_has_a_curve(self) -> None:
        assert len(self.points(100)) == 2

    def test_batches_of_short_calls_and_few_long_ones(self) -> None:
        import torch

        from shardwise.comm.control import Control
        from shardwise.probing.clock import Clock

        for seconds, batches in ((1e-4, [200] * 5), (0.5, [1] * 3)):
            clock, asked = Clock(Control(1, 0, 1.0), torch.device("cpu"), FULL), []

            def lap(count: int, asked: list = asked, seconds: float = seconds) -> tuple[float]:
                asked.append(count)
                return (seconds,)

            assert clock.measure(lap) == [seconds]
            assert asked[-len(batches) :] == batches


class TestRoom:
    def test_the_tightest_control_group_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inner = tmp_path / "a" / "b"
        inner.mkdir(parents=True)
        (inner / "memory.max").write_text("max\n")
        (inner.parent / "memory.max").write_text("1000000\n")
        (tmp_path / "memory.max").write_text("2000000\n")
        monkeypatch.setattr(room, "_own_groups", lambda: [inner, inner.parent, tmp_path])
        assert room._memory_limit() == (str(inner.parent), 1000000)

    def test_no_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "_own_groups", list)
        assert room._memory_limit() == ("", None)


class TestCache:
    def test_hit_and_miss(self, two: harness.Workers, tmp_path: Path) -> None:
        first = two.run(cached, str(tmp_path))
        (file,) = (tmp_path / "shardwise").iterdir()
        again = two.run(cached, str(tmp_path))
        assert first[0] == first[1] == file.read_text()
        assert again[0] == again[1]
        assert timeless(again[0]) == timeless(first[0])
        two.run(cached, str(tmp_path), "node=1,world=2")
        assert len(list((tmp_path / "shardwise").iterdir())) == 2
        file.write_text("name = 3\n")  # neither whole nor ours: measured again
        assert two.run(cached, str(tmp_path))[0] == file.read_text()

    def test_memory_and_disk_are_what_is_free_now(
        self, two: harness.Workers, tmp_path: Path
    ) -> None:
        measured = parse_cluster(two.run(cached, str(tmp_path), path=str(tmp_path))[0])
        (file,) = (tmp_path / "shardwise").iterdir()
        stored = replace(
            measured,
            device=replace(measured.device, memory_bytes=1),
            disk=replace(measured.disk, size_bytes=2),
        )
        file.write_text(dump_cluster(stored))
        texts = two.run(cached, str(tmp_path), path=str(tmp_path))
        assert texts[0] == texts[1]
        now = parse_cluster(texts[0])
        assert now.device.memory_bytes == pytest.approx(measured.device.memory_bytes, rel=0.5)
        assert now.disk.size_bytes == pytest.approx(measured.disk.size_bytes, rel=0.5)
        assert timeless(texts[0]) == timeless(dump_cluster(stored))

    @pytest.mark.parametrize("times", [1e-5, 1e5])
    def test_links_of_another_speed_are_measured_again(
        self, two: harness.Workers, tmp_path: Path, times: float
    ) -> None:
        measured = two.run(cached, str(tmp_path))[0]
        (file,) = (tmp_path / "shardwise").iterdir()
        other = dump_cluster(with_slower_links(parse_cluster(measured), times))
        file.write_text(other)
        texts = two.run(cached, str(tmp_path))
        assert texts[0] == texts[1] == file.read_text() != other
        node = parse_cluster(texts[0]).level("node").gather
        assert node.points[-1][1] < 10

    def test_a_disk_that_is_gone_is_an_error_on_all_ranks(
        self, two: harness.Workers, tmp_path: Path
    ) -> None:
        folder = tmp_path / "disk"
        folder.mkdir()
        two.run(cached, str(tmp_path), path=str(folder))
        folder.rmdir()
        for sentence in two.run(refused_from_cache, str(tmp_path), str(folder)):
            assert f"{folder} is not a folder" in sentence

    def test_a_folder_that_cannot_be_written(self, one: harness.Workers, tmp_path: Path) -> None:
        (tmp_path / "shardwise").write_text("a file where the folder would be")
        (text,) = one.run(cached, str(tmp_path))
        check(text, "node=1,world=1")


def cached(folder: str, levels: str | None = None, path: str | None = None) -> str:
    from shardwise.probing import recheck
    from shardwise.probing.cache import cached_probe

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        monkeypatch.setattr(recheck, "CHANGED", 1e3)  # a quick probe's links are never the same
        return dump_cluster(cached_probe(levels, path=path, quick=True))


def refused_from_cache(folder: str, path: str) -> str:
    with pytest.raises(sw.UsageError) as raised:
        cached(folder, path=path)
    return str(raised.value)


def timeless(text: str) -> Cluster:
    """A cluster but for what is free at a moment."""
    cluster = parse_cluster(text)
    disk = replace(cluster.disk, size_bytes=1) if cluster.disk is not None else None
    return replace(cluster, device=replace(cluster.device, memory_bytes=1), disk=disk)


def with_slower_links(cluster: Cluster, times: float) -> Cluster:
    def slower(curve: Curve | None) -> Curve | None:
        return curve and Curve(tuple((amount, times * s) for amount, s in curve.points))

    levels = tuple(replace(level, gather=slower(level.gather)) for level in cluster.levels)
    return replace(cluster, levels=levels)


class TestCommand:
    def test_it_writes_the_cluster(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        file = tmp_path / "cluster.toml"
        arguments = ["probe", "--quick", "-o", str(file), "--workers", "2", "--json"]
        assert run(arguments) == 0
        answer = json.loads(capsys.readouterr().out)
        check(file.read_text(), "node=2,world=1")
        stored = next((tmp_path / "cache" / "shardwise").iterdir())
        assert answer["written"] == [str(file), str(stored)]
        assert stored.read_text() == file.read_text()
        assert answer["cluster"]["levels"][0]["name"] == "node"

    def test_it_prints_for_people(self, capsys: pytest.CaptureFixture[str]) -> None:
        from shardwise.cli.probe import _finish

        _finish({"cluster": dump_cluster(example()), "stored": "/there/probe.toml"}, None, False)
        printed = capsys.readouterr().out
        for text in (
            "level world",
            "shared memory",
            "GFLOP/s",
            "int4",
            "elements/s",
            "reads 2 GB/s",
        ):
            assert text in printed
        assert "written: /there/probe.toml" in printed

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["-o", "{folder}/no/cluster.toml"], "no/cluster.toml cannot be written: No such file"),
            (["-o", "{folder}"], "is a folder; give the name of a .toml file"),
            (
                ["--dtype", "int3"],
                "'int3' is not a dtype that shardwise probe measures; use float32",
            ),
            (["--levels", "node"], "is not NAME=SIZE"),
            (["--path", "{folder}/no"], "is not a folder; give one on a local disk"),
        ],
    )
    def test_a_mistake_is_one_sentence_before_anything_is_measured(
        self,
        arguments: list[str],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        from shardwise.train import launch

        monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("something was measured"))
        arguments = [argument.format(folder=tmp_path) for argument in arguments]
        assert run(["probe", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1
        assert not list(tmp_path.iterdir())


def example() -> Cluster:
    line = [[1000.0, 0.001], [2000.0, 0.002]]
    table = {
        "name": "an example",
        "levels": [
            {"name": "node", "size": 1},
            {"name": "world", "size": 2, "gather": line, "reduce": line, "busy": 0.5, "source": "shared memory"},
        ],
        "device": {
            "name": "a CPU", "kind": "cpu", "memory": 10**9, "flops": {"float32": 1e9},
            "update": line, "copies": line, "encode": {"int4": line}, "decode": {"int4": line},
        },
        "disk": {"size": 10**12, "read": 2e9, "write": 1e9},
    }  # fmt: skip
    import tomli_w

    return load_cluster(parse_cluster(tomli_w.dumps(table)))
