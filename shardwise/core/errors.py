"""The exceptions that users meet: one sentence naming what was wrong, where, and what to do."""


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""


class PlanError(ShardwiseError, ValueError):
    """A plan, a topology or a model that do not fit together."""


class UsageError(ShardwiseError, RuntimeError):
    """A call that the current state does not allow; the message says what to do instead."""


class SyncError(ShardwiseError, RuntimeError):
    """Ranks that disagree, or a rank that did not arrive in time; names the unit and the ranks."""
