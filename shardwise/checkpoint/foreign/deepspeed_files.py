"""The files of a checkpoint of DeepSpeed's ZeRO: found, counted, and their entries checked."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.dcp import inside
from shardwise.checkpoint.foreign.pickles import shown
from shardwise.checkpoint.foreign.zips import TorchFile, Window, is_size
from shardwise.core.errors import UsageError

LATEST_FILE = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_OTHERS = re.compile(r"(layer_\d+.*|expp_rank_\d+.*)_states\.pt")


def is_deepspeed(path: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed, or has one that ``latest`` names."""
    if (path / LATEST_FILE).is_file() and not (path / LATEST_FILE).is_symlink():
        return True
    return path.is_dir() and any(_MODEL.fullmatch(file.name) for file in path.iterdir())


def tagged(path: Path) -> Path:
    """The folder with the files: given itself, or named by ``latest``."""
    if any(_MODEL.fullmatch(file.name) for file in path.iterdir()):
        return path
    text = Window(path / LATEST_FILE)
    tag = text.read(0, min(text.num_bytes, 256)).decode(errors="replace").strip()
    folder = inside(path, tag)
    if not folder.is_dir():
        raise UsageError(
            f"'{path / LATEST_FILE}' names '{shown(tag)}', which is no folder beside it; give the "
            "folder of a checkpoint itself."
        )
    return folder


class Files:
    """The files of a folder by rank; each is opened once, and its data is not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[int, TorchFile] = {}
        self.optims: dict[int, TorchFile] = {}
        for path in sorted(folder.iterdir()):
            for pattern, found in ((_MODEL, self.models), (_OPTIM, self.optims)):
                if match := pattern.fullmatch(path.name):
                    self._check(path, int(match["mp"]))
                    rank = int(match["rank"] or 0)
                    if rank in found:
                        other = found[rank].window.path.name
                        raise UsageError(
                            f"'{folder}' has files of two checkpoints ('{other}', '{path.name}'); "
                            "remove those of the older one."
                        )
                    found[rank] = TorchFile(Window(inside(folder, path.name)))
            if _OTHERS.fullmatch(path.name):
                raise UsageError(
                    f"'{path}' belongs to a checkpoint of a pipeline or of experts, which is not "
                    "read; only those of plain data parallelism (ZeRO-1, 2, 3) are."
                )
        if not self.models or not self.optims:
            missing = "'*_optim_states.pt'" if self.models else "'*_model_states.pt'"
            raise UsageError(
                f"'{folder}' has no file {missing}; give a whole checkpoint of ZeRO-1, 2 or 3."
            )

    def _check(self, path: Path, model_rank: int) -> None:
        if model_rank:
            raise UsageError(
                f"'{path}' is one of several model-parallel parts, which are not read; only "
                "checkpoints of plain data parallelism (ZeRO-1, 2, 3) are."
            )

    def verify(self) -> Iterator[int]:
        for file in (*self.models.values(), *self.optims.values()):
            yield from file.verify()


def shape_of(file: TorchFile, name: Any, shape: Any) -> tuple[int, ...]:
    is_shape = isinstance(shape, tuple | list) and len(shape) <= 64 and all(map(is_size, shape))
    if not isinstance(name, str) or not is_shape:
        raise damaged(file, "its shapes are not those of parameters")
    return tuple(shape)


def get(file: TorchFile, value: Any, key: str, kind: type, default: Any = None) -> Any:
    """An entry of a dict in a file; without a default it must be there."""
    found = value.get(key) if isinstance(value, dict) else None
    if found is None and default is not None:
        return default
    if not isinstance(found, kind):
        raise UsageError(
            f"{file.window} has no '{key}' as DeepSpeed's ZeRO writes it; give a whole checkpoint "
            "of ZeRO-1, 2 or 3."
        )
    return found


def damaged(file: TorchFile, what: str) -> UsageError:
    return UsageError(f"{file.window} does not fit the checkpoint: {what}; copy it again.")
