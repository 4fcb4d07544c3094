"""Whatever two directories hold, a delta between them rebuilds exactly, at a bounded price."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast import keys
from shardcast.delta_making import make_delta
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.store import Store
from tests.models import make_model, step, write_model
from tests.unit.publishing.rebuilding import load, not_in_base, rebuild

KIB = 1024


@st.composite
def contents(draw: st.DrawFn) -> dict[str, bytes]:
    """Files by path: noise, repeated bytes, text; most no multiple of anything."""
    paths = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    files = {}
    for path in paths:
        size = draw(st.sampled_from([0, 1, 7, 3 * KIB, 256 * KIB, 600 * KIB + 3]))
        random = np.random.default_rng(draw(st.integers(0, 3)))
        kind = draw(st.sampled_from(["noise", "repeated", "text"]))
        if kind == "noise":
            files[path] = random.bytes(size)
        else:
            files[path] = (b"\0\1" if kind == "repeated" else b"some text ") * (size // 2 + 1)
            files[path] = files[path][:size]
    return files


@st.composite
def edited(draw: st.DrawFn, old: dict[str, bytes]) -> dict[str, bytes]:
    """What a trainer may do to files: change, insert, cut, rename, remove, add."""
    new = dict(old)
    for path in list(new):
        data, at = new[path], draw(st.integers(0, len(new[path])))
        edit = draw(st.sampled_from(["keep", "change", "insert", "cut", "rename", "remove"]))
        if edit == "change":
            new[path] = data[:at] + bytes(byte ^ 1 for byte in data[at : at + 9]) + data[at + 9 :]
        elif edit == "insert":
            new[path] = data[:at] + b"12345678" + data[at:]
        elif edit == "cut":
            new[path] = data[:at]
        elif edit == "rename":
            new[f"{path}-new"] = new.pop(path)
        elif edit == "remove":
            del new[path]
    return new or {"only": b"x"}


def write(directory: Path, files: dict[str, bytes], model_seed: int | None) -> None:
    directory.mkdir()
    for path, data in files.items():
        (directory / path).write_bytes(data)
    model = make_model(elements=150_001, tensors=2)
    if model_seed is not None:
        moved = {"x": "y" * (model_seed % 5)}
        write_model(directory / "model.safetensors", step(model, model_seed), metadata=moved)


@settings(max_examples=25)
@given(data=st.data())
def test_a_delta_rebuilds_what_it_says_it_does(data: st.DataObject) -> None:
    old = data.draw(contents())
    new = data.draw(edited(old))
    seeds = data.draw(st.tuples(*[st.none() | st.integers(0, 9)] * 2))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write(root / "old", old, seeds[0])
        write(root / "new", new, seeds[1])
        signer = keys.load_signer(keys.generate(root / "key")[0])
        run = Store(root / "store").run("run", create=True)
        now = iter(range(10**12, 10**12 + 99))
        _, done = [
            publish_directory(PublishOptions(source=root / name), run, [signer], lambda: next(now))
            for name in ("old", "new")
        ]
        first, second = run.stored(1), run.stored(2)
        assert first is not None
        assert second is not None
        target, base = load(run, done.ref), first.version
        for start in (first, None):
            delta, notes = make_delta(second, start, run.write_blob)
            assert notes == []
            if delta is None:
                continue
            for digest, part in delta.parts.items():
                run.write_blob(digest, part)
            of = None if start is None else base
            where = None if start is None else first.directory
            found = rebuild(run, target, delta.ref, of, where)
            assert delta.ref.bytes < max(target.layout.total_bytes, 1)
            if start is not None:
                assert [delta.ref] == done.ref.deltas  # the same as while it was hashed
            lacking = not_in_base(target, of)
            assert delta.same == target.layout.shard_count - len(lacking)
            assert delta.plain == len(
                {s for s in lacking if target.digests[s] not in {target.digests[f] for f in found}}
            )
        run.close()
