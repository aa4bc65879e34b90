"""A DCP folder of others, as ``sw.load`` reads checkpoints: by intervals, without a conversion."""

from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.foreign.contents import Foreign, Readable, lasting_options, readable
from shardwise.checkpoint.foreign.dcp import METADATA_FILE
from shardwise.checkpoint.foreign.folders import OURS, read_folders
from shardwise.checkpoint.training.index import Index, Tensor
from shardwise.checkpoint.training.plain import encode
from shardwise.checkpoint.training.read import Reader
from shardwise.core.checksum import crc32

MODEL, OPTIM = "model", "optim.state"


class ForeignReader(Reader):
    """Reads a folder that FSDP2 or torchtitan wrote; nothing in it is executed.

    Its data has no checksums of blocks, so that only what torch's zips say of it can be checked,
    and not here: ``shardwise import`` does that.
    """

    def __init__(self, folder: Path) -> None:
        found = read_folders(folder)
        self.lacks_index = found.kind == OURS
        """Whether ``save`` wrote the folder, so that it once had an index and checksums."""
        self._sources: dict[str, Readable] = {}
        super().__init__(folder, Index())
        for tensor in found.tensors:
            self._add(f"{MODEL}.{tensor.name}", tensor.value)
            for key, state in tensor.states.items():
                self._add(f"{OPTIM}.{tensor.name}.{key}", readable(state))
        self.index.aliases = {
            f"{MODEL}.{alias}": f"{MODEL}.{name}" for alias, name in found.aliases.items()
        }
        self.index.values = {
            "step": found.step,
            "groups": _groups(found),
            "plan": "",
            "world": 0,
            "ranks": [],
        }
        self.index.digest = crc32((folder / METADATA_FILE).read_bytes())

    def expect(self, name: str, start: int, stop: int) -> None:
        """Nothing: others' files are read when they are needed."""

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        source = self._sources[self.index.aliases.get(name, name)]
        out.copy_(source.flat(start, start + out.numel()))
        self.bytes_read += out.nbytes

    def _add(self, name: str, value: Readable) -> None:
        dtype = str(value.dtype).removeprefix("torch.")
        self._sources[name] = value
        self.index.tensors[name] = Tensor(dtype, tuple(value.shape), ())


def _groups(found: Foreign) -> list[dict[str, Any]]:
    """Each trained parameter as a group of its own, with the options that say what an update is."""
    groups = []
    for tensor in found.tensors:
        if tensor.trained:
            options = lasting_options(tensor)
            encoded = {key: encode(value, f"option '{key}'") for key, value in options.items()}
            groups.append({**encoded, "params": [tensor.name]})
    return groups
