"""`shardwise export`: the weights of a training checkpoint as safetensors files."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.common import JSON_OPTION, print_json
from shardwise.core.errors import UsageError
from shardwise.core.sizes import format_bytes, parse_bytes


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of numbered ones.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; must be empty or new.")],
    dtype: Annotated[
        str | None, typer.Option(help="Convert floating-point values: bfloat16, float16, float32.")
    ] = None,
    max_file_size: Annotated[str, typer.Option(help="The largest file.")] = "5 GB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the weights in a folder that has some.")
    ] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Write a checkpoint's weights as safetensors files, which transformers' from_pretrained reads.

    Needs no accelerator, no torchrun, and no memory for whole tensors.

    Examples:

      shardwise export runs/mine/checkpoints exported/

      shardwise export checkpoints/step-1000 exported/ --dtype bfloat16
    """
    from shardwise.checkpoint.training import place
    from shardwise.checkpoint.training.read import Reader
    from shardwise.checkpoint.training.weights import Export
    from shardwise.cli.bars import bytes_bar

    with Reader(place.find(checkpoint)) as reader:
        job = Export(reader, _dtype(dtype), parse_bytes(max_file_size, "--max-file-size"))
        with bytes_bar("writing", job.num_bytes, visible=not as_json) as progress:
            job.run(out, overwrite=overwrite, progress=progress)
        answer = {
            "checkpoint": str(reader.folder),
            "out": str(out),
            "tensors": job.num_tensors,
            "files": job.num_files,
            "bytes": job.num_bytes,
        }
    if as_json:
        print_json(answer)
    else:
        typer.echo(
            f"{out}: {job.num_tensors} tensors in {job.num_files} file(s), "
            f"{format_bytes(job.num_bytes)}"
        )


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"--dtype {name} is not a floating dtype; give for example bfloat16.")
    return dtype
