"""Build a model without memory; give its tensors their values later, one by one.

Inside `deferred_init()` large tensors are meta tensors whose operations are recorded, below
autograd; `materialize` replays those that one tensor depends on, on any device. Values depend on
the seed and the program, never on what else was materialised. What cannot be replayed raises.

Each module imports only from those before it:

operators   what a schema says of an operator, the leaves of its arguments
streams     random numbers: one stream for each operation
history     what is recorded: storages without memory, and the writes into them
lookup      which history a tensor has
replay      from a history to values
recorder    which operations are deferred
facade      why model code does not notice
context     `deferred_init`
"""

from shardwise.model.deferred.context import deferred_init
from shardwise.model.deferred.lookup import deferred_seed, forget, is_deferred
from shardwise.model.deferred.replay import materialize, recorded_ops

__all__ = [
    "deferred_init",
    "deferred_seed",
    "forget",
    "is_deferred",
    "materialize",
    "recorded_ops",
]
