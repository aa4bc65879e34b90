"""`shardwise import`: make a checkpoint of DeepSpeed, FSDP2 or accelerate one for sw.load."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.bars import bytes_bar
from shardwise.cli.common import JSON_OPTION, interruptible, print_json
from shardwise.core.sizes import format_bytes, format_count

if TYPE_CHECKING:
    from shardwise.checkpoint.foreign.convert import Imported


def import_(
    source: Annotated[
        Path,
        typer.Argument(help="A folder of DeepSpeed's ZeRO, of FSDP2 (DCP), or of accelerate."),
    ],
    out: Annotated[Path, typer.Argument(help="The checkpoint to write: a new folder.")],
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Import a checkpoint of DeepSpeed ZeRO-1/2/3, FSDP2 or accelerate, for sw.load.

    Master weights, the optimizer's states and hyper-parameters go over; what does not is said.
    Nothing in the source is executed, all of it is checked, and memory stays small.

    Examples:

      shardwise import run/global_step500 imported/step-500

      shardwise import checkpoint-500/ imported/step-500 --json
    """
    from shardwise.checkpoint.foreign.convert import convert, open_foreign, work_bytes

    with interruptible(f"; nothing was written to '{out}'"):
        found = open_foreign(source)
        with bytes_bar("importing", work_bytes(found), visible=not as_json) as advance:
            done = convert(found, out, advance)
    answer = to_dict(source, done)
    if as_json:
        print_json(answer)
    else:
        _print(answer)


def to_dict(source: Path, done: "Imported") -> dict[str, Any]:
    """The result as plain data for JSON."""
    tensors = done.source.tensors
    return {
        "source": str(source),
        "kind": done.source.kind,
        "path": str(done.out),
        "step": done.source.step,
        "tensors": len(tensors),
        "parameters": sum(tensor.numel for tensor in tensors),
        "trained": sum(tensor.numel for tensor in tensors if tensor.trained),
        "bytes": done.source.num_bytes,
        "states": list(done.states),
        "groups": done.groups,
        "tied": done.source.aliases,
        "not_imported": list(done.source.left),
    }


def _print(answer: dict[str, Any]) -> None:
    states = ", ".join(answer["states"]) or "none"
    typer.echo(
        f"{answer['path']}: {format_count(answer['parameters'])} parameters in "
        f"{answer['tensors']} tensors ({format_bytes(answer['bytes'])}) from {answer['kind']}"
    )
    typer.echo(f"optimizer: states {states}; {answer['groups']} group(s) of hyper-parameters")
    if answer["step"] is not None:
        typer.echo(f"step: {answer['step']}")
    for what in answer["not_imported"]:
        typer.echo(f"not imported: {what}")
    typer.echo(f"Go on with sw.load('{answer['path']}', model, optimizer).")
