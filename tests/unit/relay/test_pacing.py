"""Who may send next: total and per-client rates, fair to clients. Simulated time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest

from relay.pacing import (
    FIRST_PIECE_BYTES,
    LEAST_PIECE_BYTES,
    MOST_IDLE,
    FairQueue,
    Pacer,
    Turn,
)
from shardcast.protocol.limits import KIB, MIB


class Simulation:
    """Connections that always want to send their next piece, on a queue."""

    def __init__(self, total: int | None, per_client: int | None) -> None:
        self.now = 0.0
        self.queue = FairQueue(total, per_client, self.now)
        self.sent: Counter[str] = Counter()

    def connect(self, client: str, piece: int, times: int = 1 << 30) -> None:
        def granted() -> None:
            self.sent[client] += piece
            if times > 1:
                self.connect(client, piece, times - 1)

        self.queue.add(client, Turn(piece, granted), self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = self.queue.grant(self.now)
            if due is None or due > end:
                break
            self.now = max(due, self.now)
        self.now = end


def run(
    total: int | None,
    per_client: int | None,
    connections: Mapping[str, int],
    seconds: float = 10.0,
    piece: int = 16 * KIB,
) -> Counter[str]:
    simulation = Simulation(total, per_client)
    for client, count in connections.items():
        for _ in range(count):
            simulation.connect(client, piece)
    simulation.run(seconds)
    return simulation.sent


def test_the_total_rate_is_kept() -> None:
    sent = run(MIB, None, {"a": 1, "b": 7})
    assert sum(sent.values()) == pytest.approx(10 * MIB, rel=0.02)


def test_clients_share_the_total_and_not_connections() -> None:
    sent = run(MIB, None, {"greedy": 100, "modest": 1, "another": 2})
    for client in sent:
        assert sent[client] == pytest.approx(10 * MIB / 3, rel=0.02)


def test_pieces_of_other_sizes_change_nothing() -> None:
    simulation = Simulation(MIB, None)
    simulation.connect("large", 256 * KIB)
    simulation.connect("small", 16 * KIB)
    simulation.run(60)
    assert simulation.sent["large"] == pytest.approx(simulation.sent["small"], rel=0.02)


def test_each_client_has_its_own_rate() -> None:
    sent = run(None, MIB, {"a": 1, "b": 50})
    assert sent["a"] == pytest.approx(10 * MIB, rel=0.02)
    assert sent["b"] == pytest.approx(10 * MIB, rel=0.02)


def test_what_limited_clients_leave_goes_to_nobody_else_than_allowed() -> None:
    sent = run(10 * MIB, MIB, {"a": 1, "b": 1})
    assert sum(sent.values()) == pytest.approx(20 * MIB, rel=0.02)


def test_a_newcomer_gets_its_share_at_once_and_owes_nothing_for_the_past() -> None:
    simulation = Simulation(MIB, None)
    for _ in range(10):
        simulation.connect("old", 16 * KIB)
    simulation.run(100)
    simulation.connect("new", 16 * KIB)
    before = simulation.sent["old"]
    simulation.run(10)
    assert simulation.sent["new"] == pytest.approx(5 * MIB, rel=0.02)
    assert simulation.sent["old"] - before == pytest.approx(5 * MIB, rel=0.02)


def test_a_rest_saves_nothing_up() -> None:
    simulation = Simulation(MIB, None)
    simulation.connect("rested", 16 * KIB, 1)
    simulation.run(1)
    for client in ("rested", "busy"):
        simulation.connect(client, 16 * KIB)
    simulation.run(1000)
    assert simulation.sent["rested"] == pytest.approx(simulation.sent["busy"], rel=0.01)
    simulation = Simulation(MIB, None)
    simulation.run(1000)
    simulation.connect("a", 16 * KIB)
    simulation.run(1)
    assert simulation.sent["a"] <= 1.1 * MIB


def test_one_large_debt_does_not_hold_up_others() -> None:
    simulation = Simulation(None, MIB)
    simulation.connect("debtor", 100 * MIB, 2)
    simulation.connect("other", 16 * KIB)
    simulation.run(10)
    assert simulation.sent["debtor"] == 100 * MIB  # the first; the second waits 100 s
    assert simulation.sent["other"] == pytest.approx(10 * MIB, rel=0.02)


def test_clients_that_have_paid_are_forgotten() -> None:
    simulation = Simulation(None, MIB)
    for number in range(5000):
        simulation.connect(f"client {number}", 16 * KIB, 1)
        simulation.run(0.1)
    assert simulation.queue.remembered <= 2
    for number in range(MOST_IDLE + 100):  # nobody has time to pay
        simulation.connect(f"debtor {number}", MIB, 1)
        simulation.run(0)
    assert simulation.queue.remembered <= MOST_IDLE + 1


def test_whoever_gave_up_is_passed_over() -> None:
    queue, granted = FairQueue(MIB, None, 0.0), []
    turns = [Turn(MIB, lambda n=n: granted.append(n)) for n in range(3)]  # type: ignore[misc]
    for turn in turns:
        queue.add("a", turn, 0.0)
    turns[1].given_up = True
    now: float | None = 0.0
    while now is not None:
        now = queue.grant(now)
        if now is not None and now > 100:
            raise AssertionError("it never ends")
    assert granted == [0, 2]


# --- on a loop ----------------------------------------------------------------------------------


async def test_the_pacer_wakes_takers_in_turn() -> None:
    pacer = Pacer(64 * MIB, None, asyncio.get_running_loop())
    order: list[str] = []

    async def take(client: str) -> None:
        await pacer.take(client, MIB)
        order.append(client)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(take("greedy"))
        group.create_task(take("modest"))
    assert order.index("modest") <= 1  # though it came last
    assert len(order) == 6


async def test_a_cancelled_taker_costs_nothing() -> None:
    pacer = Pacer(64 * KIB, None, asyncio.get_running_loop())
    await pacer.take("a", 16 * KIB)
    hopeless = [asyncio.create_task(pacer.take("a", 1 << 40)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in hopeless:
        task.cancel()
    await asyncio.gather(*hopeless, return_exceptions=True)
    async with asyncio.timeout(20):
        await pacer.take("a", 16 * KIB)


async def test_pieces_grow_with_what_the_reader_takes() -> None:
    pacer = Pacer(1000 * MIB, None, asyncio.get_running_loop())
    stream = pacer.stream("a")
    assert stream.piece_bytes == FIRST_PIECE_BYTES
    sizes = []
    for _ in range(8):
        stream.sent(stream.piece_bytes, stream.piece_bytes / (500 * MIB))
        sizes.append(stream.piece_bytes)
    assert sizes == [FIRST_PIECE_BYTES * 2**n for n in range(1, 7)] + [4 * MIB] * 2
    for _ in range(3):
        stream.sent(stream.piece_bytes, stream.piece_bytes / 1000)  # 1 kB/s
    assert stream.piece_bytes == LEAST_PIECE_BYTES


async def test_there_is_no_pacer_without_a_limit() -> None:
    loop = asyncio.get_running_loop()
    assert Pacer.limiting(None, None, loop) is None
    assert Pacer.limiting(None, MIB, loop) is not None
