"""Models known by name, and a form for models of any other shape: see ``builtin``."""

import difflib

from shardwise.core.errors import PlanError
from shardwise.plans.transformer.facts import Transformer

BYTE_VOCAB, GPT_VOCAB = 256, 50257

_GPT = {  # layers, width, heads, vocabulary, context
    # the sizes of model/gpt.py
    "gpt-tiny": (4, 128, 4, BYTE_VOCAB, 1024),
    "gpt-mini": (6, 384, 6, BYTE_VOCAB, 1024),
    "gpt-small": (16, 512, 8, BYTE_VOCAB, 1024),
    "gpt-base": (12, 768, 12, BYTE_VOCAB, 1024),
    "gpt-medium": (24, 1024, 16, BYTE_VOCAB, 1024),
    "gpt-large": (36, 1280, 20, BYTE_VOCAB, 1024),
    "gpt-xl": (48, 1600, 25, BYTE_VOCAB, 1024),
    # those of GPT-3 (arXiv:2005.14165, table 2.1), with widths that are multiples of the heads
    "gpt-125m": (12, 768, 12, GPT_VOCAB, 2048),
    "gpt-350m": (24, 1024, 16, GPT_VOCAB, 2048),
    "gpt-760m": (24, 1536, 16, GPT_VOCAB, 2048),
    "gpt-1.3b": (24, 2048, 16, GPT_VOCAB, 2048),
    "gpt-2.7b": (32, 2560, 32, GPT_VOCAB, 2048),
    "gpt-6.7b": (32, 4096, 32, GPT_VOCAB, 2048),
    "gpt-13b": (40, 5120, 40, GPT_VOCAB, 2048),
    "gpt-175b": (96, 12288, 96, GPT_VOCAB, 2048),
}

_LLAMA = {  # layers, width, heads, heads of keys and values, ffn, vocabulary, context
    "llama-7b": (32, 4096, 32, 32, 11008, 32000, 2048),
    "llama-13b": (40, 5120, 40, 40, 13824, 32000, 2048),
    "llama-30b": (60, 6656, 52, 52, 17920, 32000, 2048),
    "llama-65b": (80, 8192, 64, 64, 22016, 32000, 2048),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": (126, 16384, 128, 8, 53248, 128256, 131072),
}

NAMES = (*_GPT, *_LLAMA)

_NEEDED = ("layers", "width", "heads")
_OPTIONAL = {
    "gpt": ("ffn", "vocab", "seq", "tied"),
    "llama": ("kv_heads", "ffn", "vocab", "seq", "tied"),
}


def is_builtin(name: str) -> bool:
    """Whether a name is built in or such a form; the values of a form may still be wrong."""
    return name in NAMES or name.partition(":")[0] in _OPTIONAL


def builtin(name: str) -> Transformer:
    """A model by name: ``gpt-mini``, ``llama3-8b``, or ``gpt:layers=40,width=6144,heads=32``.

    Such a form also takes ``vocab``, ``ffn`` (the width between a block's two linear layers),
    ``seq`` (the longest sequence), ``tied`` (0 or 1), and with ``llama`` ``kv_heads``.

    >>> round(builtin("gpt:layers=128,width=25600,heads=200,seq=1024").numel / 1e12, 2)
    1.01
    """
    family, colon, form = name.partition(":")
    if colon and family in _OPTIONAL:
        return _written(name, family, form)
    if name in _GPT:
        layers, width, heads, vocab, context = _GPT[name]
        return _gpt(name, layers, width, heads, vocab=vocab, seq=context)
    if name in _LLAMA:
        layers, width, heads, kv_heads, ffn, vocab, context = _LLAMA[name]
        return _llama(
            name, layers, width, heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, seq=context
        )
    raise PlanError(
        f"There is no model '{name}'; {_nearest(name, NAMES)}use one of {', '.join(NAMES)}, a form "
        "like gpt:layers=40,width=6144,heads=32, transformers:gpt2, or the path of a config.json."
    )


def _gpt(
    name: str,
    layers: int,
    width: int,
    heads: int,
    *,
    ffn: int | None = None,
    vocab: int = GPT_VOCAB,
    seq: int = 2048,
    tied: int = 1,
) -> Transformer:
    return Transformer(
        name=name,
        family="gpt",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        ffn=4 * width if ffn is None else ffn,
        vocab=vocab,
        context=seq,
        tied=bool(tied),
    )


def _llama(
    name: str,
    layers: int,
    width: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int = 32000,
    seq: int = 4096,
    tied: int = 0,
) -> Transformer:
    # Llama's own rule: two thirds of 4 * width, rounded up to a multiple of 256.
    usual = -(-(8 * width // 3) // 256) * 256
    return Transformer(
        name=name,
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        ffn=usual if ffn is None else ffn,
        vocab=vocab,
        context=seq,
        tied=bool(tied),
    )


def _written(name: str, family: str, form: str) -> Transformer:
    known = (*_NEEDED, *_OPTIONAL[family])
    values: dict[str, int] = {}
    for item in form.split(","):
        key, _, value = item.strip().partition("=")
        if key not in known:
            raise PlanError(
                f"'{key}' in model '{name}' is unknown; {_nearest(key, known)}"
                f"use {', '.join(known)}."
            )
        if not value.isdecimal():
            raise PlanError(
                f"'{item.strip()}' in model '{name}' is not KEY=NUMBER; "
                f"write for example {key}=1024."
            )
        values[key] = int(value)
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise PlanError(f"Model '{name}' has no {missing[0]}; add {missing[0]}=NUMBER to it.")
    make = {"gpt": _gpt, "llama": _llama}[family]
    return make(name, **values)


def _nearest(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{near[0]}'? Or " if near else ""
