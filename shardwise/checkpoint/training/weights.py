"""A training checkpoint's weights as safetensors files, piece by piece, without a model.

Needs no process group, no accelerator and no memory for whole tensors.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise.checkpoint.folder import CONFIG_FILE, INDEX_FILE, Staging, shard_name
from shardwise.checkpoint.format import Header, TensorInfo, arrange, lay_out
from shardwise.checkpoint.together import on_failure
from shardwise.checkpoint.training.contents import MODEL, bytes_of
from shardwise.checkpoint.training.read import Reader
from shardwise.checkpoint.values import DTYPES
from shardwise.core.errors import UsageError

_PIECE_NUMEL = 1 << 21
_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
Progress = Callable[[int], None]
"""Told of bytes that were written."""


class Export:
    """One export; ``num_bytes`` is known before it runs."""

    def __init__(self, reader: Reader, dtype: torch.dtype | None, max_file_bytes: int) -> None:
        self._reader = reader
        self._infos = [
            TensorInfo(
                name.removeprefix(f"{MODEL}."), self._dtype(tensor.dtype, dtype), tensor.shape
            )
            for name, tensor in reader.index.tensors.items()
            if name.startswith(f"{MODEL}.")
        ]
        if not self._infos:
            raise UsageError(f"Checkpoint '{reader.folder}' has no weights.")
        files: list[list[TensorInfo]] = [[]]
        used = 0
        for info in self._infos:
            if files[-1] and used + info.num_bytes > max_file_bytes:
                files.append([])
                used = 0
            files[-1].append(info)
            used += info.num_bytes
        self._files = {shard_name(i, len(files)): infos for i, infos in enumerate(files)}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.num_bytes for info in self._infos)

    @property
    def num_tensors(self) -> int:
        return len(self._infos)

    @property
    def num_files(self) -> int:
        return len(self._files)

    def run(self, out: Path, *, overwrite: bool, progress: Progress = lambda _: None) -> None:
        """Write the folder, which appears when it is complete."""
        staging = Staging(out, overwrite=overwrite)
        with on_failure(staging.discard):
            staging.open(self.num_bytes)
            for file, infos in self._files.items():
                self._write(staging.path / file, infos, progress)
            if len(self._files) > 1:
                self._write_index(staging.path / INDEX_FILE)
            config = self._reader.index.values.get("config")
            if isinstance(config, str):
                (staging.path / CONFIG_FILE).write_text(config, encoding="utf-8")
            staging.publish()

    @staticmethod
    def _dtype(saved: str, asked: torch.dtype | None) -> str:
        dtype = getattr(torch, saved)
        if asked is not None and dtype.is_floating_point:
            dtype = asked
        name = str(dtype).removeprefix("torch.")
        if name not in _NAMES:
            raise UsageError(f"safetensors files cannot have {dtype}; give another dtype.")
        return _NAMES[name]

    def _write(self, path: Path, infos: list[TensorInfo], progress: Progress) -> None:
        ties = {
            alias.removeprefix(f"{MODEL}."): name.removeprefix(f"{MODEL}.")
            for alias, name in self._reader.index.aliases.items()
        }
        names = {info.name for info in infos}
        ties = {alias: name for alias, name in ties.items() if name in names}
        layout = lay_out(Header(arrange(infos), {"format": "pt", **ties}))
        with path.open("xb") as file:
            file.write(layout.encoded)
            for info in arrange(infos):
                assert file.tell() == layout.offsets[info.name]
                tensor = self._reader.index.tensors[f"{MODEL}.{info.name}"]
                buffer = torch.empty(
                    min(tensor.numel, _PIECE_NUMEL), dtype=getattr(torch, tensor.dtype)
                )
                for start in range(0, tensor.numel, _PIECE_NUMEL):
                    piece = buffer[: min(_PIECE_NUMEL, tensor.numel - start)]
                    self._reader.read(f"{MODEL}.{info.name}", start, piece)
                    data = bytes_of(piece.to(DTYPES[info.dtype]))
                    file.write(data)
                    progress(len(data))
            file.flush()
            os.fsync(file.fileno())

    def _write_index(self, path: Path) -> None:
        weights = {info.name: file for file, infos in self._files.items() for info in infos}
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weights}
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
