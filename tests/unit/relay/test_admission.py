"""Who is let in: clients, quotas, request rates, descriptors. Pure rules."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.admission import (
    MOST_REMEMBERED,
    Admission,
    Quota,
    RequestRate,
    client_of,
    forwarded_client,
)
from relay.config import Limits
from relay.descriptors import share_out, telling_shortage
from tests.clock import Clock


def admission(
    limits: Limits | None = None, *, descriptors: int = 1 << 20, **options: object
) -> Admission:
    trusted = options.get("trusted", ())
    assert isinstance(trusted, tuple)
    return Admission(limits or Limits(), share_out(descriptors), Clock(), trusted)


# --- who is a client ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("192.0.2.7", 5), "192.0.2.7"),
        (("::ffff:192.0.2.7", 5, 0, 0), "192.0.2.7"),  # IPv4 on a dual-stack listener
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:3::1", 5, 0, 0), "2001:db8:1:3::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (("::1", 5, 0, 0), "::/64"),
        (None, ""),
        ((), ""),
        (("a socket's path", 1), "a socket's path"),
    ],
)
def test_a_client_is_an_address_or_a_network_of_64_bits(peer: object, client: str) -> None:
    assert client_of(peer) == client


@pytest.mark.parametrize(
    ("values", "client"),
    [
        (["192.0.2.7"], "192.0.2.7"),
        (["6.6.6.6, 192.0.2.7"], "192.0.2.7"),  # what the client wrote itself is not believed
        (["6.6.6.6", "192.0.2.7"], "192.0.2.7"),
        (["192.0.2.7, 10.1.1.1, 10.2.2.2"], "192.0.2.7"),  # two trusted proxies behind each other
        (["192.0.2.7", "10.1.1.1,10.2.2.2"], "192.0.2.7"),
        (["10.1.1.1"], None),
        (["2001:db8:1:2::9"], "2001:db8:1:2::/64"),
        (["[2001:db8:1:2::9]"], "2001:db8:1:2::/64"),
        (["::ffff:10.1.1.1"], None),
        (["192.0.2.7, nonsense"], None),
        ([""], None),
        ([], None),
        (["192.0.2.7" + ", 10.1.1.1" * 100], None),
    ],
)
def test_a_trusted_proxy_names_the_client(values: list[str], client: str | None) -> None:
    import ipaddress

    assert forwarded_client(values, [ipaddress.ip_network("10.0.0.0/8")]) == client


def test_only_trusted_proxies_are_proxies() -> None:
    some = admission(trusted=("10.0.0.1", "2001:db8:9::/48"))
    assert some.is_proxy("10.0.0.1")
    assert some.is_proxy(client_of(("2001:db8:9:1::5", 1, 0, 0)))
    assert not some.is_proxy("10.0.0.2")
    assert not some.is_proxy("")
    assert not admission().is_proxy("10.0.0.1")
    assert some.behind("10.0.0.1", ["192.0.2.7"]) == "192.0.2.7"
    assert some.behind("10.0.0.1", []) == "10.0.0.1"


# --- places -------------------------------------------------------------------------------------


def test_places_are_counted_in_all_and_by_client() -> None:
    quota = Quota(4, 2)
    assert [quota.enter("a"), quota.enter("a"), quota.enter("a")] == [True, True, False]
    assert [quota.enter(client) for client in "bcd"] == [True, True, False]
    assert (quota.taken, quota.clients, quota.held("a"), quota.held("d")) == (4, 3, 2, 0)
    quota.leave("a")
    assert quota.enter("d")
    for client in "abcd":
        quota.leave(client)
    assert (quota.taken, quota.clients) == (0, 0)


@pytest.mark.parametrize("greedy", [1, 2, 5, 20])
def test_greedy_clients_leave_room_for_others(greedy: int) -> None:
    """Dynamic thresholds: k of them hold 2 / (2 k + 1) each, and half a share stays free."""
    quota = Quota(1200, 1200)
    names = [f"greedy {number}" for number in range(greedy)]
    for _ in range(1200):
        for name in names:
            quota.enter(name)
    share = 2 * 1200 / (2 * greedy + 1)
    assert all(abs(quota.held(name) - share) <= 2 for name in names)
    assert quota.most - quota.taken >= share / 2 - 2
    assert quota.enter("another")


def test_who_stands_for_many_is_bounded_by_the_total_alone() -> None:
    quota = Quota(10, 2)
    assert [quota.enter("proxy", limited=False) for _ in range(11)] == [True] * 10 + [False]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=200))
@settings(max_examples=100)
def test_a_quota_never_miscounts(steps: list[tuple[str, bool]]) -> None:
    quota, held = Quota(7, 3), dict.fromkeys("abcdef", 0)
    for client, coming in steps:
        if coming:
            held[client] += quota.enter(client)
        elif held[client]:
            quota.leave(client)
            held[client] -= 1
        assert quota.taken == sum(held.values()) <= 7
        assert max(held.values()) <= 3
        assert quota.clients == sum(1 for count in held.values() if count)


def test_only_so_many_are_refused_politely() -> None:
    some = admission(Limits(refused_connections=1))
    assert [some.refuse(), some.refuse()] == [True, False]
    some.refused_left()
    assert some.refuse()


# --- descriptors --------------------------------------------------------------------------------


@pytest.mark.parametrize("descriptors", [64, 128, 256, 512, 1024, 1 << 16, 1 << 20])
def test_descriptors_are_enough_for_all_at_once(descriptors: int) -> None:
    budget = share_out(descriptors)
    taken = (
        2 * budget.connections  # each, and a file while it is sent
        + budget.refused
        + budget.polls
        + budget.leases
        + 2 * 3 * min(budget.fills, Limits().fill_threads)
        + min(512, max(8, descriptors // 8))  # idle directories
        + 24
    )
    assert budget.connections >= 16
    assert budget.refused >= 2
    assert budget.fills >= 2
    if descriptors >= 256:
        assert taken <= descriptors
        assert budget.connections >= descriptors // 8


def test_few_descriptors_bound_connections_and_waiting() -> None:
    some = admission(descriptors=256)
    assert some.connections.most == share_out(256).connections < 100
    assert some.waits.most == some.connections.most // 2  # the others may fetch meanwhile
    while some.connections.enter("greedy"):
        pass
    assert some.connections.enter("another")


# --- request rates ------------------------------------------------------------------------------


def test_a_burst_then_the_rate() -> None:
    clock = Clock()
    rate = RequestRate(10, 5, clock)
    assert [rate.ask("a") > 0 for _ in range(6)] == [False] * 5 + [True]
    assert rate.ask("a") == pytest.approx(0.1)
    assert rate.ask("b") == 0  # another client has its own
    clock.now += 0.1001
    assert [rate.ask("a") > 0 for _ in range(2)] == [False, True]
    clock.now += 100
    assert [rate.ask("a") > 0 for _ in range(6)] == [False] * 5 + [True]


@given(st.lists(st.floats(0, 0.5), min_size=50, max_size=200), st.integers(1, 20))
@settings(max_examples=50)
def test_never_more_than_burst_and_rate(pauses: list[float], burst: int) -> None:
    clock = Clock()
    rate, start, allowed = RequestRate(20, burst, clock), clock.now, 0
    for pause in pauses:
        clock.now += pause
        allowed += rate.ask("a") == 0
        assert allowed <= burst + (clock.now - start) * 20 + 1e-6


def test_the_wait_that_is_named_is_long_enough() -> None:
    clock, rng = Clock(), random.Random(1)
    rate = RequestRate(7, 3, clock)
    for _ in range(200):
        wait = rate.ask("a")
        if wait:
            clock.now += wait + 1e-9
            assert rate.ask("a") == 0
        clock.now += rng.uniform(0, 0.2)


def test_a_bounded_number_of_clients_is_remembered() -> None:
    rate = RequestRate(0.001, 1, Clock())
    for number in range(MOST_REMEMBERED + 500):
        assert rate.ask(f"client {number}") == 0
    assert rate.remembered == MOST_REMEMBERED
    assert rate.ask(f"client {MOST_REMEMBERED + 499}") > 0
    assert rate.ask("client 0") == 0  # long forgotten


async def test_a_shortage_is_told_once_a_minute_and_other_trouble_as_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, clock, others = asyncio.get_running_loop(), Clock(), list[str]()
    loop.set_exception_handler(lambda _loop, context: others.append(context["message"]))
    short = {"message": "socket.accept() out of system resource", "exception": OSError(24, "many")}
    with telling_shortage(loop, clock):
        for now in (0.0, 1.0, 59.0, 60.0):
            clock.now = now
            loop.call_exception_handler(short)
        loop.call_exception_handler({"message": "a task broke", "exception": ValueError()})
        loop.call_exception_handler({**short, "exception": OSError(5, "I/O")})
    loop.call_exception_handler(short)
    loop.set_exception_handler(None)
    assert caplog.text.count("out of file descriptors") == 2
    assert others == ["a task broke", short["message"], short["message"]]
