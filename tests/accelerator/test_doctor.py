"""``shardwise doctor --gpu``: all of it on simulated devices, and what it does when parts fail."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from shardwise.bench.gpu import parts
from shardwise.bench.gpu.report import Part, as_json, as_markdown, measure_all
from shardwise.cli.main import run
from tests.accelerator.device import plugin

TITLES = [
    "Versions",
    "Devices",
    "Abilities",
    "Copies between host and device",
    "Streams",
    "Matrix products",
    "Codecs",
    "Collectives",
    "Training gpt-tiny",
]


@pytest.fixture(scope="module")
def report(simulation, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("doctor")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "doctor", "--gpu", "--json", "-o", "report.md"],
        env=plugin.environment(folder / "plugin", 2), cwd=folder, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "9/9  Training gpt-tiny" in done.stderr
    found = json.loads(done.stdout)
    written = (folder / "report.md").read_text(encoding="utf-8")
    assert [line[3:] for line in written.splitlines() if line.startswith("## ")] == TITLES
    return found


def rows_of(report: dict[str, Any], title: str) -> list[dict[str, Any]]:
    (part,) = [part for part in report["parts"] if part["title"] == title]
    assert not part["error"]
    return part["rows"]


def test_every_part_is_measured(report: dict[str, Any]) -> None:
    assert [part["title"] for part in report["parts"]] == TITLES
    assert report["failed"] == []
    assert [row["device"] for row in rows_of(report, "Devices")] == ["sim:0", "sim:1"]
    abilities = {row["ability"]: row for row in rows_of(report, "Abilities")}
    assert abilities["streams and events"]["there"]
    assert not abilities["triton kernels"]["there"]
    assert "does not compile" in abilities["triton kernels"]["remark"]
    pinned, unpinned = rows_of(report, "Copies between host and device")
    assert (pinned["pinned"], unpinned["pinned"]) == (True, False)
    assert all(row["right"] for row in rows_of(report, "Codecs"))


def test_all_devices_communicate_and_train(report: dict[str, Any]) -> None:
    collectives = rows_of(report, "Collectives")
    assert [row["collective"] for row in collectives] == [
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    ]
    assert all(row["right"] and row["ranks"] == 2 for row in collectives)
    trained = {row["contender"]: row for row in rows_of(report, "Training gpt-tiny")}
    assert list(trained) == list(parts.CONTENDERS)
    assert all(row["right"] for row in trained.values())
    assert trained["zero3"]["difference"] < 1e-5
    assert trained["zero3"]["predicted_bytes"] > 0
    assert trained["infinity"]["peak_bytes"] < trained["zero3"]["peak_bytes"]


def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert run(["doctor", "--gpu"]) == 2
    assert "finds no accelerator on this machine" in capsys.readouterr().err
    assert run(["doctor", "-o", "report.md"]) == 2


def test_a_part_that_fails_is_one_line_and_the_report_goes_on() -> None:
    def broken() -> list[dict[str, Any]]:
        raise RuntimeError("no such kernel\nmany more lines")

    told: list[str] = []
    sound = Part("sound", lambda: [{"size_bytes": 3, "right": True}], 100)
    wrong = Part("wrong", lambda: [{"right": False}])
    found = list(measure_all([Part("broken", broken), sound, wrong], told.append))
    assert [part.error for part in found] == ["RuntimeError: no such kernel", "", ""]
    assert as_json(found)["failed"] == ["broken", "wrong"]
    assert told == ["2/3  sound (up to 100 s) ..."]
    text = as_markdown(found)
    assert "failed: RuntimeError: no such kernel\n" in text
    assert "| size | right |" in text


def test_contenders_train_on_their_own_after_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def launched(entry: str, arguments: dict[str, Any], *, workers: int) -> list[dict[str, Any]]:
        asked.append(list(arguments["contenders"]))
        if "zeropp" in arguments["contenders"]:
            raise RuntimeError("an illegal memory access")
        return [{"contender": name, "step_s": 2.0} for name in arguments["contenders"]]

    monkeypatch.setattr(parts.launch, "run", launched)
    rows = {row["contender"]: row for row in parts._training("gpt-tiny", 8, 2)}
    assert asked == [list(parts.CONTENDERS), *([name] for name in parts.CONTENDERS)]
    assert rows["zeropp"] == {
        "contender": "zeropp",
        "error": "RuntimeError: an illegal memory access",
    }
    assert rows["zero3"]["to_fsdp2"] == 1.0
