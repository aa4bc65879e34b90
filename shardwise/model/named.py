"""Models by name: the facts of any model, and modules of the transformers library.

Imports torch only when needed: models with formulas are planned without it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shardwise.core.errors import PlanError
from shardwise.plans.builtin import builtin, is_builtin
from shardwise.plans.facts import Facts

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

TRANSFORMERS_PREFIX = "transformers:"


def facts_of(name: str) -> Facts:
    """The facts of ``gpt-mini``, ``gpt:layers=..``, ``transformers:gpt2`` or a config.json."""
    if is_builtin(name) or not is_of_transformers(name):
        return builtin(name)  # raises with all names if it is none of them
    import torch

    from shardwise.model.facts import ModuleFacts

    return ModuleFacts(lambda: build_transformers(name, torch.float32), name=name)


def is_of_transformers(name: str) -> bool:
    """Whether a name is a model of transformers: a type, or the path of a config."""
    is_path = "/" in name or name.endswith(".json") or Path(name).exists()
    return is_path or name.startswith(TRANSFORMERS_PREFIX)


def build_transformers(name: str, dtype: "torch.dtype", *, dropout: bool = True) -> "nn.Module":
    """A causal language model with random weights; ``dropout=False`` switches all dropout off."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise PlanError(
            f"the model {name!r} needs transformers: pip install transformers"
        ) from None
    shape = _config(name)
    if not dropout:
        _switch_dropout_off(shape)
    build: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
    try:
        return build(shape, dtype=dtype)
    except ValueError as error:
        raise PlanError(f"model {name}: {_first_line(error)}") from None


def _config(name: str) -> "PretrainedConfig":
    from transformers import AutoConfig

    if name.startswith(TRANSFORMERS_PREFIX):
        model_type = name.removeprefix(TRANSFORMERS_PREFIX)
        try:
            return AutoConfig.for_model(model_type)
        except ValueError:
            raise PlanError(f"transformers has no model type {model_type!r}") from None
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(f"model {name!r}: there is no file {file}")
    try:
        return cast("PretrainedConfig", AutoConfig.from_pretrained(file))
    except (OSError, ValueError) as error:
        raise PlanError(f"model {name!r}: {file} is not a config: {_first_line(error)}") from None


def _switch_dropout_off(config: "PretrainedConfig") -> None:
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
