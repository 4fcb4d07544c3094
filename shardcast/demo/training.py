"""Updates of a checkpoint as an optimiser makes them: fp32 master weights, rounded to bf16.

An optimiser like Adam keeps master weights in fp32 and moves each by the learning rate times a
number below one. The published bf16 value changes only where the master crosses a rounding
border, so at learning rate 1e-6 less than one element in a hundred does, small ones more often.

The masters are never stored: an element's master is its bf16 value, plus a remainder below the
rounding, plus one move per update, all three drawn again from the seed. So any update of a
checkpoint of any size costs the memory of a few blocks.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from shardcast.demo.checkpoint import (
    BLOCK_ELEMENTS,
    U16,
    normal_quantiles,
    round_to_bf16,
    uniform16,
)
from shardcast.demo.safetensors import BF16, BF16_BYTES, Span, read_spans
from shardcast.sources import select_files

LEARNING_RATE: Final = 1e-6
BETA1: Final = 0.9
MOVE_SPREAD: Final = math.sqrt((1 - BETA1) / (1 + BETA1))
"""Standard deviation of Adam's m / sqrt(v) for gradients that are mostly noise: 0.23."""

SUFFIX: Final = ".safetensors"

_REMAINDER, _MOVE = 1, 2  # streams of the generator


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an update did: elements in all (bf16), and how many differ from the update before."""

    elements: int
    changed: int


def can_step(source: Path) -> bool:
    """Say whether a checkpoint has bf16 safetensors files."""
    files = select_files(source).files
    return any(
        span.dtype == BF16
        for file in files
        if file.path.endswith(SUFFIX)
        for span in read_spans(file.location)
    )


def write_step(source: Path, directory: Path, update: int, *, seed: int = 0) -> Stepped:
    """Write what ``source`` has become after ``update`` steps; files without weights are copied.

    What is not published (optimizer state, pickles) is left out.

    Raises:
        MalformedError: If a ``.safetensors`` file is not one.
    """
    jobs: list[concurrent.futures.Future[Stepped]] = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number, file in enumerate(select_files(source).files):
            target = directory / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.path.endswith(SUFFIX):
                jobs.append(pool.submit(_step_file, file.location, target, update, (seed, number)))
            else:
                shutil.copyfile(file.location, target)
        done = [job.result() for job in jobs]
    return Stepped(sum(one.elements for one in done), sum(one.changed for one in done))


def _step_file(source: Path, target: Path, update: int, seed: tuple[int, int]) -> Stepped:
    elements = changed = 0
    position = 0
    with source.open("rb") as old, target.open("wb") as new:
        for span in read_spans(source):
            if span.dtype != BF16:
                continue
            _copy(old, new, span.start - position)
            for number, block in enumerate(_blocks(old, span)):
                key = (*seed, span.start, number)
                before, after = _stepped(block, update, key)
                new.write(after.data)
                elements += after.size
                changed += int(np.count_nonzero(before != after))
            position = span.stop
        _copy(old, new, source.stat().st_size - position)
    return Stepped(elements, changed)


def _blocks(file: BinaryIO, span: Span) -> list[U16]:
    count = (span.stop - span.start) // BF16_BYTES
    sizes = [min(BLOCK_ELEMENTS, count - at) for at in range(0, count, BLOCK_ELEMENTS)]
    return [np.frombuffer(file.read(size * BF16_BYTES), dtype="<u2") for size in sizes]


def _stepped(block: U16, update: int, key: tuple[int, ...]) -> tuple[U16, U16]:
    """Return the block after ``update - 1`` steps and after ``update``."""
    master = _master(block, np.random.SFC64((*key, _REMAINDER)))
    before = block
    for number in range(1, update + 1):
        if number == update and update > 1:
            before = round_to_bf16(master)
        master += _moves()[uniform16(np.random.SFC64((*key, _MOVE, number)), block.size)]
    return before, round_to_bf16(master)


def _master(block: U16, bits: np.random.SFC64) -> npt.NDArray[np.float32]:
    """Return an fp32 value for each bf16 one, uniform among those that round to it."""
    remainder = uniform16(bits, block.size).view("<i2").astype(np.int32)
    np.maximum(remainder, -0x7FFF, out=remainder)
    exponent = block & 0x7F80
    remainder[(exponent == 0) | (exponent == 0x7F80)] = 0  # zeros, subnormals, infinities, NaNs
    return ((block.astype(np.int32) << 16) + remainder).view(np.float32)


@functools.cache
def _moves() -> npt.NDArray[np.float32]:
    return normal_quantiles() * np.float32(LEARNING_RATE * MOVE_SPREAD)


def _copy(old: BinaryIO, new: BinaryIO, length: int) -> None:
    while length > 0:
        data = old.read(min(length, 1 << 20))
        if not data:
            raise EOFError(f"{old.name} became shorter while it was read")
        new.write(data)
        length -= len(data)
