"""``shardwise doctor --gpu``: measure, show and write the report."""

import json
import sys
from pathlib import Path

from rich.console import Console

from shardwise.core.errors import UsageError

SEQ = 128
EXIT_WRONG = 1


def report_accelerators(model: str, output: Path | None, *, as_json: bool) -> int:
    """The command's exit code: 0 if every part is right, 1 if one failed.

    Without an accelerator a UsageError says so.
    """
    import torch

    from shardwise.bench.gpu.parts import all_parts
    from shardwise.bench.gpu.report import as_json as to_json
    from shardwise.bench.gpu.report import as_markdown, measure_all, show
    from shardwise.device.abilities import accelerator
    from shardwise.plans.builtin import builtin
    from shardwise.train import launch

    if launch.under_torchrun():
        raise UsageError("doctor --gpu starts its own ranks; run it without torchrun.")
    builtin(model)  # raises with all names if it is none of them
    if accelerator() is None:
        raise UsageError(f"Torch {torch.__version__} finds no accelerator on this machine.")
    if output is not None and not output.resolve().parent.is_dir():
        raise UsageError(f"The folder of {output} does not exist.")
    progress = Console(stderr=True, highlight=False)
    console = Console(highlight=False)
    found = []
    for part in measure_all(
        all_parts(model, SEQ), lambda line: progress.print(line, markup=False, soft_wrap=True)
    ):
        found.append(part)
        if not as_json:
            show(part, console)
        if output is not None:  # after each part, as the next one may take the process with it
            output.write_text(as_markdown(found), encoding="utf-8")
    if as_json:
        json.dump(to_json(found), sys.stdout, indent=2)
        print()
    if output is not None:
        progress.print(f"The report is in {output}.", markup=False, soft_wrap=True)
    return EXIT_WRONG if any(part.failed for part in found) else 0
