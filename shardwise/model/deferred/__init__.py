"""Build a model without memory; compute the values of its tensors later, one by one.

Inside `deferred_init()` large tensors are meta tensors whose operations are recorded below
autograd; `materialize` replays those that one tensor depends on, on any device. Values depend on
the seed and the program, never on which other tensors were materialised. What cannot be replayed
raises.

Each module imports only from those before it:

operators   properties of an operator by its schema, and the leaves of its arguments
streams     random numbers: one stream per operation
history     what is recorded: storages without memory, and the writes into them
lookup      which history a tensor has
replay      from a history to values
recorder    which operations are deferred
facade      makes deferred tensors look real to model code
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
