"""The checkpoints of a run: saved every few steps, the oldest removed, the last one resumed."""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.training import place
from shardwise.checkpoint.training.load import is_damage
from shardwise.core.errors import UsageError
from shardwise.train.config import ConfigError
from shardwise.train.run import CHECKPOINTS, RESUME_LATEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Saves and restores one run; every method is collective."""

    folder: Path
    """In the run's directory, with one checkpoint a number of steps."""
    every: int
    """Steps between two saves; 0 saves nothing."""
    keep: int
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any

    @classmethod
    def of(cls, config: Any, output: Path, *parts: Any) -> "Checkpoints":
        """Those of a run with this job and directory."""
        model, optimizer, scheduler = parts
        return cls(
            folder=output / CHECKPOINTS,
            every=config.train.save_every,
            keep=config.train.keep,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
        )

    def resume(self, source: str | None) -> int:
        """Restore a checkpoint, and return the number of steps done; 0 if there is none yet.

        ``source`` is a path, or ``latest`` of this run: then a damaged one is passed over.
        """
        if source is None:
            return 0
        error: UsageError | None = None
        for path in self._candidates(source):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # the notes are printed below
                    found = sw.load(path, self.model, self.optimizer, scheduler=self.scheduler)
            except UsageError as refused:
                if source != RESUME_LATEST or not is_damage(refused):
                    raise
                error = refused
                if dist.get_rank() == 0:
                    print(f"passed over: {refused}", file=sys.stderr)
                continue
            for note in found.notes if dist.get_rank() == 0 else ():
                print(f"note: {note}", file=sys.stderr)
            if found.step is None:
                raise ConfigError(
                    f"resume: {found.path} does not say after which step it was saved"
                )
            return found.step
        if error is not None:
            raise error
        return 0

    def after(self, step: int, *, last: bool) -> None:
        """Save if it is time to."""
        if self.every and (step % self.every == 0 or last):
            self.save(step)

    def save(self, step: int) -> Path:
        """Save now, whatever was asked for."""
        path = self.folder / f"step-{step}"
        sw.save(
            path,
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            step=step,
        )
        if dist.get_rank() == 0:
            place.rotate(self.folder, self.keep)
        return path

    def _candidates(self, source: str) -> list[Path]:
        """What to load, the best first; rank 0 looks for all."""
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            found = [[source]]
            if source == RESUME_LATEST:
                found = [[str(path) for path in _newest_first(self.folder)]]
        dist.broadcast_object_list(found)
        return [Path(path) for path in found[0]]


def _newest_first(folder: Path) -> list[Path]:
    """The run's checkpoints: the one that ``latest`` names, and those before it."""
    try:
        latest = place.find(folder)
    except UsageError:
        return []
    found = [latest]
    while (earlier := place.before(found[-1])) is not None:
        found.append(earlier)
    return found
