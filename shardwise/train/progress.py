"""Progress of a run on standard error: a live bar on a terminal, occasional lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.core.sizes import format_bytes, format_count
from shardwise.train.metrics import StepRecord

_LINE_EVERY_S = 5.0


class Reporter(Protocol):
    """Shows one step after another."""

    def show(self, record: StepRecord) -> None:
        """Show a finished step."""


class _Silent:
    def show(self, record: StepRecord) -> None:
        pass


class _Lines:
    """A line for the first step, for the last, and every few seconds."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._last_s = float("-inf")

    def show(self, record: StepRecord) -> None:
        now = time.monotonic()
        if record.step < self._steps and now - self._last_s < _LINE_EVERY_S:
            return
        self._last_s = now
        self._console.print(
            f"step {record.step}/{self._steps}  {describe(record)}", soft_wrap=True, highlight=False
        )


class _Bar:
    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=steps, status="first step ...")

    def show(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step, status=describe(record))


def describe(record: StepRecord) -> str:
    """The figures of a step in one short line."""
    text = (
        f"loss {record.loss:.4f}  {format_count(record.tokens_per_s)} tokens/s  "
        f"{format_bytes(record.rss_bytes)}"
    )
    return text if record.val_loss is None else f"{text}  val {record.val_loss:.4f}"


@contextmanager
def reporter(steps: int, *, visible: bool, console: Console | None = None) -> Iterator[Reporter]:
    """A reporter for this output; silent unless ``visible``, which holds on one rank."""
    console = console or Console(stderr=True)
    if not visible:
        yield _Silent()
    elif not console.is_terminal:
        yield _Lines(console, steps)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, refresh_per_second=4) as progress:
            yield _Bar(progress, steps)
