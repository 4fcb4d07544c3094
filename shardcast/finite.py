"""NaN and infinities in the tensors of a checkpoint, found before it is published, or served.

A trainer that has diverged goes on writing checkpoints. Every worker would run one within seconds, so
``publish --refuse-nonfinite`` looks at each element of the floating-point tensors: the exponent that
IEEE 754 (and the OCP 8-bit formats) keep for them is compared, no arithmetic is done, in 4 MiB a thread.
Engines look in the same way at what they stage: what such weights leave behind must be wiped.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from shardcast.codec.spans import Tensor, header_bytes, read_tensors
from shardcast.errors import MalformedError, ModifiedError, NonFiniteError
from shardcast.hashing import default_threads
from shardcast.sharing import Stopping, share_out
from shardcast.store.files import disk_errors, read_into

PIECE_BYTES: Final = 4 << 20
"""Read and compared at once: it stays in the cache between the two."""


@dataclass(frozen=True, slots=True)
class _Format:
    """How the elements of a type say that they are no number.

    Attributes:
        width: Bytes of an element.
        mask: The bits that are looked at.
        bad: What they are in NaN and infinities.
    """

    width: int
    mask: int
    bad: int


FORMATS: Final[Mapping[str, _Format]] = {
    "BF16": _Format(2, 0x7F80, 0x7F80),
    "F16": _Format(2, 0x7C00, 0x7C00),
    "F32": _Format(4, 0x7F80_0000, 0x7F80_0000),
    "F64": _Format(8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "C64": _Format(4, 0x7F80_0000, 0x7F80_0000),
    "F8_E4M3": _Format(1, 0x7F, 0x7F),  # no infinities (OCP 8-bit floating point, 1.0)
    "F8_E5M2": _Format(1, 0x7C, 0x7C),
    "F8_E8M0": _Format(1, 0xFF, 0xFF),  # a scale: exponents only
    "F8_E4M3FNUZ": _Format(1, 0xFF, 0x80),  # NaN takes the place of the negative zero
    "F8_E5M2FNUZ": _Format(1, 0xFF, 0x80),
}
"""By safetensors' names. Whole numbers, and floats of 4 and 6 bits, have nothing that is no number."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file.

    Attributes:
        path: How messages name the file.
        location: Where it lies.
        tensor: What of it.
        fd: The file, if it is open already; whoever opened it closes it.
    """

    path: str
    location: Path
    tensor: Tensor
    fd: int | None = None


def refuse_nonfinite(
    files: Sequence[tuple[str, Path, int]],
    *,
    threads: int | None = None,
    looked_at: Callable[[int], None] = lambda count: None,
) -> None:
    """Look at every floating-point element of a checkpoint's safetensors files.

    Args:
        files: Of each file its path in the checkpoint, where it lies, and its size.
        threads: How many look; None: all cores.
        looked_at: Hears how many bytes more were looked at; from any thread.

    Raises:
        NonFiniteError: If one is NaN or infinite; names tensor, file, index and value. The first of
            them in its tensor; of several tensors, any.
        MalformedError: If a file that is called safetensors is none.
        ModifiedError: If a file shrinks meanwhile.
        DiskError: If the system refuses.
    """
    places = [
        Place(path, location, tensor)
        for path, location, size in files
        if path.endswith(".safetensors")
        for tensor in _tensors(location, size)
    ]
    try:
        refuse_places(places, threads=threads or default_threads(), looked_at=looked_at)
    except NonFiniteError as error:
        said = f"{error.message}; nothing was published"
        raise NonFiniteError(said, source=error.source) from None


def refuse_places(
    places: Sequence[Place],
    *,
    threads: int,
    looked_at: Callable[[int], None] = lambda count: None,
    stopping: Stopping = lambda: False,
) -> None:
    """Look at every element of the tensors that hold floating-point numbers.

    Args:
        places: Where they lie.
        threads: How many look.
        looked_at: Hears how many bytes more were looked at; from any thread.
        stopping: Says when nobody wants to know any more; then it returns.

    Raises:
        NonFiniteError, ModifiedError, DiskError: As ``refuse_nonfinite``.
    """
    jobs = [place for place in places if place.tensor.dtype in FORMATS]
    jobs.sort(key=lambda job: -job.tensor.length)  # the longest first: no thread ends late

    def work(buffer: memoryview, place: Place, others: Stopping) -> None:
        _look(place, buffer, lambda: others() or stopping(), looked_at)

    share_out(
        jobs,
        work,
        threads=max(1, min(threads, len(jobs))),
        tool=lambda: contextlib.nullcontext(memoryview(bytearray(PIECE_BYTES))),
        name="finite",
    )


def _tensors(path: Path, size: int) -> list[Tensor]:
    with disk_errors(path, "reading"), open(path, "rb") as opened:
        start = opened.read(8)
        length = header_bytes(start)
        header = b"" if length is None or length > size else start + opened.read(length - 8)
    tensors = read_tensors(header, 0, size) if header else []
    if not tensors and not _is_empty(header[8:]):
        raise MalformedError(
            "--refuse-nonfinite: the file is called safetensors and is none", source=str(path)
        )
    return tensors


def _is_empty(header: bytes) -> bool:
    """Say whether a header is one, and names no tensor."""
    try:
        found = json.loads(header)
    except ValueError:
        return False
    return isinstance(found, dict) and set(found) <= {"__metadata__"}


def _look(
    place: Place, buffer: memoryview, stopping: Stopping, looked_at: Callable[[int], None]
) -> None:
    tensor = place.tensor
    form = FORMATS[tensor.dtype]
    for offset, piece in _pieces(place, buffer):
        if stopping():
            return
        index = first_bad(piece, form)
        if index is not None:
            at = (offset + index * form.width) // (8 if tensor.dtype == "C64" else form.width)
            index_of = np.unravel_index(at, tensor.shape) if tensor.shape else ()
            raise NonFiniteError(
                f"tensor {tensor.name!r} in {place.path} holds "
                f"{_value(piece, index, tensor.dtype)} at "
                f"[{', '.join(str(int(one)) for one in index_of)}]",
                source=str(place.location),
            )
        looked_at(len(piece))


def _pieces(place: Place, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the tensor's bytes with where they begin in it; each piece is whole elements."""
    tensor, path = place.tensor, place.location
    with disk_errors(path, "reading"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if place.fd is None else place.fd
        try:
            done = 0
            while done < tensor.length:
                piece = buffer[: min(len(buffer), tensor.length - done)]
                if read_into(fd, piece, tensor.offset + done) != len(piece):
                    raise ModifiedError("the file shrank while it was read", source=str(path))
                yield done, piece
                done += len(piece)
        finally:
            if place.fd is None:
                os.close(fd)


def first_bad(data: memoryview, form: _Format) -> int | None:
    """Return the index of the first element that is no number, None if all are."""
    words = np.frombuffer(data, dtype=np.dtype(f"<u{form.width}"))
    bad = (words & words.dtype.type(form.mask)) == words.dtype.type(form.bad)
    index = int(bad.argmax()) if bad.size else 0
    return index if bad.size and bad[index] else None


def _value(data: memoryview, index: int, dtype: str) -> str:
    """Say what an element is, as far as its bits do."""
    form = FORMATS[dtype]
    word = int.from_bytes(data[index * form.width : (index + 1) * form.width], "little")
    fraction = {"BF16": 0x7F, "F16": 0x3FF, "F32": 0x7F_FFFF, "C64": 0x7F_FFFF,
                "F64": (1 << 52) - 1, "F8_E5M2": 0x3}.get(dtype)  # fmt: skip
    if fraction is None or word & fraction:
        return "NaN"
    return "-Inf" if word >> (form.width * 8 - 1) else "Inf"
