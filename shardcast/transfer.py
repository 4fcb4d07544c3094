"""One blob on its way: its bytes hashed as they come, put where they belong, joined from two requests.

Knows nothing of HTTP: ``fetch`` feeds it, over one source or several.
"""

from __future__ import annotations

import threading
from typing import Protocol

from blake3 import blake3
from xxhash import xxh3_128

from shardcast.cancel import TransferCancelledError
from shardcast.errors import IntegrityError, LimitError
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES


class BlobSink(Protocol):
    """Where the bytes of one blob go."""

    def write(self, offset: int, data: memoryview) -> None:
        """Take the next bytes, not verified yet. Offset 0 means from the start, also again.

        The view is only good during the call.
        """
        ...


class MemorySink:
    """Keeps a small blob (a document) in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, offset: int, data: memoryview) -> None:
        """Take the next bytes; those from ``offset`` on are replaced."""
        del self.data[offset:]
        self.data += data

    def close(self) -> None:
        """Nothing is held open."""


class RestSink:
    """Keeps the rest of a blob, from ``start`` on, in memory: at most one shard."""

    def __init__(self) -> None:
        self.start = 0
        self.data = bytearray()

    def write(self, offset: int, data: memoryview) -> None:
        """Take the next bytes; those from ``offset`` on are replaced."""
        del self.data[offset - self.start :]
        self.data += data


class Transfer:
    """One blob on its way, possibly over several sources. Fed by one thread at a time.

    A second request may race the first for the rest of the blob: ``branch`` is a transfer of its
    own that goes on from what is here, into memory, and ``adopt`` takes its bytes over if it is
    whole first. The sink is only written under ``lock``, and never again once the blob is whole,
    so no two sources ever write to one place.

    Attributes:
        run: The run it belongs to.
        digest: Its name.
        total: Its length, None while no source has told.
        offset: How many bytes were received (other threads may read it to see progress).
        sources: URLs that gave bytes since the last restart.
        resumed: Whether more than one answer gave bytes since then.
        received: All bytes that came, also those that a restart threw away.
        twice: Of those, what a branch brought too that was adopted.
        beaten_at: Its offset when a branch was adopted, None before.
        generation: How often it was restarted.
        lock: Held while the sink is written: whoever closes it takes it too.
        xxh3: XXH3-128 of the bytes, once the digest matched; empty before.
    """

    def __init__(
        self,
        run: str,
        digest: str,
        length: int | None,
        sink: BlobSink,
        *,
        limit: int = MAX_DOCUMENT_BYTES,
    ) -> None:
        """Begin at offset 0.

        Args:
            run: The run.
            digest: The blob's digest.
            length: Its exact length, or None: a source's Content-Length decides.
            sink: Where the bytes go.
            limit: Most bytes that a Content-Length may announce.

        Raises:
            LimitError: If ``length`` is over the limit.
        """
        if length is not None and length > limit:
            raise LimitError(f"blob {digest} of {length} bytes is over the limit of {limit}")
        self.run = run
        self.digest = digest
        self.limit = limit
        self._length = length
        self._sink = sink
        self._whole = False
        self.lock = threading.Lock()
        self.received = 0
        self.twice = 0
        self.beaten_at: int | None = None
        self.generation = -1
        self.restart()

    def restart(self) -> None:
        """Forget everything that was received.

        Raises:
            TransferCancelledError: If the blob is whole: another request brought it.
        """
        with self.lock:
            self._unfinished()
            self.generation += 1
            self.total = self._length
            self.offset = 0
            self.sources: tuple[str, ...] = ()
            self.resumed = False
            self.xxh3 = b""
            self._blake3 = blake3()
            self._xxh3 = xxh3_128()

    def _unfinished(self) -> None:
        if self._whole:
            raise TransferCancelledError(f"blob {self.digest} came from elsewhere meanwhile")

    @property
    def stitched(self) -> bool:
        """Whether it is not from one answer of one source: if it is wrong, nobody is to blame.

        A relay passes on what it has not verified yet, and cuts the answer off when that turns out
        wrong. Whoever goes on there then gets the right rest, and has the wrong beginning.
        """
        return self.resumed or len(self.sources) > 1

    def receive(self, url: str, data: memoryview) -> None:
        """Hash the next bytes and pass them on.

        Raises:
            DiskError: If the sink cannot take them.
            TransferCancelledError: If the blob is whole: another request brought it.
        """
        with self.lock:
            if self._whole:
                self.received += len(data)  # for nothing, but it came
                self.twice += len(data)
            self._unfinished()
            if not self.sources or self.sources[-1] != url:
                self.sources = (*(s for s in self.sources if s != url), url)
            self._blake3.update(data)
            self._xxh3.update(data)
            self._sink.write(self.offset, data)
            self.offset += len(data)
            self.received += len(data)

    def finish(self, url: str) -> None:
        """Check the digest of the whole.

        Raises:
            IntegrityError: If it is another; ``source`` is ``url``. The transfer must be
                restarted before it goes on.
            TransferCancelledError: If the blob is whole: another request brought it.
        """
        with self.lock:
            self._unfinished()
            found = self._blake3.hexdigest()
            if found != self.digest:
                by = f", stitched from {', '.join(self.sources)}" if len(self.sources) > 1 else ""
                by = by or (", stitched from several answers" if self.resumed else "")
                raise IntegrityError(
                    f"blob {self.digest} from {url}: its {self.offset} bytes "
                    f"have digest {found}{by}",
                    source=url,
                )
            self.xxh3 = self._xxh3.digest()
            self._whole = True

    def branch(self, *, whole: bool = False) -> Branch:
        """Return a transfer of the rest of the blob (or all of it) that can race this one.

        Raises:
            TransferCancelledError: If the blob is whole already.
        """
        with self.lock:
            self._unfinished()
            branch = Branch(self.run, self.digest, self.total, RestSink(), limit=self.limit)
            if not whole and self.offset:
                branch.begin(self, self._blake3.copy(), self._xxh3.copy())
            return branch

    def adopt(self, branch: Branch) -> bool:
        """Take over the bytes of a branch whose digest matched, unless this was whole first.

        Returns:
            False if they are of no use: this one is whole, or what the branch goes on from was
            thrown away since.

        Raises:
            DiskError: If the sink cannot take them.
        """
        with self.lock:
            if self._whole or (branch.start and branch.parent_generation != self.generation):
                return False
            self._sink.write(branch.start, memoryview(branch.rest.data))
            self._whole = True
            self.beaten_at, self.twice = self.offset, self.offset - branch.start
            self.offset, self.total = branch.offset, branch.total
            self.sources, self.xxh3 = branch.sources, branch.xxh3
            return True


class Branch(Transfer):
    """A second transfer of a blob, into memory, from where the first one was.

    Attributes:
        start: Its first byte.
        parent_generation: The generation of the first one that it goes on from.
        rest: The bytes from ``start`` on.
    """

    def __init__(
        self, run: str, digest: str, length: int | None, rest: RestSink, *, limit: int
    ) -> None:
        """Begin at offset 0."""
        self.start = 0
        self.parent_generation = 0
        self.rest = rest
        super().__init__(run, digest, length, rest, limit=limit)

    def begin(self, parent: Transfer, digest: blake3, fast: xxh3_128) -> None:
        """Go on from where ``parent`` is; ``digest`` and ``fast`` hash the bytes before."""
        self.start = self.rest.start = self.offset = parent.offset
        self.parent_generation = parent.generation
        self.sources = parent.sources
        self._blake3, self._xxh3 = digest, fast

    def restart(self) -> None:
        """Refuse to throw away what the first one received: its bytes are not here.

        Raises:
            TransferCancelledError: If it began after the start: the source cannot send the rest.
        """
        if self.start:
            raise TransferCancelledError(f"blob {self.digest} is only sent as a whole")
        super().restart()
