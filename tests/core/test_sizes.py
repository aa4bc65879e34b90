"""Amounts as people read them."""

from shardwise.core.sizes import format_bytes, format_count


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 999, 1500, 2.5e9)] == ["0 B", "999 B", "1.5 kB", "2.5 GB"]
    assert [format_count(n) for n in (7, 1234, 10_700_000)] == ["7", "1.23k", "10.7M"]
