"""The exceptions that users see: one sentence with what is wrong, where, and what to do."""


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose.

    >>> import shardwise as sw
    >>> try:
    ...     sw.Auto(micro_batch=0)
    ... except sw.ShardwiseError as error:
    ...     print(type(error).__name__)
    PlanError
    """


class PlanError(ShardwiseError, ValueError):
    """A bad value in a plan, or a plan, a topology and a model that do not fit together."""


class UsageError(ShardwiseError, RuntimeError):
    """A call that the current state does not allow; the message says what to do instead."""


class SyncError(ShardwiseError, RuntimeError):
    """Ranks disagree, or one did not arrive in time; the message names the unit and the ranks."""
