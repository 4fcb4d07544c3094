"""Small safetensors files, written byte by byte as the format says."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path


def safetensors(tensors: Mapping[str, tuple[str, list[int], bytes]], *, pad: int = 0) -> bytes:
    """A file of tensors: (dtype, shape, bytes) by name; `pad` more spaces in its header."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, body = 0, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        body += data
    text = json.dumps(header).encode() + b" " * pad
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    """A directory of files."""
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory
