"""Routes, owners, places in the tree, retention: pure rules."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relay.config import Limits, RelayConfig, read_token, split_listen
from relay.handlers import find_route
from relay.listening import url_of
from relay.parents import Parents
from relay.routes import SourceRoute, Sources
from relay.siblings import Siblings, owner_of
from shardcast.errors import MalformedError, NetworkError, SourceStatusError, UsageError
from shardcast.protocol.limits import MAX_DEPTH
from shardcast.protocol.wire import parse_path
from shardcast.watcher import UpstreamState
from tests.clock import Clock

# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:8470", ("127.0.0.1", 8470)),
        ("[::]:0", ("::", 0)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("localhost:80", ("localhost", 80)),
    ],
)
def test_listen_addresses(text: str, found: tuple[str, int]) -> None:
    assert split_listen(text) == found


@pytest.mark.parametrize("text", ["", "8470", ":8470", "::1:80", "a:b", "a:70000", "a:-1", "a:"])
def test_bad_listen_addresses(text: str) -> None:
    with pytest.raises(UsageError):
        split_listen(text)


@pytest.mark.parametrize(
    ("host", "address", "url"),
    [
        ("0.0.0.0", ("0.0.0.0", 5), "http://127.0.0.1:5"),
        ("::", ("::", 5, 0, 0), "http://[::1]:5"),
        ("::1", ("::1", 5, 0, 0), "http://[::1]:5"),
        ("localhost", ("127.0.0.1", 5), "http://localhost:5"),
    ],
)
def test_the_url_that_is_printed_works_on_this_machine(host: str, address: Any, url: str) -> None:
    assert url_of(host, address) == url


@pytest.mark.parametrize(
    "options",
    [
        {"parents": ("ftp://x",)},
        {"parents": ("http://x",), "pubkeys": (bytes(32),), "first_use": True},
        {"pubkeys": (b"short",)},
        {"siblings": ("http://x",)},
        {"parents": ("http://x",), "publish_token_file": Path("t")},
        {"keep": 0},
        {"limit_rate_bytes_per_s": 1},
        {"limit_rate_client_bytes_per_s": 1},
        {"trusted_proxies": ("nonsense",)},
        {"limits": Limits(max_connections=0)},
        {"limits": Limits(max_connections_per_client=0)},
        {"limits": Limits(requests_per_s_per_client=0)},
        {"quota_bytes": 1},
        {"listen": "nonsense"},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RelayConfig(store=Path("s"), **options)


def test_a_run_that_is_none() -> None:
    with pytest.raises(MalformedError):
        RelayConfig(store=Path("s"), runs=("UPPER",))


def test_the_token_is_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("a-long-enough-token \nsecond line\n")
    assert read_token(path) == b"a-long-enough-token"
    for text in ("", "\n", "\u00e4" * 20):
        path.write_text(text)
        with pytest.raises(UsageError):
            read_token(path)
    with pytest.raises(UsageError):
        read_token(tmp_path / "absent")


# --- routes ---------------------------------------------------------------------------------------


def test_routes() -> None:
    digest = "ab" * 32
    route = find_route(f"/v1/policy/blobs/{digest}.bin")
    assert route is not None
    assert (route.endpoint, route.run, route.rest) == ("blobs", "policy", digest)
    for path in ("/", "", "/v1/runs/peers", "/v1/policy", "/v2/policy/head", "/v1/policy/head/x"):
        assert find_route(path) is None
    for path in ("/v1/A/head", "/v1/.x/peers", "/v1/x/blobs/y", "/v1//head"):
        with pytest.raises(MalformedError):
            find_route(path)


# --- siblings -------------------------------------------------------------------------------------


def test_ownership_is_even_and_moves_only_what_it_must() -> None:
    nodes = [f"{n:032x}" for n in range(4)]
    digests = [f"{n:064x}" for n in range(4000)]
    before = {digest: owner_of(digest, nodes) for digest in digests}
    counts = Counter(before.values())
    assert all(850 < counts[node] < 1150 for node in nodes)
    after = {digest: owner_of(digest, nodes[:3]) for digest in digests}
    assert all(after[d] == before[d] for d in digests if before[d] != nodes[3])
    assert owner_of(digests[0], list(reversed(nodes))) == before[digests[0]]


async def test_only_live_siblings_own_blobs() -> None:
    clock = Clock()
    me, other = "0" * 32, "1" * 32
    siblings = Siblings(["http://b/", "http://me"], me, clock)
    digests = [f"{n:064x}" for n in range(50)]
    assert {siblings.owner(d) for d in digests} == {None}
    siblings.saw("http://b", other, live=True)
    siblings.saw("http://me", me, live=True)  # its own URL in a list that all share
    assert {siblings.owner(d) for d in digests} == {None, "http://b"}
    siblings.suspect("http://b")
    assert {siblings.owner(d) for d in digests} == {None}
    clock.now += 60
    assert {siblings.owner(d) for d in digests} == {None, "http://b"}
    siblings.saw("http://b", None, live=False)
    assert {siblings.owner(d) for d in digests} == {None}


# --- parents --------------------------------------------------------------------------------------


class Watcher:
    """What Parents reads of a HeadWatcher."""

    def __init__(self, **states: UpstreamState) -> None:
        self.states = {f"http://{name}": state for name, state in states.items()}


def place(tmp_path: Path, **states: UpstreamState) -> Parents:
    urls = tuple(f"http://{name}" for name in states)
    parents = Parents(RelayConfig(store=tmp_path, parents=urls), "f" * 32)
    watcher: Any = Watcher(**states)
    parents.watchers["policy"] = watcher
    parents.update()
    return parents


def live(depth: int | None, node: str = "a" * 32) -> UpstreamState:
    return UpstreamState(live=True, depth=depth, node=node)


DEAD = UpstreamState(live=False, depth=0)


@pytest.mark.parametrize(
    ("states", "depth", "nearer"),
    [
        ({"a": live(0)}, 1, {"a"}),
        ({"a": live(0), "b": live(0)}, 1, {"a", "b"}),
        ({"a": live(0), "b": live(1)}, 1, {"a"}),
        ({"a": DEAD, "b": live(1)}, 2, {"b"}),
        ({"a": live(15)}, 16, {"a"}),
        ({"a": live(16)}, 16, set()),
        ({"a": DEAD}, 16, set()),
        ({"a": live(None)}, 16, set()),
        ({"a": live(0, "f" * 32)}, 16, set()),  # itself
    ],
)
def test_place_in_the_tree(
    tmp_path: Path, states: dict[str, UpstreamState], depth: int, nearer: set[str]
) -> None:
    parents = place(tmp_path, **states)
    assert parents.depth == depth
    assert parents.nearer == {f"http://{name}" for name in nearer}


def test_a_parent_that_is_reached_through_this_relay_leads_nowhere(tmp_path: Path) -> None:
    me, near, far = "f" * 32, "a" * 32, "b" * 32
    behind = UpstreamState(live=True, depth=2, node=far, path=(near, me, far))
    above = UpstreamState(live=True, depth=0, node=near, path=(near,))
    parents = place(tmp_path, behind=behind, above=above)
    assert (parents.depth, set(parents.nearer)) == (1, {"http://above"})
    assert parents.place.path == (near, me)
    parents = place(tmp_path, behind=behind, above=DEAD)
    assert (parents.depth, parents.nearer, parents.place.path) == (MAX_DEPTH, frozenset(), (me,))
    assert [parent["loop"] for parent in parents.report()] == [True, False]


@pytest.mark.parametrize(
    ("header", "path"),
    [
        (None, ()),
        ("", ()),
        ("ab" * 16, ("ab" * 16,)),
        (f"{'ab' * 16}, {'cd' * 16}", ("ab" * 16, "cd" * 16)),
        ("ab" * 16 + ",", ()),
        ("AB" * 16, ()),
        (",".join(["ab" * 32] * 16), ("ab" * 32,) * 16),
        (",".join(["ab" * 16] * 17), ()),
        ("a" * 100_000, ()),
    ],
)
def test_paths(header: str | None, path: tuple[str, ...]) -> None:
    assert parse_path(header) == path


def test_two_relays_that_are_each_others_parents_climb_until_neither_takes_the_other() -> None:
    """Without an origin the depths count up to the end and stay there."""
    depths = {"a": 1, "b": 1}  # an origin was here a moment ago
    places = {
        name: Parents(RelayConfig(store=Path("s"), parents=(f"http://{other}",)), name * 32)
        for name, other in (("a", "b"), ("b", "a"))
    }
    for _ in range(40):
        for name, other in (("a", "b"), ("b", "a")):
            watcher: Any = Watcher(**{other: live(depths[other], other * 32)})
            places[name].watchers["policy"] = watcher
            places[name].update()
            depths[name] = places[name].depth
    assert depths == {"a": MAX_DEPTH, "b": MAX_DEPTH}
    assert not places["a"].nearer
    assert not places["b"].nearer


def sources(parents: Parents, clock: Clock, *urls: str) -> Sources:
    config = RelayConfig(store=Path("s"), parents=urls)
    return Sources(config, "f" * 32, parents, None, rng=random.Random(1), clock=clock)


def test_a_route_asks_near_parents_then_the_others_for_what_they_have(tmp_path: Path) -> None:
    clock = Clock()
    parents = place(tmp_path, a=live(0), b=live(3))
    route = sources(parents, clock, "http://a", "http://b").route(
        "policy", "0" * 64, document=False, for_sibling=False
    )
    first = route.next(0)
    assert (first.source.url, first.lateral) == ("http://a", False)  # type: ignore[union-attr]
    route.failed(first, NetworkError("gone"))  # type: ignore[arg-type]
    second = route.next(0)
    assert (second.source.url, second.lateral) == ("http://b", True)  # type: ignore[union-attr]
    route.failed(second, SourceStatusError("no", status=503))  # type: ignore[arg-type]
    assert isinstance(route.next(0), float)


def test_a_fill_for_a_sibling_never_goes_aside(tmp_path: Path) -> None:
    clock = Clock()
    parents = place(tmp_path, a=live(16))
    route = sources(parents, clock, "http://a").route(
        "policy", "0" * 64, document=False, for_sibling=True
    )
    tried = [route.next(0) for _ in range(3)]
    assert all(choice is None or isinstance(choice, float) for choice in tried)
    assert tried[-1] is None


def test_every_route_ends(tmp_path: Path) -> None:
    clock = Clock()
    parents = place(tmp_path, a=live(0))
    route = sources(parents, clock, "http://a").route(
        "policy", "0" * 64, document=False, for_sibling=False
    )
    asked = 0
    for _ in range(100):
        choice = route.next(0)
        if choice is None:
            break
        if isinstance(choice, float):
            clock.now += choice
        else:
            asked += 1
            route.failed(choice, SourceStatusError("not yet", status=404))
    else:
        pytest.fail("it never gave up")
    assert 2 <= asked <= 10


def test_a_banned_parent_is_not_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    parents = place(tmp_path, a=live(0))
    found = sources(parents, clock, "http://a")
    route = found.route("policy", "0" * 64, document=False, for_sibling=False)
    choice = route.next(0)
    route.wrong(choice, stitched=False)  # type: ignore[arg-type]
    assert route.next(0) is None
    again = found.route("policy", "1" * 64, document=False, for_sibling=False)
    assert again.next(0) is None
    other_run = found.route("other", "1" * 64, document=False, for_sibling=False)
    assert other_run.next(0) is not None
    clock.now += 10_000
    assert found.route("policy", "1" * 64, document=False, for_sibling=False).next(0) is not None


# --- the owner among siblings ---------------------------------------------------------------------


def with_sibling(tmp_path: Path, clock: Clock) -> tuple[Sources, str]:
    """A relay with one parent and one live sibling, and a blob that the sibling owns."""
    parents = place(tmp_path, a=live(0))
    me, other, url = "f" * 32, "a" * 32, "http://sibling"
    siblings = Siblings([url], me, clock)
    siblings.saw(url, other, live=True)
    config = RelayConfig(store=Path("s"), parents=("http://a",), siblings=(url,))
    digest = next(f"{n:064x}" for n in range(100) if owner_of(f"{n:064x}", [me, other]) == other)
    return Sources(config, me, parents, siblings, rng=random.Random(1), clock=clock), digest


def asked(route: SourceRoute, clock: Clock, error: SourceStatusError) -> list[str]:
    """Play a route until it comes to the parent; everyone before answers with an error."""
    urls = []
    for _ in range(100):
        choice = route.next(0)
        assert choice is not None
        if isinstance(choice, float):
            clock.now += choice
            continue
        urls.append(choice.source.url)
        if urls[-1] == "http://a":
            return urls
        route.failed(choice, error)
    raise AssertionError("it never came to the parent")


def test_an_owner_that_does_not_know_the_blob_yet_is_asked_again_for_a_moment(
    tmp_path: Path,
) -> None:
    clock = Clock()
    found, digest = with_sibling(tmp_path, clock)
    began = clock.now
    unknown = SourceStatusError("what?", status=404)
    route = found.route("policy", digest, document=False, for_sibling=False)
    assert route.lateral
    assert asked(route, clock, unknown).count("http://sibling") > 5
    assert 1.0 < clock.now - began < 2.0
    # It had its chance: what comes after costs nothing, until it is asked again.
    route = found.route("policy", digest, document=False, for_sibling=False)
    assert not route.lateral
    assert asked(route, clock, unknown) == ["http://a"]
    assert found.route("other", digest, document=False, for_sibling=False).lateral
    clock.now += 60
    assert found.route("policy", digest, document=False, for_sibling=False).lateral


def test_an_owner_that_is_busy_is_not_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    found, digest = with_sibling(tmp_path, clock)
    began = clock.now
    route = found.route("policy", digest, document=False, for_sibling=False)
    busy = SourceStatusError("busy", status=503)
    assert asked(route, clock, busy) == ["http://sibling", "http://a"]
    assert clock.now == began


# --- bans ----------------------------------------------------------------------------------------


def test_stitched_bytes_ban_nobody(tmp_path: Path) -> None:
    clock = Clock()
    parents = place(tmp_path, a=live(0))
    route = sources(parents, clock, "http://a").route(
        "policy", "0" * 64, document=False, for_sibling=False
    )
    choice = route.next(0)
    route.wrong(choice, stitched=True)  # type: ignore[arg-type]
    pause = route.next(0)
    assert isinstance(pause, float)
    clock.now += pause
    assert route.next(0) is not None
