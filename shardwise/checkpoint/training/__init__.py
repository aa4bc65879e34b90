"""Training checkpoints: saved from shards in DCP's format, loaded under any plan and world."""
