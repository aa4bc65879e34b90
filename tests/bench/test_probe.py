"""The probe on an emulated cluster."""

import pytest

from shardwise.bench.cluster import Rate
from shardwise.bench.probe import probe_cluster
from shardwise.core.errors import UsageError


def test_its_links_are_measured(real_network: None) -> None:
    cluster = probe_cluster(2, 1, rate=Rate.parse("50mbit"), quick=True)
    assert str(cluster.topology) == "node=1,world=2"
    world = cluster.level("world")
    assert world.source == "messages"
    assert world.gather is not None
    assert world.reduce is not None


def test_a_mistake_is_told(real_network: None) -> None:
    with pytest.raises(UsageError, match=r"^'int3' is not a dtype"):
        probe_cluster(2, 1, rate=Rate(None), dtype="int3")
