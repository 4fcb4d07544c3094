"""``python -m shardcast``, and where the console script starts.

Ctrl-C is an ordinary end from the first import on.
"""

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from shardcast.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT


if __name__ == "__main__":
    main()
