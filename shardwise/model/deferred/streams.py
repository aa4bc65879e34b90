"""Random numbers: each random operation has its own stream.

A stream is derived from a base seed and the number of random operations before it in the context.
The base is drawn from torch's generator on entry, so `torch.manual_seed` fixes it, and two models
built one after the other differ. Operations with an explicit generator use its seed as the base,
and `materialize(seed=)` does not change it.
"""

from dataclasses import dataclass

import torch

from shardwise.device.abilities import seed_random


@dataclass(frozen=True, slots=True)
class Stream:
    """The stream of random numbers of one operation."""

    base: int
    index: int
    pinned: bool
    """Whether the base is that of an explicit generator."""

    def reseed(self, device: torch.device, base: int | None) -> None:
        """Set the default generators of CPU and `device` to the start of the stream.

        Args:
            base: replaces the stream's own base, unless that is pinned.
        """
        seed = mix(self.base if self.pinned or base is None else base, self.index)
        seed_random(device, seed)


class Streams:
    """Creates the streams of one context."""

    def __init__(self) -> None:
        self.seed = int(torch.randint(2**62, ()))
        self._num_random = 0

    def next(self, generator: torch.Generator | None) -> Stream:
        self._num_random += 1
        base = generator.initial_seed() if generator else self.seed
        return Stream(base, self._num_random, pinned=generator is not None)


def mix(base: int, index: int) -> int:
    """A seed for operation `index`. CPU generators use only its lower 32 bits, which come from a
    bijection (the finaliser of murmur3), so no two operations of a program share a stream."""
    base = ((base ^ (base >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    base = ((base ^ (base >> 27)) * 0x94D049BB133111EB) % 2**64
    low = (base + index) % 2**32
    low = ((low ^ (low >> 16)) * 0x85EBCA6B) % 2**32
    low = ((low ^ (low >> 13)) * 0xC2B2AE35) % 2**32
    return (base >> 32 << 32) | (low ^ (low >> 16))
