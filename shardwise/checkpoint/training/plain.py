"""Plain Python values as JSON, exactly, and with tensors beside it.

What a scheduler or a user keeps (numbers, texts, lists, dicts, tensors) is written without pickles,
so that nothing can be executed when it is read. What JSON lacks is a dict with a single key that
begins with ``$``.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from shardwise.core.errors import UsageError

Put = Callable[[torch.Tensor], str]
"""Keeps a tensor, and returns the name under which it is found again."""
Get = Callable[[str], torch.Tensor]


def encode(value: Any, what: str, put: Put | None = None) -> Any:
    """A value for ``json.dumps``; tensors go to ``put``. ``what`` names the value in errors.

    >>> encode({"a": (1, 2.5), 3: None}, "extra")
    {'$dict': [['a', {'$tuple': [1, 2.5]}], [3, None]]}
    """
    try:
        return _encode(value, what, put)
    except RecursionError:
        raise UsageError(
            f"{what} contains itself, or is nested too deeply, which a checkpoint cannot keep; "
            "save numbers, texts, tensors, and lists or dicts of them."
        ) from None


def _encode(value: Any, what: str, put: Put | None) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor) and put is not None:
        return {"$tensor": put(value.detach())}
    if isinstance(value, Counter):
        return {"$counter": _pairs(value, what, put)}
    if type(value) in (dict, OrderedDict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{what}['{key}']", put) for key, item in value.items()}
        return {"$dict": _pairs(value, what, put)}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_encode(item, f"{what}[{place}]", put) for place, item in enumerate(value)]
        if type(value) is list:
            return items
        return {"$set" if isinstance(value, set | frozenset) else "$tuple": items}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _encode(value.item(), what, put)  # a number of numpy
    raise UsageError(
        f"{what} has the type {type(value).__name__}, which a checkpoint cannot keep; save "
        "numbers, texts, tensors, and lists or dicts of them."
    )


def _pairs(value: Any, what: str, put: Put | None) -> list[list[Any]]:
    return [
        [_encode(key, f"a key of {what}", None), _encode(item, f"{what}[{key!r}]", put)]
        for key, item in value.items()
    ]


def decode(value: Any, get: Get | None = None) -> Any:
    """The value that ``encode`` was given.

    >>> decode(encode({"a": (1, float("inf")), 3: b"x"}, "extra"))
    {'a': (1, inf), 3: b'x'}
    """
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (kind := next(iter(value))).startswith("$"):
        return {key: decode(item, get) for key, item in value.items()}
    inner = value[kind]
    if kind == "$tensor" and get is not None:
        return get(inner)
    if kind not in _DECODERS:
        raise ValueError(f"unknown kind of value {kind}")
    return _DECODERS[kind](inner, get)


def _decoded_pairs(inner: Any, get: Get | None) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(item, get)) for key, item in inner]


def _dtype(inner: Any, _: Get | None) -> torch.dtype:
    found = getattr(torch, str(inner), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {inner}")
    return found


_DECODERS: dict[str, Callable[[Any, Get | None], Any]] = {
    "$float": lambda inner, _: float(inner),
    "$dict": lambda inner, get: dict(_decoded_pairs(inner, get)),
    "$counter": lambda inner, get: Counter(dict(_decoded_pairs(inner, get))),
    "$tuple": lambda inner, get: tuple(decode(item, get) for item in inner),
    "$set": lambda inner, get: {decode(item, get) for item in inner},
    "$bytes": lambda inner, _: base64.b64decode(inner),
    "$complex": lambda inner, _: complex(*map(float, inner)),
    "$dtype": _dtype,
}
