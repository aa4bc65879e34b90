"""Models by name: the built-in GPT sizes, or any causal language model of transformers.

Called inside `sw.deferred_init()`, so that building a model of any size takes no memory.
"""

import difflib
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import PlanError, UsageError
from shardwise.model.gpt import GPT, SIZES, sized
from shardwise.model.named import TRANSFORMERS_PREFIX, build_transformers, is_of_transformers
from shardwise.train.config import ConfigError, ModelConfig


def build_model(config: ModelConfig, *, dropout: bool = True) -> nn.Module:
    """The module that `config` names; its forward takes (input_ids, labels), see `loss_of`.

    `dropout=False` switches all dropout off, so that two runs can be compared number by number.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.name in SIZES:
        return _build_gpt(config, dtype)
    if is_of_transformers(config.name):
        return _build_transformers(config, dtype, dropout)
    near = difflib.get_close_matches(config.name, SIZES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"there is no model {config.name!r}: {hint}use one of {', '.join(SIZES)}, "
        f"'{TRANSFORMERS_PREFIX}gpt2', or the path of a config.json"
    )


def loss_of(output: Any) -> Tensor:
    """The loss in the output of a causal language model: an object with `.loss`, or a tuple."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise UsageError(
            f"the model returned {type(output).__name__} without a scalar loss; "
            "its forward must compute one from (input_ids, labels)"
        )
    return loss


def vocab_of(model: nn.Module) -> int:
    """How many token ids the model knows."""
    config: Any = model.config
    return int(config.vocab if hasattr(config, "vocab") else config.get_text_config().vocab_size)


def context_of(model: nn.Module) -> int | None:
    """The longest sequence that the model takes; None: it sets no limit."""
    config: Any = model.config
    if hasattr(config, "context"):
        return int(config.context)
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def count_parameters(model: nn.Module) -> int:
    """Number of trained and frozen elements; a tied parameter counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _build_gpt(config: ModelConfig, dtype: torch.dtype) -> GPT:
    try:
        shape = sized(config.name, **config.shape())
    except ValueError as error:
        raise ConfigError(f"model {config.name}: {error}") from None
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return GPT(shape)
    finally:
        torch.set_default_dtype(previous)


def _build_transformers(config: ModelConfig, dtype: torch.dtype, dropout: bool) -> nn.Module:
    set_fields = [name for name, value in config.shape().items() if value is not None]
    if set_fields:
        raise ConfigError(
            f"model.{set_fields[0]} works with built-in sizes only; the shape of "
            f"{config.name} comes from its config.json"
        )
    try:
        return build_transformers(config.name, dtype, dropout=dropout)
    except PlanError as error:
        raise ConfigError(str(error)) from None
