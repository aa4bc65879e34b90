"""The command line: one file per command, on the same code as the library."""
