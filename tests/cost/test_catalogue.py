"""The catalogue: every cluster loads, says where its figures are from, and can be right."""

import tomllib

import pytest

from shardwise.core.cluster import Cluster, ClusterError
from shardwise.cost.file import catalogue, dump_cluster, load_cluster, parse_cluster
from shardwise.planning import simulate

NAMES = sorted(catalogue())
PROBED = ("two-cores-200m",)
"""Clusters that were measured here; the others are drawn from rates with sources."""
GB = 10**9


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cluster(name: str) -> Cluster:
    return load_cluster(name)


@pytest.fixture(params=sorted(set(NAMES) - set(PROBED)))
def rated(request: pytest.FixtureRequest) -> Cluster:
    return load_cluster(request.param)


@pytest.mark.parametrize("probed", PROBED)
def test_what_was_measured_has_curves_and_can_be_planned_for(probed: str) -> None:
    cluster = load_cluster(probed)
    assert all(level.gather and level.reduce for level in cluster.levels)
    assert "Measured by shardwise probe" in cluster.source
    found = simulate("zero3", "gpt-mini", probed, seq=512)
    assert found.exposed["gather"] > found.exposed["compute"] / 3  # a slow link


def test_what_the_catalogue_has() -> None:
    assert NAMES == [
        "4090-10g", "4090-25g", "a100-roce", "a800-amsp", "aws-g5-12xlarge", "aws-p4d", "dgx-a100",
        "dgx-h100", "dgx2-v100", "dgx2-v100-100g", "dgx2-v100-200g", "dgx2-v100-400g",
        "two-cores-200m",
    ]  # fmt: skip


def test_a_cluster_is_called_as_its_file(name: str, cluster: Cluster) -> None:
    assert cluster.name == name


def test_every_part_has_a_source(cluster: Cluster) -> None:
    parts = [cluster, *cluster.levels, cluster.device, cluster.host, cluster.disk]
    assert all(part.source.strip() for part in parts if part is not None)


def test_every_figure_is_named_in_its_source(name: str) -> None:
    """Whoever adds a figure has to say where it is from, not only where its neighbour is from."""
    table = tomllib.loads(catalogue()[name].read_text(encoding="utf-8"))
    parts = [*table["levels"], table["device"], table.get("host", {}), table.get("disk", {})]
    for part in parts:
        figures = [key for key in part if key not in ("name", "size", "kind", "flops", "source")]
        for figure in (*figures, *part.get("flops", {})):
            assert figure in part["source"], figure


def test_levels_are_node_and_world(rated: Cluster) -> None:
    node, world = rated.levels
    assert (node.name, world.name) == ("node", "world")
    assert node.size in (4, 8, 16)
    assert world.size in (4, 24, 128)
    # A rank's share of the network is slower than the links inside its node, and steps take longer.
    assert world.bandwidth / node.size < node.bandwidth
    assert node.latency_s < world.latency_s < 1e-4


def test_figures_have_the_right_magnitude(rated: Cluster) -> None:
    """Bits for bytes, a node for a device or GB for GiB/s are errors of a factor 8 and more."""
    node, world = rated.levels
    assert 5 * GB <= node.bandwidth <= 450 * GB
    assert 1 * GB <= world.bandwidth <= 400 * GB
    device = rated.device
    assert device.kind == "cuda"
    assert 20 * GB < device.memory_bytes < 100 * GB
    assert 100 * GB < device.copy.rate(GB) * 2 < 4000 * GB
    half = 1e12 / device.compute("float16", 1e12)
    assert 25e12 <= half <= 700e12
    assert half / 20 < 1e12 / device.compute("float32", 1e12) < half
    if rated.host is not None:
        assert 100 * GB < rated.host.memory_bytes < 5000 * GB
        assert 1 * GB <= rated.host.bandwidth <= 64 * GB
    if rated.disk is not None:
        assert 1000 * GB < rated.disk.size_bytes < 100_000 * GB
        assert 1 * GB <= rated.disk.write <= rated.disk.read <= 60 * GB


def test_dtypes(rated: Cluster) -> None:
    dtypes = {"float16", "float32"} | (set() if "v100" in rated.name else {"bfloat16"})
    assert set(rated.device.forward) == set(rated.device.backward) == dtypes


def test_another_world(cluster: Cluster) -> None:
    inner = cluster.ranks_per_node
    for world in (inner // 2, inner, 4 * inner):
        other = cluster.with_world(world)
        assert other.world == world
        assert other.device == cluster.device
        assert [level.bandwidth for level in other.levels] == [
            level.bandwidth for level in cluster.levels
        ]
    with pytest.raises(ClusterError, match=f"cannot have {inner + 1} ranks"):
        cluster.with_world(inner + 1)


def test_a_cluster_survives_its_text(cluster: Cluster) -> None:
    assert parse_cluster(dump_cluster(cluster)) == cluster


def test_cut_links_differ_in_nothing_else() -> None:
    whole = load_cluster("dgx2-v100")
    for links in (1, 2, 4):
        cut = load_cluster(f"dgx2-v100-{links}00g")
        assert cut.level("world").bandwidth == whole.level("world").bandwidth * links / 8
        assert (cut.level("node"), cut.device) == (whole.level("node"), whole.device)
        assert (cut.host, cut.disk) == (whole.host, whole.disk)


def test_a_wrong_name_gets_a_hint() -> None:
    with pytest.raises(ClusterError, match="did you mean 'dgx-h100'"):
        load_cluster("dgx-h10")
    with pytest.raises(ClusterError, match=r"use one of 4090-10g, .*dgx2-v100"):
        load_cluster("zzz")


def test_a_missing_file_gets_a_hint(tmp_path) -> None:
    with pytest.raises(ClusterError, match=r"cannot be read .*shardwise probe"):
        load_cluster(tmp_path / "none.toml")


def test_a_cluster_is_itself(cluster: Cluster) -> None:
    assert load_cluster(cluster) is cluster
