"""The probe as a job of several processes: what each rank runs for the command or a benchmark."""

from shardwise.cost.file import dump_cluster
from shardwise.probing.cache import fresh_probe
from shardwise.probing.probe import probe
from shardwise.probing.progress import shown


def work(
    *,
    levels: str | None = None,
    dtype: str = "float32",
    path: str | None = None,
    quick: bool = False,
    in_float32: bool = False,
) -> str:
    """For ranks of a benchmark: the cluster as TOML, neither shown nor stored.

    With ``in_float32`` bfloat16 products are computed in float32, as in the benchmark. Emulated
    nodes share one machine, so that benchmarks use its CPU.
    """
    if in_float32:
        from shardwise.probing.matmul import compute_in_float32

        compute_in_float32()
    return dump_cluster(probe(levels, dtype=dtype, path=path, quick=quick, device="cpu"))


def command(
    *, levels: str | None, dtype: str, path: str | None, quick: bool, visible: bool
) -> dict[str, str | None]:
    """For `shardwise probe`: the cluster as TOML and its file; rank 0 shows progress."""
    import torch.distributed as dist

    with shown(visible and (not dist.is_initialized() or dist.get_rank() == 0)) as progress:
        cluster, file = fresh_probe(levels, dtype=dtype, path=path, progress=progress, quick=quick)
    return {"cluster": dump_cluster(cluster), "stored": str(file) if file else None}
