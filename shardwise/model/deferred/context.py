"""The context inside which models are built without memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwise.model.deferred.facade import Facade
from shardwise.model.deferred.lookup import end_context, remember
from shardwise.model.deferred.recorder import Recorder


@contextmanager
def deferred_init() -> Iterator[None]:
    """Models built inside have their large tensors on the meta device, without memory.

    `shard` gives them the values that they were initialised with. Nested contexts act as one.
    Writes after the context are not recorded: those through a registered parameter make
    `materialize` raise, those through `parameter.data` go unnoticed.

    >>> import torch, shardwise as sw
    >>> with sw.deferred_init():
    ...     model = torch.nn.Linear(1024, 1024)
    >>> model.weight.is_meta
    True
    >>> sw.shard(model).weight.is_meta
    False
    """
    if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
        yield
        return

    recorder = Recorder()
    hook = register_module_parameter_registration_hook(remember)
    try:
        with recorder, Facade(recorder):
            yield
    finally:
        hook.remove()
        end_context()
