"""What people read of a relay's status, also of one that tells little or nonsense."""

from typing import Any

import pytest

from shardcast.cli.status import lines
from tests.unit.cli.conftest import Cli

FULL: dict[str, Any] = {
    "software": "shardcast/1.2.3",
    "node": "0123456789abcdef" * 2,
    "role": "relay",
    "depth": 2,
    "uptime_s": 3700.5,
    "ready": True,
    "draining": False,
    "connections": 12,
    "runs": {
        "policy": {
            "problem": None,
            "head": {
                "version": 7,
                "expires_at": 10_000_000,
                "open": 8,
                "hold": True,
                "withdrawn": [5],
            },
            "complete": 6,
            "versions": [
                {"version": 7, "step": 70, "bytes": 62_000_000_000, "shards": 4000,
                 "present": 1999, "complete": False, "manifest": "ab" * 32},
                {"version": 6, "step": None, "bytes": 1000, "shards": 1, "present": 1,
                 "complete": True, "manifest": "cd" * 32},
            ],
        },
        "new": {"problem": "no key is known", "head": None, "versions": []},
    },
    "parents": [
        {"url": "http://a", "live": True, "used": True, "depth": 1, "node": "f" * 32,
         "bytes_per_s": 74e6, "error": None},
        {"url": "http://b", "live": False, "used": False, "depth": None, "node": None,
         "bytes_per_s": None, "error": "refused"},
    ],
    "siblings": [{"url": "http://c", "live": True, "node": "e" * 32}],
    "children": [{"address": "10.0.0.1", "node": None, "run": "policy", "requests": 99,
                  "seen_s": 1.5, "agent": "curl/8"}],
    "fills": [{"run": "policy", "digest": "9" * 64, "bytes": 10, "total": 2000,
               "source": "http://a"}],
}  # fmt: skip


def test_everything_worth_knowing_is_shown() -> None:
    text = "\n".join(lines(FULL, "http://here/", 1_000_000))
    for said in (
        (
            "http://here: relay, node 01234567, depth 2, ready, up 1 h 01 m, 12 connections "
            "(shardcast/1.2.3)"
        ),
        (
            "run policy, newest 7, whole here 6, expires in 2 h 30 m, ON HOLD, version 8 is being "
            "published, withdrawn 5"
        ),
        "49 %  part",
        "62.0 GB",
        "run new, no head yet",
        "problem: no key is known",
        "74.0 MB/s",
        "refused",
        "http://c",
        "10.0.0.1",
        "1.5 s ago",
        "9999999999999999",
    ):
        assert said in text


def test_an_expired_head_and_a_draining_relay_are_shouted() -> None:
    text = "\n".join(lines({**FULL, "draining": True}, "http://here", 20_000_000))
    assert "draining" in text
    assert "EXPIRED" in text


@pytest.mark.parametrize("value", [None, 3, "x", [], [1], {"x": 1}, {"policy": 4}])
def test_nonsense_is_left_out(value: object) -> None:
    for key in FULL:
        assert list(lines({**FULL, key: value}, "http://here", 0))
    assert list(lines({}, "http://here", 0)) == ["http://here: relay, node -, depth -, ready (-)"]


def test_an_unreachable_relay_is_exit_13(cli: Cli) -> None:
    ran = cli("status", "http://127.0.0.1:1")
    assert ran.code == 13
    assert "http://127.0.0.1:1" in ran.stderr
    assert cli("status", "nonsense").code == 2
