"""The order in which units are used: recorded once, then followed by every rank.

A walk is one kind of pass (forward, forward without gradients, backward). Its first pass is
recorded, with all ranks agreeing on every use. Later passes issue gathers in the recorded order,
ahead of their use, whatever this rank does: a unit that this rank skips is gathered all the same,
because others may need its shard. Everything here is a pure function of the recorded order and of
this rank's uses, so that all ranks issue the same gathers.
"""

from dataclasses import dataclass, field

_MAX_SKIPPED_HELD = 4
"""This many skipped units stay gathered, in case this rank uses them in another order."""


@dataclass(frozen=True)
class Hold:
    """A claim on a gathered unit; a ``last`` claim ends after the use."""

    last: bool
    kept: bool = False
    """Kept in full since forward: no walk gathers it again, so it stays for all backward calls."""


@dataclass
class Walk:
    """The recorded order of one kind of pass, and the position of the current pass in it."""

    prefetch: int
    order: list[int] | None = None
    """Units in the order of their use; None until a pass was recorded."""
    recording: list[int] = field(default_factory=list)
    extra: int = 0
    """Uses of the current pass beyond the order; all ranks agreed on each."""
    skipped: int = 0
    """Gathers of the current pass that this rank issued only for others."""
    stale: bool = False
    """Whether the order no longer fits, on all ranks alike: record the next pass again."""
    _used: int = 0
    _issued: int = 0
    _gathers: list[bool] = field(default_factory=list)
    _releases: list[bool] = field(default_factory=list)
    _held: list[int] = field(default_factory=list)

    def begin(self) -> list[int]:
        """Begins a pass; returns the units to gather first."""
        if self.stale:
            self.forget()
        self._used = self._issued = self.extra = self.skipped = 0
        self._held.clear()
        self.recording.clear()
        return self._issue(self.prefetch)

    def record_unseen(self, units: list[int], *, descending: bool) -> None:
        """Adds units that no rank used, each before the first unit that follows it in the model."""
        sign = -1 if descending else 1
        for unit in sorted(units, key=lambda unit: sign * unit):
            later = (i for i, u in enumerate(self.recording) if sign * u > sign * unit)
            self.recording.insert(next(later, len(self.recording)), unit)

    def finish_recording(self) -> None:
        """Makes the recorded uses the order."""
        self.order = list(self.recording)
        self.recording.clear()
        near = max(self.prefetch, 1)
        last_seen: dict[int, int] = {}
        self._gathers = [True] * len(self.order)
        self._releases = [True] * len(self.order)
        for i, unit in enumerate(self.order):
            # Used again before it would be freed: one gather serves both uses.
            if unit in last_seen and i - last_seen[unit] <= near:
                self._gathers[i] = False
                self._releases[last_seen[unit]] = False
            last_seen[unit] = i

    def forget(self) -> None:
        """Forgets the order, so that the next pass is recorded."""
        self.order = None
        self.stale = False
        self._gathers.clear()
        self._releases.clear()

    def use(self, unit: int) -> "Use":
        """This rank uses a unit that it does not hold: what to gather and what to give up."""
        assert self.order is not None
        try:
            position = self.order.index(unit, self._used)
        except ValueError:
            if unit in self._held:
                self._held.remove(unit)
                return Use([], [], [], Hold(last=True))
            self.extra += 1
            return Use(None, [], [], Hold(last=True))
        passed = [self.order[i] for i in range(self._used, position) if self._releases[i]]
        self.skipped += len(passed)
        self._held += passed
        given_up = self._held[:-_MAX_SKIPPED_HELD] if len(self._held) > _MAX_SKIPPED_HELD else []
        del self._held[: len(given_up)]
        self._used = position + 1
        gathers = self._issue(position + 1)
        return Use(gathers, given_up, passed, Hold(self._releases[position]))

    @property
    def is_fresh(self) -> bool:
        """Whether the pass has used at most one unit yet."""
        return self._used <= 1

    def ahead(self) -> list[int]:
        """The gathers to issue ahead of use; asked for when memory has become free."""
        return self._issue(self._used + self.prefetch)

    def beyond(self, count: int) -> list[int]:
        """The next units after those whose gathers were issued; their shards may be fetched."""
        if self.order is None:
            return []
        return self.order[self._issued : self._issued + count]

    def comes_again(self, unit: int) -> bool:
        """Whether the pass may still gather a unit; while recording, any rank may propose it."""
        return self.order is None or unit in self.order[self._issued :]

    def end(self) -> "Use":
        """Ends the pass: the gathers that this rank still owes, and the claims it still holds."""
        if self.order is None:
            return Use([], [], [], Hold(last=True))
        owed = self._issue(len(self.order))
        rest = [self.order[i] for i in range(self._used, len(self.order)) if self._releases[i]]
        self.skipped += len(rest)
        given_up = self._held + rest
        self._held = []
        self._used = len(self.order)
        return Use(owed, given_up, rest, Hold(last=True))

    def _issue(self, until: int) -> list[int]:
        if self.order is None:
            return []
        start, self._issued = self._issued, max(self._issued, min(until, len(self.order)))
        return [self.order[i] for i in range(start, self._issued) if self._gathers[i]]


@dataclass(frozen=True)
class Use:
    """What a use of a unit requires."""

    gathers: list[int] | None
    """Units to gather, in this order; None: all ranks must agree on this use."""
    given_up: list[int]
    """Units that were gathered only for other ranks, and can be freed."""
    skipped: list[int]
    """Units of the order that this rank skipped; it may still use them out of order."""
    hold: Hold
