"""A probe's progress on standard error: a live bar on a terminal, lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.probing.probe import Progress


@contextmanager
def shown(visible: bool) -> Iterator[Progress | None]:
    """A callback that shows progress; nothing is shown before the first measurement."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False)
    if not visible:
        yield None
    elif not console.is_terminal:
        yield lambda done, total, what: console.print(
            f"probe {done + 1}/{total}  {what}", markup=False, soft_wrap=True
        )
    else:
        columns = (
            TextColumn("probe"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("{task.description}", markup=False),
        )  # fmt: skip
        bar = Bar(*columns, console=console, refresh_per_second=4)
        task = bar.add_task("starting ...", total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.start()  # repeated calls have no effect
            bar.update(task, completed=done, total=total, description=what)

        try:
            yield tell
            bar.update(task, description="done")
        finally:
            bar.stop()
