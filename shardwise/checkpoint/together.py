"""Actions whose failure on one rank is raised on all, so that no rank waits for one that failed."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwise.comm.control import Control
from shardwise.core.errors import ShardwiseError, UsageError


def together(control: Control, what: str, action: Callable[[], None]) -> None:
    """Run an action on every rank; if it fails on any, all raise the same sentence; collective.

    Ranks with nothing to do pass an action that does nothing.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:  # of any kind, because the other ranks wait in the exchange
        failure = error
    sentence = "" if failure is None else _sentence(failure, what)
    first = _first(control, sentence, what)
    if not first:
        return
    if failure is not None and not isinstance(failure, (OSError, ShardwiseError)):
        raise failure  # a bug, or an error in the model's code: keep its traceback
    raise UsageError(first) from failure


def _first(control: Control, sentence: str, what: str) -> str:
    """The sentence of the first rank that has one, with the rank unless all have the same."""
    encoded = sentence.encode()
    lengths = control.exchange(torch.tensor([len(encoded)]), what)
    longest = int(lengths.max())
    if not longest:
        return ""
    mine = torch.tensor(list(encoded.ljust(longest)), dtype=torch.uint8)
    rows = control.exchange(mine, what)
    failed = next(rank for rank, length in enumerate(lengths.flatten().tolist()) if length)
    said = bytes(rows[failed].tolist()).decode().strip()
    return said if bool((rows == rows[0]).all()) else f"Rank {failed}: {said}"


def _sentence(error: Exception, what: str) -> str:
    if isinstance(error, ShardwiseError):
        return str(error)
    if isinstance(error, OSError):
        where = f" at '{error.filename}'" if error.filename else ""
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"The {what} ran out of disk space{where} ({reason}); free some and retry."
        return f"The {what} failed{where}: {reason}."
    return f"The {what} failed: {type(error).__name__}: {error}."


@contextmanager
def on_failure(undo: Callable[[], None]) -> Iterator[None]:
    """On an error or an interrupt inside, undo what was begun."""
    try:
        yield
    except BaseException:
        undo()
        raise
