"""What accelerators of this machine really do: the parts of ``shardwise doctor --gpu``."""
