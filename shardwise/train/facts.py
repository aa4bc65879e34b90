"""The facts of a model by its name: by formulas where it is built in, else told of the module."""

from shardwise.plans.builtin import builtin, is_builtin
from shardwise.plans.facts import Facts


def facts_of(name: str) -> Facts:
    """Of ``gpt-mini``, ``llama3-8b``, ``gpt:layers=..``, ``transformers:gpt2`` or a config.json."""
    if is_builtin(name):
        return builtin(name)
    # Only modules need torch.
    from shardwise.model.facts import ModuleFacts
    from shardwise.train.config import ModelConfig
    from shardwise.train.models import build_model, is_of_transformers

    if not is_of_transformers(name):
        return builtin(name)  # which says what there is
    return ModuleFacts(lambda: build_model(ModelConfig(name=name)), name=name)
