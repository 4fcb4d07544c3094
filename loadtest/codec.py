"""The codec alone: bytes per changed element, and its speed beside BLAKE3 of the same bytes.

On the 33 real steps of data/minilm-steps, where that directory lies beside the repository, else on
made-up ones (`training.py`); the report says which. Times are CPU seconds of the thread, in turn with
BLAKE3, in frames of 16 MiB as the publisher makes them, decoded into a buffer that is used again.
"""

from __future__ import annotations

import ctypes
import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3

from loadtest.scenario import MB, Check, Report, Settings, Size, main
from loadtest.training import Training
from shardcast.codec.decode import decode_frame_into
from shardcast.codec.encode import Piece, encode_frame
from shardcast.codec.frame import MAX_FRAME_BYTES
from shardcast.codec.spans import (
    OldFile,
    file_spans,
    header_bytes,
    pieces_between,
    read_tensors,
)
from shardcast.errors import MalformedError
from shardcast.protocol.delta import DeltaBlob, DeltaPart, encode_delta_part
from shardcast.protocol.digest import digest_of

BYTES_PER_CHANGE: Final = 0.98
ENCODE_RATIO: Final = 2.0
DECODE_RATIO: Final = 1.0
VERIFY_RATIO: Final = 2.2
ALONE_RATIO: Final = 0.70
ALONE_GB_S: Final = 1.0
PEAK_MB: Final = 256

REAL: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "minilm-steps"
REAL_STEPS: Final = 33
MADE_BYTES: Final = 45 * MB


@dataclass(frozen=True)
class Memory:
    """A base of one file."""

    data: bytes

    def range(self, file: int, offset: int, length: int) -> memoryview:
        """Return bytes of it."""
        if file or offset + length > len(self.data):
            raise MalformedError(f"{length} bytes at {offset} of file {file} are not there")
        return memoryview(self.data)[offset : offset + length]


def real_steps(count: int) -> Iterator[bytes]:
    """Yield the versions of minilm-steps, the first one and one for each of ``count`` steps."""
    raw = (REAL / "base.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    steps = np.load(REAL / "steps.npz")
    spans = [header[str(name)]["data_offsets"] for name in steps["names"]]
    body = np.frombuffer(raw, np.uint8)[8 + length :].copy()
    flat = np.concatenate([body[a:b].view(np.uint16) for a, b in spans])
    yield raw
    for step in range(1, count + 1):
        index = np.cumsum(steps[f"gap{step:02d}"].astype(np.int64)) - 1
        flat[index] = steps[f"bits{step:02d}"]
        at = 0
        for a, b in spans:
            body[a:b] = flat[at : at + (b - a) // 2].view(np.uint8)
            at += (b - a) // 2
        yield raw[: 8 + length] + body.tobytes()


def made_steps(count: int, size: int) -> Iterator[bytes]:
    """Yield versions of a made-up run."""
    training = Training(size)
    yield training.safetensors()
    for _ in range(count):
        training.step()
        yield training.safetensors()


Job = tuple[memoryview, list[Piece], Memory]


def jobs(new: bytes, old: bytes | None) -> list[Job]:
    """Return what the frames of a version are made of."""
    here = read_tensors(new[: header_bytes(new[:8])], 0, len(new))
    base, named = None, {}
    if old is not None:
        base = OldFile(0, len(old))
        named = {t.name: t for t in read_tensors(old[: header_bytes(old[:8])], 0, len(old))}
    spans = file_spans(len(new), here, base, named)
    return [
        (
            memoryview(new)[at : at + MAX_FRAME_BYTES],
            list(pieces_between(spans, at, min(at + MAX_FRAME_BYTES, len(new)))),
            Memory(old or b""),
        )
        for at in range(0, len(new), MAX_FRAME_BYTES)
    ]


def document_bytes(frames: Sequence[bytes]) -> int:
    """Return what a delta part that lists these frames in one blob takes."""
    blob = b"".join(frames)
    listed = [(32, len(frame)) for frame in frames]
    part = DeltaPart(
        layout=digest_of(b"layout"),
        base=digest_of(b"base"),
        codec="scf/1",
        first_shard=0,
        blobs=[DeltaBlob(digest=digest_of(blob), bytes=len(blob), frames=listed)],
    )
    return len(encode_delta_part(part))


def changed_elements(new: bytes, old: bytes) -> int:
    """Return how many bf16 elements differ."""
    start = header_bytes(new[:8]) or 0
    return int(
        (np.frombuffer(new, "<u2", offset=start) != np.frombuffer(old, "<u2", offset=start)).sum()
    )


def encode(job: Job) -> bytes:
    """Return a frame."""
    return encode_frame(*job)


class Bench:
    """Frames of one version, the work on them, and how long it took."""

    def __init__(self, new: bytes, old: bytes | None) -> None:
        self.jobs = jobs(new, old)
        self.frames = [encode(job) for job in self.jobs]
        self.out = memoryview(bytearray(MAX_FRAME_BYTES))
        self.seconds: dict[str, list[float]] = {}
        self.size = len(new)

    def decode(self, index: int, out: memoryview) -> memoryview:
        """Rebuild what a frame stands for."""
        new, _, base = self.jobs[index]
        target = out[: len(new)]
        decode_frame_into(self.frames[index], target, base)
        return target

    def check(self) -> None:
        """Every frame must rebuild its bytes."""
        for index, (new, _, _) in enumerate(self.jobs):
            if self.decode(index, self.out) != new:
                raise AssertionError(f"frame {index} rebuilds something else")

    def run(self, repeats: int) -> None:
        """Measure each kind of work on one core, in turn."""
        every = range(len(self.jobs))
        work: dict[str, Callable[[], object]] = {
            "blake3": lambda: [blake3(new).digest() for new, _, _ in self.jobs],
            "encode": lambda: [encode(job) for job in self.jobs],
            "decode": lambda: [self.decode(k, self.out) for k in every],
            "decode_verify": lambda: [blake3(self.decode(k, self.out)).digest() for k in every],
        }
        for _ in range(repeats):
            for name, act in work.items():
                start = time.thread_time()
                act()
                self.seconds.setdefault(name, []).append(time.thread_time() - start)

    def ratio(self, name: str) -> float:
        """Return the least time of a kind of work, in times of BLAKE3."""
        return min(self.seconds[name]) / min(self.seconds["blake3"])

    def rate(self, name: str) -> float:
        """Return bytes of the version per second, in GB/s."""
        return self.size / min(self.seconds[name]) / 1e9


WORK: Final = ("encode", "decode", "decode_verify")
ROUNDS: Final = 4
"""How often each frame's turn comes where two threads share the work: 12 frames divide well."""


def two_cores(bench: Bench, repeats: int) -> dict[str, tuple[float, float]]:
    """Return GB/s by the wall clock, of one thread and of two, for each kind of work."""
    outs = [memoryview(bytearray(MAX_FRAME_BYTES)) for _ in range(2)]
    many = list(range(len(bench.jobs))) * ROUNDS
    work: dict[str, Callable[[int, int], object]] = {
        "encode": lambda k, _: encode(bench.jobs[k]),
        "decode": lambda k, which: bench.decode(k, outs[which]),
        "decode_verify": lambda k, which: blake3(bench.decode(k, outs[which])).digest(),
    }
    found = {}
    with ThreadPoolExecutor(2) as pool:
        for name in WORK:

            def half(which: int, act: Callable[[int, int], object] = work[name]) -> None:
                for k in many[which::2]:
                    act(k, which)

            best = {1: float("inf"), 2: float("inf")}
            for _ in range(repeats):
                for threads in (1, 2):
                    start = time.perf_counter()
                    if threads == 1:
                        half(0)
                        half(1)
                    else:
                        list(pool.map(half, range(2)))
                    best[threads] = min(best[threads], time.perf_counter() - start)
            moved = ROUNDS * bench.size / 1e9
            found[name] = (moved / best[1], moved / best[2])
    return found


def _peak_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1000
    return 0.0


def peak_added(bench: Bench) -> float:
    """Return the MB that two threads add to what is held, while they encode and decode."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed counts again when it is taken again
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_mb()
    two_cores(bench, 1)
    return _peak_mb() - before


def measure(settings: Settings) -> Report:
    """Measure sizes over all steps and speed on one of them."""
    real = (REAL / "steps.npz").is_file()
    count = REAL_STEPS if real else 4
    versions = real_steps(count) if real else made_steps(count, MADE_BYTES)
    first = next(versions)
    last = (first, first)
    per_change, ratios, changes, travelled = [], [], 0, 0
    for new in versions:
        old = last[1]
        frames = [encode(job) for job in jobs(new, old)]
        size = sum(map(len, frames)) + document_bytes(frames)
        changed = changed_elements(new, old)
        per_change.append(size / changed)
        ratios.append(len(new) / size)
        travelled, changes = travelled + size, changes + changed
        last = (old, new)
    bench = Bench(last[1], last[0])
    bench.check()
    bench.run(settings.repeats)
    alone = Bench(first, None)
    alone.check()
    alone.run(max(3, settings.repeats // 4))
    wall = two_cores(bench, 3)
    peak = peak_added(bench)
    return Report(
        checks=[
            Check("bytes_per_change", travelled / changes, BYTES_PER_CHANGE, "bytes"),
            Check("encode_vs_blake3", bench.ratio("encode"), ENCODE_RATIO, "ratio"),
            Check("decode_vs_blake3", bench.ratio("decode"), DECODE_RATIO, "ratio"),
            Check("decode_verify_vs_blake3", bench.ratio("decode_verify"), VERIFY_RATIO, "ratio"),
            Check("alone_of_raw", sum(map(len, alone.frames)) / alone.size, ALONE_RATIO, "of raw"),
            Check("alone_decode", alone.rate("decode"), ALONE_GB_S, "GB/s", at_least=True),
            Check("peak_added", peak, PEAK_MB, "MB"),
        ],
        samples={
            "bytes_per_change": per_change,
            "ratio": ratios,
            "gb_s": [bench.rate(k) for k in ("blake3", *WORK)],
            "two_cores_gb_s": [wall[k][1] for k in WORK],
            "two_cores_times_one": [wall[k][1] / wall[k][0] for k in WORK],
            "alone_gb_s": [alone.rate(k) for k in ("blake3", *WORK)],
        },
        conditions={
            "data": "minilm-steps, 33 real steps" if real else "made up (loadtest/training.py)",
            "steps": count,
            "version_bytes": len(first),
            "density": changes / count / (len(first) / 2),
            "travels": "frames and one delta part a step; not the head, layout, parts",
            "gb_s": "blake3, encode, decode, decode + verify: bytes of the version, one thread",
            "two_cores": "encode, decode, decode + verify by the wall clock, against one thread's",
            "peak_added": "two threads that encode and decode, over the versions and frames in memory",
            "statistic": "least CPU seconds of a thread, in turn; wall clock for two",
        },
    )


if __name__ == "__main__":
    main(measure, name="codec", full=Size(45 * MB, 60), quick=Size(45 * MB, 20))
