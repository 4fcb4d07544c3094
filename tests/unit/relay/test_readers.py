"""Who fetches which version, in virtual time; and the lease that a publisher respects."""

from pathlib import Path

from relay.readers import Leases, Readers
from shardcast.store.store import Store
from tests.clock import Clock
from tests.contract.made import RUN, noise, publish


def test_a_version_is_being_fetched_for_a_while_after_it_was_asked_for() -> None:
    clock = Clock(100.0)
    readers = Readers(clock, 60.0)
    readers.saw(1, None)
    clock.now += 40
    readers.saw(2, None)
    assert readers.versions() == {1, 2}
    clock.now += 20
    assert readers.versions() == {2}
    readers.saw(2, None)  # a long answer has just ended
    clock.now += 59
    assert readers.versions() == {2}
    clock.now += 1
    assert readers.versions() == set()


def test_what_is_being_fetched_is_not_removed_by_another_process(tmp_path: Path) -> None:
    publish(tmp_path / "s", tmp_path / "c", {"a": noise(1000)})
    ours, publisher = Store(tmp_path / "s"), Store(tmp_path / "s")
    clock = Clock(100.0)
    readers = Readers(clock, 60.0, leases=Leases(8))
    stored = ours.run(RUN).stored(1)
    assert stored is not None
    readers.saw(1, stored)
    readers.saw(1, stored)
    assert not publisher.run(RUN).evict(1)
    clock.now += 60
    readers.versions()
    assert publisher.run(RUN).evict(1)
    readers.saw(1, stored)  # too late: nothing is held, and nothing breaks
    readers.close()
    ours.close()
    publisher.close()


def test_without_a_lease_nothing_is_held(tmp_path: Path) -> None:
    publish(tmp_path / "s", tmp_path / "c", {"a": noise(1000)})
    ours = Store(tmp_path / "s")
    stored = ours.run(RUN).stored(1)
    Readers(Clock(100.0)).saw(1, stored)
    assert ours.run(RUN).evict(1)
    ours.close()


def test_closing_gives_leases_back(tmp_path: Path) -> None:
    publish(tmp_path / "s", tmp_path / "c", {"a": noise(1000)})
    ours = Store(tmp_path / "s")
    readers = Readers(Clock(100.0), leases=Leases(8))
    readers.saw(1, ours.run(RUN).stored(1))
    assert not ours.run(RUN).evict(1)
    readers.close()
    assert ours.run(RUN).evict(1)
    ours.close()


def test_leases_are_bounded_over_all_runs(tmp_path: Path) -> None:
    """Each takes a descriptor: of those held for long, the oldest goes."""
    ours = Store(tmp_path / "s")
    leases, stored, everyone = Leases(2), [], []
    for name in ("a", "b", "c"):
        publish(tmp_path / "s", tmp_path / "c", {"a": noise(1000)}, run=name)
        version = ours.run(name).stored(1)
        assert version is not None
        stored.append(version)
        everyone.append(Readers(Clock(100.0), leases=leases))
    for readers, version in zip(everyone, stored, strict=True):
        readers.saw(1, version)
    assert [version.leased for version in stored] == [False, True, True]
    everyone[1].saw(1, stored[1])  # the latest again
    everyone[0].saw(1, stored[0])
    assert [version.leased for version in stored] == [True, True, False]
    for readers in everyone:
        readers.close()
    assert not any(version.leased for version in stored)
    ours.close()
