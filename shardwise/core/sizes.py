"""Parsing and formatting of amounts of memory, counts, and rates of links."""

import math
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
        raise PlanError(f"{what} '{text}' is not an amount of memory; write for example '2 GiB'.")
    return int(float(found[1]) * _UNITS[found[2]])


_RATE_UNITS = {
    "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9,
    "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
}  # fmt: skip


def parse_rate(text: str) -> float:
    """Bytes per second, from a text in bits or bytes per second.

    >>> parse_rate("100gbit"), parse_rate("25 GB/s")
    (12500000000.0, 25000000000.0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)(?:/s|ps)?", text.strip().lower())
    if found is None or found[2] not in _RATE_UNITS or float(found[1]) == 0:
        raise PlanError(f"'{text}' is not a rate; write for example 100gbit or 25GB/s.")
    return float(found[1]) * _RATE_UNITS[found[2]]


def format_bytes(num_bytes: float) -> str:
    """A number of bytes with a unit, for people.

    >>> format_bytes(1.5e9), format_bytes(12)
    ('1.5 GB', '12 B')
    """
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    exponent = min(int(math.log10(num_bytes) // 3), 5)
    return f"{num_bytes / 1000**exponent:.3g} {'kMGTP'[exponent - 1]}B"


def format_count(count: float) -> str:
    """A count with a suffix, for people.

    >>> format_count(10.7e6)
    '10.7M'
    """
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:.0f}"
