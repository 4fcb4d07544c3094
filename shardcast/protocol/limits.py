"""Every bound of the protocol, each with its reason. Sizes in bytes, times in milliseconds."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

MAX_HEAD_BYTES: Final = MIB
"""A head is polled by every worker; 64 versions with deltas need about 60 KiB."""

MAX_DOCUMENT_BYTES: Final = 16 * MIB
"""Layouts, parts, manifests, delta parts: as large as the largest shard, one buffer fits all."""

MIN_SHARD_BYTES: Final = 256 * KIB
MAX_SHARD_BYTES: Final = 16 * MIB
"""16 MiB fits the object limits of every public CDN."""

SHARDS_WANTED: Final = 64
"""A checkpoint of middle size is cut into at least this many shards, to spread over relays."""

MAX_PART_SHARDS: Final = 4096
"""A part of 4096 digests is about 175 kB of JSON."""

MAX_SHARDS: Final = 1 << 22
"""64 TiB of 16 MiB shards; bounds the memory that a layout can make a reader allocate."""

MAX_FILES: Final = 1 << 16
MAX_PATH_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 255
"""What ext4, XFS, APFS and NTFS accept as one name."""

MAX_BYTES: Final = 1 << 53
"""Integers stay exact in every JSON reader (IEEE 754 doubles)."""

MAX_METADATA_ITEMS: Final = 256
MAX_METADATA_BYTES: Final = 64 * KIB

MAX_VERSIONS: Final = 64
MAX_DELTAS: Final = 16
MAX_DOCUMENT_PARTS: Final = MAX_SHARDS // 64
"""Parts may be small while a version streams, but not absurdly so."""

HEAD_DELTA_PARTS: Final = 8192
"""A publisher lists at most so many delta parts in a head, of the newest versions: that is half of it."""

MAX_WITHDRAWN: Final = 1024
MAX_KEYS: Final = 8
MAX_SIGNATURES: Final = 16
MAX_FRAMES: Final = 1 << 16
MAX_DELTA_BLOB_BYTES: Final = 64 * MIB
"""Whole frames, about 2 MiB or one large frame; a frame rebuilds at most 16 MiB."""

MAX_RUN_CHARS: Final = 64
MAX_TEXT_CHARS: Final = 256

MAX_FUTURE_MS: Final = 24 * 3600 * 1000
"""A sequence further ahead than this is refused: it would block every later head."""

SKEW_MS: Final = 5 * 60 * 1000
"""Clocks of rented machines are off by seconds to minutes."""

ONE_SHOT_EXPIRY_MS: Final = 7 * 24 * 3600 * 1000
LIVE_EXPIRY_MS: Final = 3600 * 1000
ROTATION_OVERLAP_MS: Final = 30 * 24 * 3600 * 1000

MAX_WAIT_SECONDS: Final = 25
"""Long polls end before the idle timeouts of common proxies (30 s and up)."""

MAX_DEPTH: Final = 16
"""A deeper tree is a loop or a mistake."""

HELD_BACK_BYTES: Final = 64 * KIB
"""The last piece of a blob that is kept until its digest is verified."""
