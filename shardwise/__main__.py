"""`python -m shardwise`: the same as the `shardwise` command."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main()
