"""Amounts of memory and rates of links as people write them."""

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


_RATE_UNITS = {
    "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9,
    "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
}  # fmt: skip


def parse_rate(text: str) -> float:
    """Bytes a second, of a text in bits or in bytes.

    >>> parse_rate("100gbit"), parse_rate("25 GB/s")
    (12500000000.0, 25000000000.0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)(?:/s|ps)?", text.strip().lower())
    if found is None or found[2] not in _RATE_UNITS or float(found[1]) == 0:
        raise PlanError(f"'{text}' is no rate of a link; write for example 100gbit or 25GB/s.")
    return float(found[1]) * _RATE_UNITS[found[2]]
