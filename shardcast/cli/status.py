"""``shardcast status``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from shardcast.cli.output import Output, table
from shardcast.cli.units import count, duration, rate, size


def status(
    out: Output,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A relay, an origin, or a worker that serves.")
    ],
) -> None:
    """Show how a relay stands: runs, versions, completeness, parents, siblings, children, rates.

    With --json its answer is one event with the members it has. Exits 13 if it cannot be reached.
    """
    import asyncio

    document = asyncio.run(_fetch(url))
    out.event("status", url=url, **{k: v for k, v in document.items() if k not in _OURS})
    for line in lines(document, url, time.time() * 1000):
        out.result(line)


async def _fetch(url: str) -> dict[str, Any]:
    from shardcast.config import NetConfig
    from shardcast.upstream import Upstream, open_session

    config = NetConfig()
    async with open_session(config) as session:
        return await Upstream(url, session, config).status()


def lines(document: Mapping[str, Any], url: str, now_ms: float) -> Iterable[str]:
    """Yield what a person reads; what a relay does not tell is left out."""
    node = str(document.get("node") or "")[:8] or "-"
    state = "draining" if document.get("draining") else "ready"
    if state == "ready" and document.get("ready") is False:
        state = "not ready"
    facts = [
        str(document.get("role") or "relay"),
        f"node {node}",
        f"depth {_text(document.get('depth'))}",
        state,
    ]
    if isinstance(document.get("uptime_s"), int | float):
        facts.append(f"up {duration(document['uptime_s'])}")
    if isinstance(document.get("connections"), int):
        facts.append(count(document["connections"], "connection"))
    yield f"{url.rstrip('/')}: {', '.join(facts)} ({_text(document.get('software'))})"
    for name, run in _mapping(document.get("runs")).items():
        yield ""
        yield from _run(name, run, now_ms)
    yield from _section("parents", _PARENTS, map(_parent, _rows(document.get("parents"))))
    yield from _section("siblings", _SIBLINGS, map(_sibling, _rows(document.get("siblings"))))
    yield from _section("children", _CHILDREN, map(_child, _rows(document.get("children"))))
    scrub = _mapping(document.get("scrub"))
    if scrub.get("rate_bytes_per_s"):
        yield ""
        yield _scrub(scrub)
    yield from _section("on their way", _FILLS, map(_fill, _rows(document.get("fills"))))


_OURS = frozenset({"event", "t", "url", "name"})
_VERSIONS = ("version", "step", "bytes", "shards", "here", "state", "manifest")
_PARENTS = ("url", "live", "used", "depth", "node", "rate", "error")
_SIBLINGS = ("url", "live", "node")
_CHILDREN = ("address", "node", "run", "requests", "last seen", "agent")
_FILLS = ("run", "blob", "bytes", "of", "from")


def _run(name: str, run: Any, now_ms: float) -> Iterable[str]:
    run = _mapping(run)
    head = _mapping(run.get("head"))
    facts = [f"run {name}"]
    if head:
        facts.append(f"newest {_text(head.get('version'))}")
        facts.append(f"whole here {_text(run.get('complete'))}")
        expires = head.get("expires_at")
        if isinstance(expires, int | float):
            left = (expires - now_ms) / 1000
            facts.append(f"expires in {duration(left)}" if left > 0 else "EXPIRED")
        if head.get("hold"):
            facts.append("ON HOLD")
        if head.get("open") is not None:
            facts.append(f"version {head['open']} is being published")
        withdrawn = head.get("withdrawn")
        if isinstance(withdrawn, list) and withdrawn:
            facts.append(f"withdrawn {', '.join(map(str, withdrawn))}")
    else:
        facts.append("no head yet")
    yield ", ".join(facts)
    if run.get("problem"):
        yield f"  problem: {run['problem']}"
    rows = [_version(one) for one in _rows(run.get("versions"))]
    if rows:
        yield table(_VERSIONS, rows, indent="  ")


def _version(one: Mapping[str, Any]) -> tuple[object, ...]:
    shards, present = one.get("shards"), one.get("present")
    share = None
    if isinstance(shards, int) and isinstance(present, int):
        share = f"{100 * present // shards if shards else 100} %"
    state = one.get("damaged") or one.get("problem") or ("whole" if one.get("complete") else "part")
    manifest = one.get("manifest")
    return (
        one.get("version"),
        one.get("step"),
        _size(one.get("bytes")),
        shards,
        share,
        state,
        str(manifest)[:16] if manifest else None,
    )


def _parent(one: Mapping[str, Any]) -> tuple[object, ...]:
    speed = one.get("bytes_per_s")
    return (
        one.get("url"),
        one.get("live"),
        one.get("used"),
        one.get("depth"),
        str(one.get("node") or "")[:8],
        rate(speed, 1) if isinstance(speed, int | float) else None,
        one.get("error"),
    )


def _sibling(one: Mapping[str, Any]) -> tuple[object, ...]:
    return one.get("url"), one.get("live"), str(one.get("node") or "")[:8]


def _child(one: Mapping[str, Any]) -> tuple[object, ...]:
    seen = one.get("seen_s")
    return (
        one.get("address"),
        str(one.get("node") or "")[:8],
        one.get("run"),
        one.get("requests"),
        f"{duration(seen)} ago" if isinstance(seen, int | float) else None,
        one.get("agent"),
    )


def _scrub(scrub: Mapping[str, Any]) -> str:
    age = scrub.get("last_pass_s")
    last = f"{duration(age)} ago" if isinstance(age, int | float) else "not yet"
    return (
        f"scrub: {_size(scrub.get('bytes'))} read again, damaged {_text(scrub.get('damaged'))}, "
        f"last whole pass {last}"
    )


def _fill(one: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        one.get("run"),
        str(one.get("digest") or "")[:16],
        _size(one.get("bytes")),
        _size(one.get("total")),
        one.get("source"),
    )


def _section(
    title: str, headers: tuple[str, ...], rows: Iterable[tuple[object, ...]]
) -> Iterable[str]:
    listed = list(rows)
    if listed:
        yield ""
        yield title
        yield table(headers, listed, indent="  ")


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _size(value: Any) -> str | None:
    return size(value) if isinstance(value, int | float) else None


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
