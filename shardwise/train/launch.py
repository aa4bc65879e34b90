"""Start local workers through torchrun's machinery, or run in place under an outer torchrun.

The launcher and its workers exchange files in a job directory: the launcher writes the job as JSON,
rank 0 writes the answer, and each rank that fails writes its error. A failed run is reported once,
by its first error, and a signal ends every worker before the launcher ends. Importing this module
does not import torch.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import PlanError, ShardwiseError, UsageError
from shardwise.train.config import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ANSWER_FILE = "answer.json"
ERROR_FILE = "error-{rank}.json"
USER_MISTAKES = (ConfigError, PlanError, UsageError)
"""Errors that the user corrects by a different request; all others are failures."""
_CRASH_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "killed (SIGKILL), as happens when memory runs out",
    signal.SIGILL: "stopped by an instruction that this CPU does not have (SIGILL)",
    signal.SIGSEGV: "stopped by a segmentation fault (SIGSEGV)",
    signal.SIGBUS: "stopped by a bus error (SIGBUS), as when shared memory or a disk is full",
}
_ELASTIC_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")
_SHUTDOWN_S = 5
"""How long workers may take to exit after a signal before they are killed."""


class WorkerError(ShardwiseError, RuntimeError):
    """A worker failed, and not by the user's mistake."""

    exit_code = 1
    details: Sequence[str] = ()
    """The report of what all ranks were doing."""
    is_final = False
    """Whether another attempt would fail as well."""


@dataclass(frozen=True, slots=True)
class Watching:
    """How ranks watch each other (see `sw.shard`)."""

    timeout_s: float = 60.0
    patience_s: float = 600.0
    folder: str | None = None
    """Where the report of a failure goes."""
    prints: bool = True
    """Whether a rank prints the report; the launcher of local workers does that itself."""


def run(
    entry: str,
    arguments: dict[str, Any],
    *,
    workers: int,
    logs: Path | None = None,
    watching: Watching | None = None,
    forwards_sigterm: bool = False,
) -> Any:
    """Call `entry` ("module:function") with `arguments` on every worker; return rank 0's answer.

    Arguments and answer must be JSON. The stack trace of an unexpected error is written to `logs`,
    or to a new temporary directory. Raises the first worker error as one sentence, and
    KeyboardInterrupt on Ctrl-C. With `forwards_sigterm` the workers end in their own way after a
    SIGTERM; a second one ends them at once.
    """
    watching = watching or Watching()
    if logs is not None:
        watching = replace(watching, folder=str(logs))
    if under_torchrun():
        return _run_in_place(entry, arguments, watching)
    job_dir = Path(tempfile.mkdtemp(prefix="shardwise-"))
    watching = replace(watching, folder=watching.folder or str(job_dir), prints=False)
    try:
        job = {
            "entry": entry,
            "arguments": arguments,
            "launcher_pid": os.getpid(),
            "watching": asdict(watching),
        }
        (job_dir / "job.json").write_text(json.dumps(job), encoding="utf-8")
        reports = Path(str(watching.folder))
        with _sigterm_forwarded() if forwards_sigterm else nullcontext():
            _launch(job_dir, workers, logs, reports, forwards_sigterm)
        return json.loads((job_dir / ANSWER_FILE).read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(job_dir, ignore_errors=True)


def _run_in_place(entry: str, arguments: dict[str, Any], watching: Watching) -> Any:
    """Run as one of the ranks that an outer torchrun started."""
    for name, value in rank_environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))).items():
        os.environ.setdefault(name, value)  # before torch is imported
    from shardwise.train.worker import call

    with _interrupts_held():
        import torch.distributed  # noqa: F401

    return call(entry, arguments, watching)


def under_torchrun() -> bool:
    """Whether torchrun has already started the ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarts_of_torchrun() -> int:
    """How often an outer torchrun has started its ranks anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if under_torchrun() else 0


def is_rank_zero() -> bool:
    """Whether this process reports for the job: rank 0, or a launcher."""
    return os.environ.get("RANK", "0") == "0"


def rank_environment(num_local: int, cpu_info: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Environment of each of `num_local` ranks of a machine, to be set before torch is imported."""
    environment = {"OMP_NUM_THREADS": str(max(1, _num_cores() // num_local))}
    if _advertises_amx(cpu_info):
        # Some machines advertise AMX and then kill the process that uses it (bf16 matmul).
        environment["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    return environment


def _local_environment() -> dict[str, str]:
    """Environment for ranks that are all on this machine, independent of how its name resolves."""
    return {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}


def _launch(
    job_dir: Path, workers: int, logs: Path | None, reports: Path, forwards_sigterm: bool
) -> None:
    known = set(find_reports(reports))
    with _interrupts_held():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError as Failed
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: any free one
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(job_dir / "elastic")),
        shutdown_timeout=_SHUTDOWN_S,
        # SIGINT is not among them: Ctrl-C stays a KeyboardInterrupt here, and elastic then ends the
        # workers by SIGTERM, at once and without output.
        signals_to_handle=",".join(_ELASTIC_SIGNALS[forwards_sigterm:]),
    )
    command = ("-m", "shardwise.train.worker", str(job_dir))
    environment = rank_environment(workers) | _local_environment()
    with _environment(environment), _handlers_restored(), _quiet_elastic():
        try:
            elastic_launch(config, sys.executable)(*command)
        except Failed as error:
            told = [report for report in find_reports(reports) if report not in known]
            raise explain_failure(job_dir, error, logs, told) from None
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None


def find_reports(folder: Path) -> list[Path]:
    """The reports of failures in a run's folder, the latest last."""
    return sorted(folder.glob("failure-*/report.json"))


def explain_failure(
    job_dir: Path, failed: "ChildFailedError", logs: Path | None, reports: Sequence[Path]
) -> ShardwiseError:
    """The error that the launcher raises, with what the ranks have reported."""
    error = _first_error(job_dir, failed, logs)
    if not reports or not isinstance(error, WorkerError) or error.is_final:
        return error
    report = json.loads(reports[-1].read_text(encoding="utf-8"))
    if report["cause"][0]["kind"] in ("stopped", "cut off"):
        error = WorkerError(report["sentence"])
    lines = (reports[-1].parent / "report.txt").read_text(encoding="utf-8").splitlines()
    error.details = lines if logs is None else [*lines, f"  more: shardwise doctor {logs}"]
    return error


def _first_error(job_dir: Path, failed: "ChildFailedError", logs: Path | None) -> ShardwiseError:
    """The earliest error: the others are usually its consequences."""
    for rank, failure in failed.failures.items():
        if -failure.exitcode in _CRASH_SIGNALS:  # never the consequence of another rank's end
            return WorkerError(f"rank {rank} was {_CRASH_SIGNALS[-failure.exitcode]}")
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in job_dir.glob("error-*.json")]
    if not errors:
        rank, failure = failed.get_first_failure()
        return WorkerError(
            f"rank {rank} ended with exit code {failure.exitcode} and no error message"
        )
    first = min(errors, key=lambda error: error["time_ns"])
    if first["is_mistake"]:
        return UsageError(first["sentence"])
    if first["is_ours"]:
        error = WorkerError(f"rank {first['rank']}: {first['sentence']}")
        error.is_final = first["is_final"]
        return error
    trace = (logs or Path(tempfile.mkdtemp(prefix="shardwise-"))) / f"error-rank{first['rank']}.txt"
    trace.write_text(first["traceback"], encoding="utf-8")
    return WorkerError(f"rank {first['rank']}: {first['sentence']} (stack trace in {trace})")


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _advertises_amx(cpu_info: Path) -> bool:
    try:
        return "amx_tile" in cpu_info.read_text(encoding="utf-8").split()
    except OSError:
        return False


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set the variables that are unset, for the workers to inherit, and unset them afterwards."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C while torch is imported: in the middle of it the import fails obscurely."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def _sigterm_forwarded() -> Iterator[None]:
    """The first SIGTERM goes to the workers, which end in their own way; a second ends all."""
    import psutil

    told: list[bool] = []

    def forward(number: int, frame: object) -> None:
        if told:
            raise SystemExit(128 + number)
        told.append(True)
        for worker in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(number)

    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Restore the signal handlers that elastic replaces."""
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in _ELASTIC_SIGNALS}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence elastic's own report of a failure: we print one sentence, once."""
    loggers = [
        logging.getLogger(name)
        for name in list(logging.Logger.manager.loggerDict)
        if name.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
