"""Amounts of memory as people write them."""

import re

from shardwise.core.errors import PlanError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def parse_bytes(text: int | str, what: str = "size") -> int:
    """A number of bytes, or a text with a unit.

    >>> parse_bytes("1.5 GiB"), parse_bytes("2GB"), parse_bytes(7)
    (1610612736, 2000000000, 7)
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise PlanError(f"{what} '{text}' is no amount of memory; write for example '2 GiB'.")
    return int(float(found[1]) * _UNITS[found[2]])
