"""Trees of relays in this process: rings, siblings, workers at the end; and what is asked of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from relay.config import Prefetch
from shardcast.demo.processes import free_ports
from shardcast.protocol.digest import digest_of
from shardcast.store.stored import Durability
from shardcast.worker import Worker
from tests.contract.made import RUN, MadeVersion, signer
from tests.contract.relays import config, path_of, running
from tests.contract.wire_client import Answer, http
from tests.faults.world import PATIENT

DEADLINE_S = 25.0
"""Less than the patience of a worker that waits for the first byte (30 s)."""


async def depth_of(url: str) -> int:
    """How far a relay says it is from the origin."""
    return int((await http(url, "/healthz"))["Shardcast-Depth"])


async def count_of(url: str, name: str, **labels: str) -> float:
    """The sum of a relay's counter over all series with these labels."""
    text = (await http(url, "/metrics")).body.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def get(url: str, digest: str, run: str = RUN, **headers: str) -> Answer:
    """Ask for a blob, within the deadline; what comes whole is right."""
    async with asyncio.timeout(DEADLINE_S):
        answer = await http(
            url, path_of(digest, run), headers={n.replace("_", "-"): v for n, v in headers.items()}
        )
    assert answer.status in (200, 206, 404, 503), answer
    if answer.status == 200 and answer.whole:
        assert digest_of(answer.body) == digest
    return answer


async def statuses(url: str, digests: Iterable[str], run: str = RUN) -> Counter[int]:
    """Ask for many blobs at once; count the answers, 0 for one that was cut off."""
    answers = await asyncio.gather(*(get(url, digest, run) for digest in digests))
    return Counter(answer.status if answer.whole else 0 for answer in answers)


async def has_all(url: str, version: MadeVersion, run: str = RUN) -> bool:
    """Whether a relay gives every shard of a version, without a single complaint."""
    found = await statuses(url, dict.fromkeys(version.shards), run)
    return set(found) == {200}


async def pulled(out: Path, version: MadeVersion, *urls: str, **options: Any) -> None:
    """A worker pulls the newest version, which is ``version``, and has its files."""
    options = {"config": PATIENT, "durability": Durability.NONE, **options}
    run = options.pop("run", RUN)
    worker = Worker(out, run, urls, keys=[signer(1).public_key], **options)
    update = await worker.apull()
    assert update.version == version.ref.version
    for path, data in version.files.items():
        assert (update.path / path).read_bytes() == data


@dataclass(frozen=True)
class Node:
    """One relay of a tree to be: its parents and siblings are names of other nodes, or URLs."""

    name: str
    parents: Sequence[str]
    siblings: Sequence[str] = ()


@asynccontextmanager
async def tree(root: Path, *nodes: Node, **options: Any) -> AsyncIterator[dict[str, str]]:
    """Run relays whose URLs are known before they start; yield the URLs by name."""
    options.setdefault("prefetch", Prefetch.ALL)
    ports = dict(zip((n.name for n in nodes), free_ports(len(nodes)), strict=True))
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}

    def resolved(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(urls.get(name, name) for name in names)

    async with AsyncExitStack() as stack:
        for node in nodes:
            settings = config(
                root / node.name,
                *resolved(node.parents),
                siblings=resolved(node.siblings),
                listen=f"127.0.0.1:{ports[node.name]}",
                **options,
            )
            await stack.enter_async_context(running(settings))
        yield urls
