"""Log lines on stderr, for commands that run for long."""

from __future__ import annotations

import logging
import sys

from shardcast.cli.output import Output


def configure_logging(out: Output, *, level: int = logging.INFO) -> None:
    """Send log records to stderr: from ``level`` on, all with --verbose, warnings with --quiet."""
    chosen = logging.DEBUG if out.verbose else logging.WARNING if out.quiet else level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for package in ("relay", "shardcast"):
        logging.getLogger(package).setLevel(chosen)
