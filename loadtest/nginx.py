"""Starts a private nginx: as a plain sendfile server, or from the recipe in deploy/nginx."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.processes import Process, Processes, free_port, wait_for_port

RECIPE = Path(__file__).resolve().parent.parent / "deploy" / "nginx" / "shardcast.conf"

_START_TIMEOUT_S = 10.0
_TEMP = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class Nginx:
    """A running nginx.

    Attributes:
        process: Its master; its workers are children.
        url: Base URL.
        access_log: What it served, if the configuration logs.
    """

    process: Process
    url: str
    access_log: Path


def start(processes: Processes, prefix: Path, site: str, port: int, *, name: str) -> Nginx:
    """Start nginx with one worker on a private prefix.

    Args:
        processes: The group that will end it.
        prefix: A directory for its pid, cache and temporary files.
        site: What stands inside the `http` block, with a server on `port`.
        port: The port that `site` listens on.
        name: What failure messages call it.
    """
    prefix.mkdir(parents=True, exist_ok=True)
    config = prefix / "nginx.conf"
    config.write_text(_main(prefix, site), encoding="utf-8")
    argv = ["nginx", "-p", str(prefix), "-c", str(config), "-e", "stderr"]
    process = processes.start(argv, name=name)
    wait_for_port(process, port, timeout=_START_TIMEOUT_S)
    return Nginx(process, f"http://127.0.0.1:{port}", prefix / "access.log")


def _main(prefix: Path, site: str) -> str:
    # As root nginx would drop to another user, who cannot read a private directory.
    user = "user root;\n" if os.geteuid() == 0 else ""
    temp = "".join(f"    {kind}_temp_path {prefix}/temp-{kind};\n" for kind in _TEMP)
    return (
        f"{user}daemon off;\nworker_processes 1;\npid {prefix}/nginx.pid;\nerror_log stderr warn;\n"
        f"events {{ worker_connections 4096; }}\nhttp {{\n{temp}{site}\n}}\n"
    )


def serve_files(processes: Processes, prefix: Path, root: Path) -> Nginx:
    """Serve the files below `root` with sendfile, and log nothing."""
    port = free_port()
    site = (
        f"    server {{ listen 127.0.0.1:{port}; root {root}; access_log off; sendfile on;\n"
        "        tcp_nopush on; default_type application/octet-stream;\n"
        "        keepalive_requests 100000; }"
    )
    return start(processes, prefix, site, port, name="nginx-files")


def caching_relay(processes: Processes, prefix: Path, origin: str) -> Nginx:
    """Run the recipe of deploy/nginx as it stands, but for the three places marked CHANGE."""
    port = free_port()
    return start(processes, prefix, recipe(origin, prefix, port), port, name="nginx-cache")


def recipe(origin: str, prefix: Path, port: int) -> str:
    """Return the recipe with its addresses and directories replaced.

    Raises:
        ValueError: The recipe no longer contains what is to be replaced.
    """
    text = RECIPE.read_text(encoding="utf-8")
    changes = {
        "server origin.example.net:8470;": f"server {urlsplit(origin).netloc};",
        "proxy_cache_path /var/cache/nginx/shardcast ": f"proxy_cache_path {prefix}/cache ",
        "max_size=200g": "max_size=4g",
        "listen 8480;": f"listen 127.0.0.1:{port};",
        "/var/log/nginx/shardcast.log": f"{prefix}/access.log",
    }
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{RECIPE.name} holds {text.count(old)} times {old!r} instead of once")
        text = text.replace(old, new)
    return text
