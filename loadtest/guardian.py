"""Cleans up after a program that was killed: `python loadtest/guardian.py`, fed through a pipe.

A program that ends by itself, or by one SIGTERM, removes what it made. One that gets SIGKILL cannot, so it
tells this process beforehand what there is: the pipe's end is the news that it is gone. The
guardian has a session of its own, so that a signal to the program's group (`timeout` sends those)
does not reach it. Only the standard library is used: it must start at once, from any directory.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

GRACE_S = 15.0
"""After SIGTERM: a scenario needs a while to end its own processes and to remove its directory."""


def descendants(pid: int) -> list[int]:
    """Return `pid` and every living process below it, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                text = stat.read()
                parent = int(text[text.rindex(")") + 2 :].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = [pid]
    for member in found:
        found.extend(children.get(member, []))
    return found


def handle_of(pid: int) -> int | None:
    """Return a pidfd, which cannot come to mean another process; None if it is gone."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


def gone(handle: int, seconds: float) -> bool:
    """Wait until a process has ended; say whether it has."""
    return bool(select.select([handle], [], [], max(0.0, seconds))[0])


def tell(handle: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone is fine."""
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(handle, number)


def end(processes: dict[int, int], grace_s: float = GRACE_S) -> None:
    """End processes and all below them: by SIGTERM first, by SIGKILL then."""
    handles = list(processes.values())
    for pid in processes:
        handles += [h for member in descendants(pid)[1:] if (h := handle_of(member)) is not None]
    for handle in processes.values():
        tell(handle, signal.SIGCONT)  # a stopped process hears nothing else
        tell(handle, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for handle in processes.values():
        gone(handle, deadline - time.monotonic())
    for handle in handles:
        tell(handle, signal.SIGKILL)
    for handle in handles:
        gone(handle, 5.0)


def main() -> None:
    """Read what there is from stdin: `process PID`, `directory PATH`, `namespace NAME`, `done`.

    And what there is no more: `ended PID`, `removed PATH`, `unnamed NAME`.
    """
    processes: dict[int, int] = {}
    directories: list[str] = []
    namespaces: list[str] = []
    more = {"directory": directories, "namespace": namespaces}
    less = {"removed": directories, "unnamed": namespaces}
    for line in sys.stdin:
        word, _space, rest = line.rstrip("\n").partition(" ")
        if word == "done":
            return
        if word == "process":
            handle = handle_of(int(rest))
            if handle is not None:
                processes[int(rest)] = handle
        elif word == "ended" and int(rest) in processes:
            os.close(processes.pop(int(rest)))
        elif word in more:
            more[word].append(rest)
        elif word in less:
            less[word].remove(rest)
    end(processes)
    for name in namespaces:
        os.spawnlp(os.P_WAIT, "ip", "ip", "netns", "del", name)
    for directory in directories:
        with open("/proc/self/mounts") as mounts:
            inside = [m.split()[1] for m in mounts if m.split()[1].startswith(directory + "/")]
        for mount in reversed(inside):
            os.spawnlp(os.P_WAIT, "umount", "umount", "-l", mount)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
