"""The user's optimizer, stepping on this rank's shards, in memory or window by window."""
