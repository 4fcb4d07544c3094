"""What the relay tells people and tools about itself."""

from __future__ import annotations

from typing import Any

import shardcast
from relay.clients import Clients
from relay.config import Prefetch
from relay.node import Node
from relay.runs import RelayRun

MOST_FILLS = 100


def runs_document(node: Node) -> dict[str, Any]:
    """Return the names of the runs that have a head, and their newest versions."""
    served = {run.name: run for run in node.runs.values() if run.head is not None}
    return {
        "runs": sorted(served),
        "heads": {
            name: {"sequence": run.head.sequence, "version": run.head.head.version}
            for name, run in sorted(served.items())
            if run.head is not None
        },
    }


def status_document(node: Node, clients: Clients) -> dict[str, Any]:
    """Return everything worth knowing."""
    parents = node.parents.report()
    if node.sources is not None:
        for parent in parents:
            parent["bytes_per_s"] = node.sources.rate(str(parent["url"]))
    siblings = node.siblings.report() if node.siblings is not None else []
    for server in (*parents, *siblings):
        server["bans"] = _bans(node, str(server["url"]))
        server["banned"] = bool(server["bans"])
    return {
        "software": f"shardcast/{shardcast.__version__}",
        "node": node.identity.node,
        "role": node.config.role,
        "depth": node.depth,
        "uptime_s": round(node.clock() - node.started, 1),
        "draining": node.draining,
        "prefetch": str(node.config.prefetch),
        "materialize": None if node.rebuilding is None else node.rebuilding.report(),
        "ready": ready_problem(node) is None,
        "runs": {name: run_document(run) for name, run in sorted(node.runs.items())},
        "parents": parents,
        "siblings": siblings,
        "children": clients.report(),
        "scrub": None if node.scrub is None else node.scrub.report(),
        "connections": node.admission.connections.taken,
        "max_connections": node.admission.connections.most,
        "requests": node.admission.requests.taken,
        "waiting": node.admission.waits.taken,
        "fills": [
            {
                "run": fill.target.run,
                "digest": fill.target.digest,
                "bytes": fill.watermark,
                "total": fill.total,
                "source": fill.source,
            }
            for fill in node.fills.open()[:MOST_FILLS]
        ],
    }


def _bans(node: Node, url: str) -> list[dict[str, Any]]:
    """Return for which runs a server is left alone, why, and for how long yet."""
    if node.sources is None:
        return []
    now = node.clock()
    return [
        {"run": ban.run, "reason": ban.reason, "seconds_left": round(ban.until - now, 1)}
        for ban in node.sources.bans(url)
    ]


def run_document(run: RelayRun) -> dict[str, Any]:
    """Return how one run stands."""
    found: dict[str, Any] = {"problem": run.problem or run.no_room, "head": None, "versions": []}
    if run.head is None:
        return found
    head = run.head.head
    found["head"] = {
        "sequence": head.sequence,
        "issued_at": head.issued_at,
        "expires_at": head.expires_at,
        "version": head.version,
        "open": head.open.version if head.open is not None else None,
        "hold": head.hold,
        "withdrawn": head.withdrawn,
    }
    found["complete"] = run.complete_version()
    found["versions"] = [_version_document(run, number) for number in run.catalog.numbers()]
    return found


def _version_document(run: RelayRun, number: int) -> dict[str, Any]:
    version = run.catalog.version(number)
    stored = run.stored.get(number)
    shards = None if version is None else version.layout.shard_count
    present = 0 if stored is None else len(stored.present())
    return {
        "version": number,
        "step": None if version is None else version.layout.step,
        "manifest": None if version is None else version.manifest,
        "bytes": None if version is None else version.layout.total_bytes,
        "shards": shards,
        "present": present,
        "complete": stored is not None and stored.complete,
        "damaged": None if stored is None else stored.damaged,
        "problem": run.catalog.problem(number),
    }


def peers_document(node: Node, run: RelayRun) -> dict[str, Any]:
    """Return the neighbours that serve a run: live siblings, then parents."""
    siblings = node.siblings.live() if node.siblings is not None else {}
    peers: list[dict[str, object]] = [
        {"url": url, "node": name, "kind": "sibling"} for name, url in siblings.items()
    ]
    peers += [
        {"url": parent["url"], "node": parent["node"], "kind": "parent", "depth": parent["depth"]}
        for parent in node.parents.report()
        if parent["live"]
    ]
    return {"run": run.name, "node": node.identity.node, "depth": node.depth, "peers": peers}


def ready_problem(node: Node) -> str | None:
    """Return why the relay is not ready to take load, or None.

    Ready: it listens, does not drain, and the newest version of every run is whole here, or
    comes on demand. A run that nobody named with ``--run`` counts once it has a head: whoever may
    publish to a parent can name a run there that nobody here can trust.
    """
    config = node.config
    if node.draining:
        return "draining"
    if not config.origin and config.prefetch is not Prefetch.ALL:
        return None
    served = [run for run in node.runs.values() if run.head is not None]
    if not config.origin:
        if not node.runs:
            return "no run yet"
        expected = config.runs if served else (*config.runs, *sorted(node.runs))
        for name in expected:
            run = node.runs.get(name)
            if run is None or run.head is None:
                return f"run {name}: no head yet"
    for run in served:
        newest = None if run.head is None else run.head.head.version
        if newest is not None and run.complete_version() != newest:
            return f"run {run.name}: version {newest} is not whole yet"
    return None
