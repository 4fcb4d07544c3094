"""Strategies for documents: valid ones by hand, and near-valid ones by mutation."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

VECTORS: Final = Path(__file__).parent.parent / "vectors"

HOSTILE: Final[list[Any]] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    1.0,
    -0.0,
    1e308,
    2**53,
    2**53 + 1,
    2**63,
    2**64,
    -(2**64),
    10**50,
    "",
    "a",
    "../../etc/passwd",
    "\x00",
    "\ud800",
    "ß",
    "x" * 5000,
    "shardcast.head/2",
    "AA==",
    base64.b64encode(bytes(32)).decode(),
    base64.b64encode(bytes(64)).decode(),
    "0" * 64,
    "F" * 64,
    [],
    [[]],
    {},
    {"": None},
    {"1": "0" * 64},
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=20)
    | st.sampled_from(HOSTILE).map(copy.deepcopy),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def _slots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = []
    for key in keys:
        found.append((*path, key))
        if isinstance(value[key], dict | list):
            found += _slots(value[key], (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """``document`` after one to three small crimes."""
    value = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        slots = _slots(value)
        if not slots:
            break
        *path, last = draw(st.sampled_from(slots))
        holder: Any = value
        for key in path:
            holder = holder[key]
        crime = draw(st.sampled_from(["delete", "replace", "retype", "double", "nest", "add"]))
        if crime == "delete":
            del holder[last]
        elif crime == "replace":
            holder[last] = draw(json_values)
        elif crime == "retype":
            retyped = [str(holder[last]), [holder[last]], {"x": holder[last]}, None]
            holder[last] = draw(st.sampled_from(retyped))
        elif crime == "double" and isinstance(holder, list):
            holder.insert(last, holder[last])
        elif crime == "nest":
            holder[last] = [[[[holder[last]]]]]
        elif isinstance(holder, dict):
            holder[draw(st.text(max_size=8))] = draw(json_values)
    return value


def vector(name: str) -> dict[str, Any]:
    """A golden document as plain JSON."""
    loaded: dict[str, Any] = json.loads((VECTORS / name).read_bytes())
    return loaded


def near_valid(name: str) -> st.SearchStrategy[bytes]:
    """Bytes of the golden document ``name``, mutated as JSON."""
    return mutated(vector(name)).map(lambda value: json.dumps(value).encode())


@st.composite
def scrambled(draw: st.DrawFn, name: str) -> bytes:
    """Bytes of the golden document ``name``, mutated as bytes."""
    data = bytearray((VECTORS / name).read_bytes())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        cut = draw(st.integers(0, 8))
        data[at : at + cut] = draw(st.binary(max_size=8))
    return bytes(data)
