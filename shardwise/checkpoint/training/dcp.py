"""The index that torch's distributed checkpoints read: a pickle, which is written and never loaded.

Names are those of a state dict ``{"model": ..., "optim": ...}`` of FSDP2's ``get_model_state_dict``
and ``get_optimizer_state_dict``, flattened or not: ``model.NAME``, ``optim.state.NAME.exp_avg``,
``optim.param_groups.NAME.lr`` and ``optim.param_groups.0.lr``.
"""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.training.blob import tail
from shardwise.checkpoint.training.boxes import box_of
from shardwise.checkpoint.training.index import Extent, Index, Tensor

Objects = dict[tuple[str | int, ...], Extent]
"""Values that torch's readers load with ``torch.load``, by their path in the state dict."""


def pickled(value: Any) -> bytes:
    """A value as torch's distributed checkpoints keep it."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def metadata_bytes(index: Index, objects: Objects) -> bytes:
    """The contents of ``.metadata``."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    names = {name: name for name in index.tensors} | index.aliases
    for name, target in names.items():
        tensor = index.tensors[target]
        entries[name], places = _describe(index, name, tensor)
        storage |= places
        paths[name] = _path(name)
    for path, extent in objects.items():
        name = ".".join(map(str, path))
        entries[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _info(extent.file, extent.offset, extent.num_bytes)
        paths[name] = path
    metadata = Metadata(
        entries, paths, storage, StorageMeta(), version=filesystem.CURRENT_DCP_VERSION
    )
    return pickle.dumps(metadata)


def _describe(
    index: Index, name: str, tensor: Tensor
) -> tuple[TensorStorageMetadata, dict[MetadataIndex, Any]]:
    chunks, places = [], {}
    for number, chunk in enumerate(tensor.chunks):
        box = box_of(tensor.shape, chunk.start, chunk.stop)
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        end = chunk.data + chunk.numel * tensor.item_bytes
        end += len(tail(tensor.dtype, box.sizes, tensor.item_bytes, 0))
        file = index.files[chunk.file].name
        places[MetadataIndex(name, offsets, number)] = _info(file, chunk.blob, end - chunk.blob)
    dtype = getattr(torch, tensor.dtype)
    size = torch.Size(tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks), places


def _info(file: str, offset: int, nbytes: int) -> Any:
    return filesystem._StorageInfo(file, offset, nbytes)


def _path(name: str) -> tuple[str | int, ...]:
    """Where a tensor is in the nested state dict: parameters' names have dots of their own."""
    first, _, rest = name.partition(".")
    if first == "optim" and rest.startswith("state."):
        parameter, _, key = rest.removeprefix("state.").rpartition(".")
        return ("optim", "state", parameter, key)
    return (first, rest)
