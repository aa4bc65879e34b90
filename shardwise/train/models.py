"""Models by name: the built-in GPT sizes, or any causal language model of transformers.

Called inside `sw.deferred_init()`, so that building costs no memory whatever the size.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import UsageError
from shardwise.train.config import ConfigError, ModelConfig
from shardwise.train.gpt import GPT, SIZES, sized

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TRANSFORMERS_PREFIX = "transformers:"


def build_model(config: ModelConfig, *, dropout: bool = True) -> nn.Module:
    """The module that `config` names; its forward takes (input_ids, labels), see `loss_of`.

    `dropout=False` switches every dropout off: two runs can then be compared number by number.
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


def is_of_transformers(name: str) -> bool:
    """Whether a name means a model of transformers: by its type, or the path of its config."""
    is_path = "/" in name or name.endswith(".json") or Path(name).exists()
    return is_path or name.startswith(TRANSFORMERS_PREFIX)


def loss_of(output: Any) -> Tensor:
    """The loss in what a causal language model returned: an object with `.loss`, or a tuple."""
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
    """The longest sequence the model takes, or None when it sets no limit."""
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
            f"model.{set_fields[0]} shapes only the built-in sizes; "
            f"{config.name} is shaped by its own config.json"
        )
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            f"the model {config.name!r} needs transformers: pip install transformers"
        ) from None
    shape = _transformers_config(config.name)
    if not dropout:
        _switch_dropout_off(shape)
    try:
        build: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
        return build(shape, dtype=dtype)
    except ValueError as error:
        raise ConfigError(f"model {config.name}: {_first_line(error)}") from None


def _transformers_config(name: str) -> "PretrainedConfig":
    from transformers import AutoConfig

    if name.startswith(TRANSFORMERS_PREFIX):
        model_type = name.removeprefix(TRANSFORMERS_PREFIX)
        try:
            return AutoConfig.for_model(model_type)
        except ValueError:
            raise ConfigError(f"transformers knows no model type {model_type!r}") from None
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model {name!r}: there is no file {file}")
    try:
        return cast("PretrainedConfig", AutoConfig.from_pretrained(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r}: {file} is no config: {_first_line(error)}") from None


def _switch_dropout_off(config: "PretrainedConfig") -> None:
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
