"""``python -m shardcast``: the same as the console script."""

from shardcast.cli.main import main

if __name__ == "__main__":
    main()
