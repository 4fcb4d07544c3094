"""A store: many runs side by side, and the identity of the node that keeps them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
from pathlib import Path
from typing import Final

from shardcast.errors import DiskError, MalformedError, NotFoundError
from shardcast.protocol.documents import check_run
from shardcast.store.files import atomic_write, disk_errors
from shardcast.store.run import RunStore

log = logging.getLogger("shardcast.store")

_NODE_ID: Final = re.compile(r"^[0-9a-f]{32}\Z")


class Store:
    """The directory ``root``: one subdirectory a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._runs: dict[str, RunStore] = {}
        self._node_id: str | None = None
        self._writer = True

    def runs(self) -> list[str]:
        """Return the names of the runs that are here, sorted; other directories are passed over."""
        found = []
        with disk_errors(self.root, "listing"), contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.root):
                with contextlib.suppress(MalformedError):
                    if entry.name in self._runs or is_run_directory(Path(entry.path)):
                        found.append(check_run(entry.name))
        return sorted(found)

    def run(self, name: str, *, create: bool = False) -> RunStore:
        """Return a run's directory; the same object for the same name.

        Raises:
            MalformedError: If it is not a run name.
            NotFoundError: If the run is not here and ``create`` is False.
        """
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                run = RunStore(self.root / check_run(name), name)
                run.set_writer(self._writer)
            if not create and name not in self._runs and not is_run_directory(run.root):
                known = ", ".join(self.runs()) or "none"
                raise NotFoundError(
                    f"run {name!r} is not in this store (runs here: {known})", source=str(self.root)
                )
            if create:
                with disk_errors(run.root, "making the directory"):
                    run.root.mkdir(parents=True, exist_ok=True)
            self._runs[name] = run
            return run

    def node_id(self) -> str:
        """Return this node's identity, 32 hex digits, made once and kept in the store.

        On a read-only store it lasts as long as this object.
        """
        if self._node_id is None:
            self._node_id = self._load_node_id()
        return self._node_id

    def _load_node_id(self) -> str:
        path = self.root / ".node-id"
        with disk_errors(path, "reading"):
            try:
                text = path.read_text("ascii", errors="replace").strip()
            except FileNotFoundError:
                text = ""
        if _NODE_ID.match(text):
            return text
        text = secrets.token_hex(16)
        try:
            atomic_write(path, text.encode("ascii") + b"\n")
        except DiskError as error:
            log.warning("node id is not kept: %s", error)
        return text

    def set_writer(self, writer: bool) -> None:
        """Say for every run, also later ones, whether this process records what is good there."""
        with self._lock:
            self._writer = writer
            for run in self._runs.values():
                run.set_writer(writer)

    def close(self) -> None:
        """Close every run."""
        with self._lock:
            for run in self._runs.values():
                run.close()
            self._runs.clear()


def is_run_directory(path: Path) -> bool:
    """Say whether a directory holds a run: a head, or the state of a version that is on its way."""
    return (path / "head.json").is_file() or (path / "state").is_dir()
