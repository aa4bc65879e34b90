"""The command line: one file a command, on the same code as the library."""
