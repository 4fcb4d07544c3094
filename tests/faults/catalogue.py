"""The faults that relay and worker survive: numbers for the marker ``fault``, and what each is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FAULTS: Final[Mapping[int, str]] = {
    1: "an upstream closes in the middle of a body of known length, ten readers attached",
    2: "the same with chunks that do not end, and with no length at all",
    3: "a relay is killed in the middle of a fill and started again",
    4: "files end early or in zeros after a power cut",
    5: "one bit flips, on disk or on the wire",
    6: "an upstream ignores a range or answers with another one",
    7: "an ETag changes within a transfer, is weak, or differs between replicas",
    8: "416 within a file, and at its end",
    9: "200 with a page instead of the blob, or with a coding added on the way",
    10: "404 for a shard that is not there yet",
    11: "storms of 500, 503 and 429, with and without Retry-After",
    12: "a byte a second, a stall, a connection that is never accepted",
    13: "a thousand slow readers and two hundred half-open requests",
    14: "two thousand requests for one cold blob, and the first one leaves",
    15: "a disk that is full or read-only, at each step",
    16: "a version is evicted while it is read",
    17: "a parent is gone for an hour, a network is parted, parents form a loop",
    18: "a relay that lies: older or frozen head, foreign shards, no end, huge documents, bad paths",
    19: "clocks that are wrong, heads that expire, keys that are rotated during a pull",
    20: "a worker killed at the last shard, its state damaged, two workers in one directory",
    21: "a relay is replaced under load",
    22: "two more versions while one is on its way; a publisher dies within one",
    23: "sizes: nothing, one byte, a shard, a byte more, over 4 GiB",
    24: "only 256 file descriptors",
    25: "a delta that is damaged, random or of something else",
}
