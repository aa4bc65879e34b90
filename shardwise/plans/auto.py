"""What ``plan="auto"`` asks for: the batch that a plan must suit, and what it may use."""

import os
from dataclasses import dataclass

from shardwise.core.errors import PlanError
from shardwise.plans.facts import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """In place of a plan, has ``shard`` probe the ranks and take the fastest plan that fits.

    >>> import shardwise as sw
    >>> asked = sw.Auto(seq=2048, micro_batch=4)  # model, optimizer = sw.shard(..., plan=asked)
    >>> asked.accumulate, asked.lossless
    (1, False)
    """

    seq: int | None = None
    """Tokens per sequence. None: the longest sequence that the model's configuration names."""
    micro_batch: int = 1
    """Sequences that each rank computes at once."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    lossless: bool = False
    """Whether every hop keeps full precision. Otherwise hops may also use the int8 and int4 formats
    that trained to within 0.3 % of the exact loss (docs/wires.md)."""
    path: str | os.PathLike[str] = ""
    """A folder on a disk where states and activations may rest; empty: no disk is used."""
    run: Run | None = None
    """``run(model, micro_batch, seq)`` runs a forward with its loss; needed only for models whose
    forward does not take ``(input_ids, labels)``."""

    def __post_init__(self) -> None:
        if self.seq is not None:
            _check_count("seq", self.seq, "the tokens of a sequence")
        _check_count("micro_batch", self.micro_batch, "the sequences that a rank computes at once")
        _check_count("accumulate", self.accumulate, "the micro-batches of an optimizer step")
        if not isinstance(self.lossless, bool):
            raise _bad("lossless", self.lossless, "True or False")
        if not isinstance(self.path, str | os.PathLike):
            raise _bad("path", self.path, "the path of a folder, or leave it out to use no disk")
        if self.run is not None and not callable(self.run):
            raise _bad("run", self.run, "a function of (model, micro_batch, seq)")


def _check_count(name: str, value: object, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(name, value, f"{meaning} as a whole number of at least 1")


def _bad(name: str, value: object, wanted: str) -> PlanError:
    return PlanError(f"{name}={value!r} in shardwise.Auto cannot be used; give {wanted}.")
