"""The compiled kernel, or what to do where it is not there."""

from __future__ import annotations

try:
    from shardcast.codec._kernel import (
        count_changes,
        decode_changes,
        encode_changes,
        merge_planes,
        split_planes,
        use_path,
    )
except ImportError as error:
    raise ImportError(
        f"the codec's C kernel is not built for this Python ({error}). In a source tree run "
        "'pip install --editable .', else 'pip install --force-reinstall shardcast-cdn'; both need "
        "a C compiler and Python's headers (Debian: apt-get install gcc libc6-dev python3-dev)"
    ) from error

__all__ = [
    "count_changes",
    "decode_changes",
    "encode_changes",
    "merge_planes",
    "split_planes",
    "use_path",
]
