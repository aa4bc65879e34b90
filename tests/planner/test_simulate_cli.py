"""`shardwise simulate` and `sw.simulate`: one answer, in several forms."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.cli.main import run
from shardwise.core.cluster import ClusterError, Curve
from shardwise.core.errors import PlanError
from shardwise.cost.file import dump_cluster, load_cluster
from shardwise.plans.builtin import builtin

ROW_KEYS = {
    "ranks", "micro_batch", "bandwidth", "step_s", "tokens_per_s", "flops_per_s", "exposed", "memory", "fits",
}  # fmt: skip
MODEL = ["--model", "gpt-1.3b", "--seq", "1024"]


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_the_librarys_answer(capsys) -> None:
    options = ["--cluster", "dgx-a100", "--ranks", "16", "--accumulate", "2", "--micro-batch", "4"]
    answer = ask(capsys, "amsp", *MODEL, *options)
    assert set(answer) == {
        "plan", "model", "cluster", "varies", "accumulate", "seq", "flat", "rows",
    }  # fmt: skip
    (row,) = answer["rows"]
    assert set(row) == ROW_KEYS
    cluster = load_cluster("dgx-a100").with_world(16)
    estimate = sw.simulate("amsp", "gpt-1.3b", cluster, micro_batch=4, accumulate=2, seq=1024)
    assert row["step_s"] == estimate.step_s
    assert row["tokens_per_s"] == 16 * 4 * 2 * 1024 / estimate.step_s
    assert row["flops_per_s"] == estimate.flops / estimate.step_s
    assert row["exposed"] == estimate.exposed
    assert sum(row["exposed"].values()) == pytest.approx(row["step_s"])
    assert row["memory"]["device"] == estimate.memory.total
    assert answer["plan"]["precision"]["compute"] == "bfloat16"


def test_more_ranks_process_more(capsys) -> None:
    answer = ask(capsys, "zero3", *MODEL, "--cluster", "a800-amsp", "--ranks", "8,64,512")
    assert answer["varies"] == "ranks"
    assert [row["ranks"] for row in answer["rows"]] == [8, 64, 512]
    rates = [row["tokens_per_s"] for row in answer["rows"]]
    assert rates[0] < rates[1] < rates[2]
    needs = [row["memory"]["device"] for row in answer["rows"]]
    assert needs[0] > needs[1] > needs[2]  # zero3 cuts everything


def test_faster_links_take_less(capsys) -> None:
    rates = ["--bandwidth", "world=10gbit,25GB/s", "--bandwidth", "node=100GB/s"]
    answer = ask(capsys, "zero3", *MODEL, "--cluster", "dgx-a100", *rates)
    assert answer["varies"] == "bandwidth world"
    slow, fast = answer["rows"]
    assert slow["bandwidth"] == {"node": 1e11, "world": 1.25e9}
    assert fast["bandwidth"] == {"node": 1e11, "world": 2.5e10}
    assert fast["step_s"] < slow["step_s"] / 2
    cluster = load_cluster("dgx-a100").with_bandwidth("node", 1e11).with_bandwidth("world", 1.25e9)
    assert slow["step_s"] == sw.simulate("zero3", "gpt-1.3b", cluster, seq=1024).step_s


def test_larger_batches_need_more(capsys) -> None:
    options = ["--cluster", "dgx-a100", "--ranks", "8", "--micro-batch", "1,64"]
    small, large = ask(capsys, "ddp", *MODEL, *options)["rows"]
    assert (small["micro_batch"], large["micro_batch"]) == (1, 64)
    assert large["flops_per_s"] > small["flops_per_s"]
    assert (small["fits"], large["fits"]) == (True, False)


def test_flat_collectives_take_longer_on_many_ranks(capsys) -> None:
    # One ring has as many latencies as ranks; the ladder has as many as members of each level.
    options = ["zero3", *MODEL, "--cluster", "a800-amsp", "--ranks", "512"]
    ladder, flat = ask(capsys, *options), ask(capsys, *options, "--flat")
    assert (ladder["flat"], flat["flat"]) == (False, True)
    assert flat["rows"][0]["exposed"]["gather"] > ladder["rows"][0]["exposed"]["gather"]


def test_the_table(capsys) -> None:
    assert run(["simulate", "ddp", "--cluster", "dgx-a100", "--micro-batch", "1,2"]) == 0
    shown = capsys.readouterr().out
    assert "ddp: llama-7b on dgx-a100" in shown
    for word in ("micro-batch", "s/step", "tokens/s", "compute", "reduce", "memory", "fits", "no"):
        assert word in shown
    assert "on device, which has" in shown  # 7B in full needs more than 40 GiB


def test_the_chart(tmp_path: Path, capsys) -> None:
    path = tmp_path / "chart.svg"
    arguments = ["--cluster", "dgx-a100", "--ranks", "8,16,64", "-o", str(path)]
    assert run(["simulate", "zero3", *MODEL, *arguments]) == 0
    assert f"written: {path}" in capsys.readouterr().out.replace("\n", "")
    words = {element.text for element in ET.parse(path).getroot().iter()}
    assert {"zero3", "without transfers", "ranks", "TFLOP/s per rank", "8", "16", "64"} <= words


def test_the_trace_is_the_step_on_the_runtimes_tracks(tmp_path: Path, capsys) -> None:
    path = tmp_path / "step.json"
    options = ["--cluster", "dgx-a100", "--ranks", "16", "--trace", str(path)]
    (row,) = ask(capsys, "amsp", *MODEL, *options)["rows"]
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(tracks.values()) == {"compute", "gather", "reduce", "refresh", "update"}
    spans = [e for e in events if e["ph"] == "X"]
    names = {"compute": "forward", "gather": "gather", "reduce": "reduce", "refresh": "refresh"}
    for track, verb in names.items():
        assert any(tracks[e["tid"]] == track and e["name"].split()[0] == verb for e in spans)
    layers = 24
    forwards = [e for e in spans if e["name"].startswith("forward blocks.")]
    assert len(forwards) == layers  # one step, not the one before it as well
    gathers = [e for e in spans if e["name"] == "gather blocks.3"]
    assert len(gathers) == 2  # of all hops one span, forward and backward
    computing = [e for e in spans if tracks[e["tid"]] in ("compute", "update")]
    busy = sum(e["dur"] for e in computing) / 1e6
    own = sum(row["exposed"][use] for use in ("compute", "copies", "update", "sharing"))
    assert busy == pytest.approx(own, rel=1e-3)


def test_every_micro_batch_is_in_the_trace() -> None:
    cluster = load_cluster("dgx-a100").with_world(8)
    options: dict[str, Any] = {"accumulate": 5, "seq": 512}
    traced = sw.simulate("zero3", "gpt-mini", cluster, spans=True, **options)
    names = [span.name for span in traced.spans]
    assert names.count("forward blocks.0") == 5
    plain = sw.simulate("zero3", "gpt-mini", cluster, **options)
    assert plain.spans == []
    assert traced.step_s == pytest.approx(plain.step_s, rel=1e-9)
    assert traced.exposed == pytest.approx(plain.exposed, rel=1e-6)


def test_models_may_be_facts_and_clusters_files(tmp_path: Path) -> None:
    cluster = load_cluster("dgx-h100").with_world(8)
    file = tmp_path / "cluster.toml"
    file.write_text(dump_cluster(cluster))
    one = sw.simulate("zero2", builtin("gpt-125m"), file, seq=128)
    other = sw.simulate(sw.presets.zero2(), "gpt-125m", cluster, seq=128)
    assert one == other


def test_precision_is_the_plans_own_where_it_has_one() -> None:
    cluster = load_cluster("dgx-a100").with_world(8)
    exact = sw.presets.zero2(precision=sw.Precision(compute="float32"))
    assert sw.simulate(exact, "gpt-125m", cluster, seq=128).plan == exact.on_accelerator()
    slower = sw.simulate(exact, "gpt-125m", cluster, seq=128).exposed["compute"]
    assert slower > 2 * sw.simulate("zero2", "gpt-125m", cluster, seq=128).exposed["compute"]
    with pytest.raises(PlanError, match="has its own precision"):
        sw.simulate(exact, "gpt-125m", cluster, seq=128, dtype="bfloat16")
    # The V100 has no bfloat16.
    chosen = sw.simulate("zero2", "gpt-125m", "dgx2-v100", seq=128).plan.precision
    assert chosen.compute == "float16"
    with pytest.raises(ClusterError, match="no compute speed for bfloat16"):
        sw.simulate("zero2", "gpt-125m", "dgx2-v100", seq=128, dtype="bfloat16")


@pytest.mark.parametrize("name", ["micro_batch", "accumulate", "seq"])
def test_nothing_takes_no_time(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} is 0; use 1 or more"):
        sw.simulate("ddp", "gpt-125m", "dgx-a100", **{"seq": 128, name: 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zero33", "--cluster", "dgx-a100"], "Plan 'zero33' is neither a preset"),
        (["zero3", "--cluster", "dgx-a10"], "did you mean 'dgx-a100'?"),
        (["zero3", "--cluster", "dgx-a100", "--model", "lama-7b"], "did you mean 'llama-7b'?"),
        (["zero3", "--cluster", "dgx-a100", "--ranks", "8,12"], "it cannot have 12 ranks"),
        (["zero3", "--cluster", "dgx-a100", "--ranks", "8,many"], "is not a list of numbers"),
        (["zero3", "--cluster", "dgx-a100", "--ranks", "0"], "is not a list of numbers"),
        (
            ["zero3", "--cluster", "dgx-a100", "--ranks", "8,16", "--micro-batch", "1,2"],
            "--ranks and --micro-batch have several values each",
        ),
        (
            [
                "zero3",
                "--cluster",
                "dgx-a100",
                "--bandwidth",
                "world=1gbit,2gbit",
                "--ranks",
                "8,16",
            ],
            "--bandwidth world and --ranks have several values each",
        ),
        (["zero3", "--cluster", "dgx-a100", "--bandwidth", "world=fast"], "'fast' is not a rate"),
        (["zero3", "--cluster", "dgx-a100", "--bandwidth", "world=0gbit"], "'0gbit' is not a rate"),
        (["zero3", "--cluster", "dgx-a100", "--bandwidth", "10gbit"], "is not LEVEL=RATE"),
        (["zero3", "--cluster", "dgx-a100", "--bandwidth", "rack=1gbit"], "has no level 'rack'"),
        (["zero3", "--cluster", "dgx-a100", "--dtype", "int3"], "no compute speed for int3"),
        (["zero3", "--cluster", "dgx-a100", "-o", "x.svg"], "A chart needs a range"),
        (["zero3", "--cluster", "dgx-a100", "--ranks", "8,16", "-o", "x.pdf"], "ends in .svg or"),
        (
            ["zero3", "--cluster", "dgx-a100", "--ranks", "8,16", "--trace", "x.json"],
            "give one value of --ranks",
        ),
        (["zero3", "--cluster", "dgx-a100", "--trace", "/none/x.json"], "cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys) -> None:
    assert run(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_a_measured_level_may_be_given_another_bandwidth() -> None:
    """What its shortest hop took is its latency from then on."""
    cluster = load_cluster("dgx-a100").with_world(16)
    curve = Curve(((1000, 2e-5), (10**9, 0.1)))
    level = replace(
        cluster.level("world"), bandwidth=None, latency_s=None, gather=curve, reduce=curve
    )
    measured = replace(cluster, levels=(cluster.levels[0], level))
    changed = measured.with_bandwidth("world", 1e9).level("world")
    assert (changed.bandwidth, changed.latency_s, changed.gather) == (1e9, 2e-5, None)


def test_help_has_examples(capsys) -> None:
    assert run(["simulate", "--help"]) == 0
    assert "shardwise simulate zero3" in capsys.readouterr().out


def test_no_torch_is_needed() -> None:
    script = (
        "import sys; from shardwise.cli.main import run; "
        "code = run(['simulate', 'zero3', '--cluster', 'dgx-a100', '--json']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
