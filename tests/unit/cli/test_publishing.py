"""keygen, publish, verify, export, gc, withdraw, hold, inspect: what they do and how they fail."""

import functools
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shardcast import announcing, publisher
from shardcast.cli.output import EVENT_MEMBERS
from shardcast.cli.xdg import remote_memory
from shardcast.publishing import Published, PublishOptions
from shardcast.store import retention
from shardcast.store.roles import Role, claim_role, role_of
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.streaming import Pace
from tests.models import make_model, step, write_model
from tests.unit.cli.conftest import Cli

# --- keygen -----------------------------------------------------------------------------------


def test_keygen_writes_a_pair_and_says_what_each_is_for(cli: Cli, tmp_path: Path) -> None:
    ran = cli("keygen", "--out", tmp_path / "keys")
    assert ran.code == 0
    private = tmp_path / "keys" / "shardcast.key"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert b"BEGIN PRIVATE KEY" in private.read_bytes()
    assert b"BEGIN PUBLIC KEY" in (tmp_path / "keys" / "shardcast.pub").read_bytes()
    assert "keep it secret" in ran.stdout


def test_keygen_never_overwrites(cli: Cli, tmp_path: Path) -> None:
    assert cli("keygen", "--out", tmp_path).code == 0
    before = (tmp_path / "shardcast.key").read_bytes()
    ran = cli("keygen", "--out", tmp_path)
    assert ran.code == 2
    assert "never overwritten" in ran.stderr
    assert (tmp_path / "shardcast.key").read_bytes() == before


def test_no_secret_is_shown(cli: Cli, tmp_path: Path, checkpoint: Path) -> None:
    shown = [
        cli("keygen", "--out", tmp_path, "--json", "--verbose"),
        cli("publish", checkpoint, "--key", tmp_path / "shardcast.key", "--verbose", "--json"),
        cli(
            "publish", checkpoint, "--to", "http://127.0.0.1:9", "--verbose", "--json",
            env={"SHARDCAST_TOKEN": "a-very-secret-token"},
        ),
    ]  # fmt: skip
    key = "".join((tmp_path / "shardcast.key").read_text().splitlines()[1:-1])
    for ran in shown:
        for text in (ran.stdout, ran.stderr):
            assert key not in text
            assert "very-secret" not in text


# --- publish ----------------------------------------------------------------------------------


def test_publish_without_options_makes_store_and_key_and_says_what_to_type_next(
    cli: Cli, tmp_path: Path, checkpoint: Path
) -> None:
    ran = cli("publish", checkpoint)
    assert ran.code == 0
    assert "published default version 1" in ran.stdout
    private = tmp_path / "xdg_config_home" / "shardcast" / "shardcast.key"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert f"made a signing key {private}" in ran.stderr
    assert "shardcast relay --listen" in ran.stderr
    assert f"--pubkey {private.with_suffix('.pub')}" in ran.stderr
    version = tmp_path / "xdg_data_home/shardcast/store/default/versions/000001"
    assert (version / "sub" / "tokenizer.json").read_text() == "{}"
    again = cli("publish", checkpoint)
    assert "published default version 2" in again.stdout
    assert "made a signing key" not in again.stderr


def test_the_published_event_has_every_member(cli: Cli, tmp_path: Path, checkpoint: Path) -> None:
    ran = cli(
        "publish", checkpoint, "--run", "policy", "--step", 12, "--store", tmp_path / "s", "--json"
    )
    event = ran.event("published")
    assert set(EVENT_MEMBERS) <= set(event)
    assert (event["run"], event["version"], event["step"]) == ("policy", 1, 12)
    assert len(event["manifest"]) == 64
    assert Path(event["path"]) == tmp_path / "s/policy/versions/000001"
    assert isinstance(event["t"], int)


def test_publish_says_what_it_left_out(cli: Cli, checkpoint: Path) -> None:
    (checkpoint / "optimizer.pt").write_bytes(b"o" * 1000)
    (checkpoint / "rng_state_0.pth").write_bytes(b"r" * 500)
    (checkpoint / "old.pkl").write_bytes(b"p" * 10)
    ran = cli("publish", checkpoint)
    assert "left out  2 files, 1.50 kB: optimizer, scheduler or RNG state" in ran.stdout
    assert "left out  1 file, 10 B: pickle (old.pkl)" in ran.stdout
    included = cli("publish", checkpoint, "--include", "*.pkl", "--json").event("published")
    assert [one["files"] for one in included["left_out"]] == [2]


def test_metadata_travels(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    cli("publish", checkpoint, "--metadata", "who=me", "--metadata", "x=a=b")
    ran = cli("export", "default", "--out", tmp_path / "out")
    assert ran.code == 0
    with serving(tmp_path / "out") as url:
        shown = cli("inspect", "default", "--from", url)
    assert "metadata who = me" in shown.stdout
    assert "metadata x = a=b" in shown.stdout


def test_publish_says_what_a_holder_of_the_version_before_fetches(cli: Cli, tmp_path: Path) -> None:
    model, path = make_model(), tmp_path / "m" / "model.safetensors"
    write_model(path, model)
    first = cli("publish", path.parent, "--json").event("published")
    assert first["deltas"] == []
    write_model(path, step(model, 1))
    ran = cli("publish", path.parent, "--compress", "--json")
    event = ran.event("published")
    delta, copy = event["deltas"]
    assert (delta["base_version"], delta["base"]) == (1, first["manifest"])
    assert (copy["base_version"], copy["base"]) == (None, None)
    assert delta["bytes"] == delta["bytes_needed"] < event["bytes"] / 100
    assert delta["ratio"] == round(event["bytes"] / delta["bytes"], 2)
    assert delta["shards"] == {"rebuilt": 10, "same": 0, "plain": 0}
    write_model(path, step(model, 2))
    ran = cli("publish", path.parent, "--delta-bases", "2")
    assert "  delta     from version 2: " in ran.stdout
    assert "  delta     from version 1: " in ran.stdout
    assert "delta" not in cli("publish", path.parent, "--no-delta").stdout


def test_publish_streams_what_takes_longer_than_a_moment_unless_told_not_to(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces: list[Pace | None] = []

    real = publisher.publish_directory

    def publish(options: PublishOptions, *others: Any) -> Published:
        paces.append(options.stream)
        return real(options, *others)

    monkeypatch.setattr(publisher, "publish_directory", publish)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model").write_bytes(b"m")
    assert cli("publish", tmp_path / "c", "--json").event("published")["streamed"] == 0
    assert cli("publish", tmp_path / "c", "--no-stream").code == 0
    assert paces == [Pace(), None]


def test_deltas_are_exported_verified_and_collected(cli: Cli, tmp_path: Path) -> None:
    model, path, store = make_model(), tmp_path / "m" / "model.safetensors", tmp_path / "s"
    blobs = store / "default" / "blobs"

    def frames(directory: Path) -> set[str]:
        return {p.name for p in directory.iterdir() if p.read_bytes()[:4] == b"SCF1"}

    for seed in range(3):
        write_model(path, step(model, seed))
        cli("publish", path.parent, "--store", store, "--keep", "2")
    assert len(frames(blobs)) == 2
    assert cli("export", "default", "--store", store, "--out", tmp_path / "out").code == 0
    exported = tmp_path / "out" / "v1" / "default" / "blobs"
    assert frames(exported) == frames(blobs)
    assert {p.name for p in blobs.iterdir()} <= {p.name for p in exported.iterdir()}

    write_model(path, step(model, 9))
    cli("publish", path.parent, "--store", store, "--keep", "1")
    assert len(frames(blobs)) == 1  # those of dropped versions are gone
    damaged = blobs / frames(blobs).pop()
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    ran = cli("verify", store)
    assert ran.code == 11
    assert damaged.name in ran.stdout + ran.stderr


def test_people_are_told_why_there_is_no_delta(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "m" / "model.safetensors"
    write_model(path, make_model())
    cli("publish", path.parent, "--store", tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "default" / "versions" / "000001")
    write_model(path, step(make_model(), 1))
    ran = cli("publish", path.parent, "--store", tmp_path / "s")
    assert ran.code == 0
    assert "without a delta from version 1: it is not here" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "does not exist"),
        (["{ckpt}", "--metadata", "novalue"], "KEY=VALUE"),
        (["{ckpt}", "--metadata", "a=1", "--metadata", "a=2"], "given twice"),
        (["{ckpt}", "--store", "s", "--to", "http://127.0.0.1:1"], "not both"),
        (["{ckpt}", "--cache", "c"], "goes with --to"),
        (["{ckpt}", "--delta-bases", "2,x"], "list of numbers"),
        (["{ckpt}", "--delta-bases", "0"], "from 1 to 64"),
        (["{ckpt}", "--delta-bases", "2", "--no-delta"], "--no-delta"),
        (["{ckpt}", "--to", "http://127.0.0.1:1"], "SHARDCAST_TOKEN"),
        (["{ckpt}", "--to", "http://127.0.0.1:1", "--token-file", "none"], "token file none"),
        (["{ckpt}", "--key", "none.key"], "none.key"),
    ],
)
def test_publish_refuses_what_cannot_work(
    cli: Cli, checkpoint: Path, arguments: list[str], said: str
) -> None:
    ran = cli("publish", *[part.replace("{ckpt}", str(checkpoint)) for part in arguments])
    assert ran.code == 2
    assert said in ran.stderr


def test_a_refused_publication_makes_neither_key_nor_store(cli: Cli, tmp_path: Path) -> None:
    assert cli("publish", tmp_path / "nowhere").code == 2
    assert not (tmp_path / "xdg_config_home").exists()
    assert not (tmp_path / "xdg_data_home").exists()


def test_an_empty_token_file_is_refused(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    ran = cli("publish", checkpoint, "--to", "http://127.0.0.1:1", "--token-file",
              tmp_path / "token")  # fmt: skip
    assert ran.code == 2
    assert "is empty" in ran.stderr


def test_another_key_is_refused_with_the_exit_code_of_trust(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    assert cli("publish", checkpoint).code == 0
    cli("keygen", "--out", tmp_path / "other")
    ran = cli("publish", checkpoint, "--key", tmp_path / "other" / "shardcast.key", "--json")
    assert ran.code == 12
    assert ran.event("error")["code"] == "unknown_key"


def test_a_run_is_handed_over_to_a_new_key(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    cli("publish", checkpoint)
    cli("keygen", "--out", tmp_path / "new")
    new = tmp_path / "new" / "shardcast.key"
    ran = cli("publish", checkpoint, "--rotate-to", new)
    assert ran.code == 0
    assert f"publish with --key {new}" in ran.stderr
    assert cli("publish", checkpoint, "--key", new).code == 0
    assert cli("publish", checkpoint).code == 12
    same = cli("publish", checkpoint, "--key", new, "--rotate-to", new)
    assert same.code == 2


# --- verify -----------------------------------------------------------------------------------


@pytest.fixture
def store(cli: Cli, checkpoint: Path, tmp_path: Path) -> Path:
    assert cli("publish", checkpoint, "--run", "policy", "--store", tmp_path / "store").code == 0
    return tmp_path / "store"


@pytest.mark.parametrize("what", [".", "policy", "policy/versions/000001"])
def test_verify_recognises_a_store_a_run_and_a_version(cli: Cli, store: Path, what: str) -> None:
    ran = cli("verify", store / what)
    assert ran.code == 0
    assert "all good: 1 version of 1 run" in ran.stdout


def test_verify_names_file_shard_and_bytes(cli: Cli, store: Path) -> None:
    path = store / "policy/versions/000001/model-00001-of-00002.safetensors"
    with path.open("r+b") as file:
        file.seek(300_000)
        file.write(b"damage")
    ran = cli("verify", store)
    assert ran.code == 11
    assert (
        "run policy version 1: model-00001-of-00002.safetensors, shard 2, bytes 262144-524287"
        in ran.stdout
    )
    machine = cli("verify", store, "--json")
    damage = machine.event("damaged")
    assert (damage["start"], damage["stop"], damage["version"]) == (262144, 524288, 1)
    assert machine.event("error")["code"] == "integrity"
    assert machine.event("verified")["damaged"] == 1


def test_verify_names_missing_longer_shorter_and_unknown_files(cli: Cli, store: Path) -> None:
    version = store / "policy/versions/000001"
    (version / "empty.txt").unlink()
    (version / "config.json").unlink()
    (version / "extra.bin").write_bytes(b"x")
    with (version / "sub/tokenizer.json").open("ab") as file:
        file.write(b"more")
    os.truncate(version / "model-00002-of-00002.safetensors", 767_990)
    ran = cli("verify", store)
    assert ran.code == 11
    assert "config.json, shard 0, bytes 0-23: missing" in ran.stdout
    assert "empty.txt: missing" in ran.stdout
    assert "sub/tokenizer.json, bytes 2-5: too long" in ran.stdout
    assert "the file ends at byte 767990" in ran.stdout
    assert "000001/extra.bin belongs to no version" in ran.stderr


def test_verify_names_a_damaged_document_and_leaves_it_in_place(cli: Cli, store: Path) -> None:
    for blob in sorted((store / "policy/blobs").iterdir()):
        data = blob.read_bytes()
        blob.write_bytes(data[:-1] + b"?")
        ran = cli("verify", store)
        assert ran.code == 11
        assert f"blobs/{blob.name}" in ran.stdout
        assert "cannot be checked: its document" in ran.stdout
        assert blob.exists()
        blob.write_bytes(data)
    assert cli("verify", store).code == 0


def test_verify_checks_who_signed(cli: Cli, store: Path, tmp_path: Path) -> None:
    public = tmp_path / "xdg_config_home/shardcast/shardcast.pub"
    assert cli("verify", store, "--pubkey", public).code == 0
    cli("keygen", "--out", tmp_path / "other")
    ran = cli("verify", store, "--pubkey", tmp_path / "other/shardcast.pub")
    assert ran.code == 12


def test_verify_says_when_no_head_names_a_version(cli: Cli, store: Path) -> None:
    (store / "policy/head.json").unlink()
    trust = store / "policy/state/trust.json"
    trust.write_bytes(trust.read_bytes().replace(b'"manifests":{"1"', b'"manifests":{"7"'))
    ran = cli("verify", store)
    assert ran.code == 0
    assert "its digests are not signed" in ran.stderr


def test_verify_refuses_what_is_nothing_of_ours(cli: Cli, tmp_path: Path) -> None:
    assert cli("verify", tmp_path).code == 2
    assert cli("verify", tmp_path / "nowhere").code == 2


def test_verify_of_a_version_that_is_not_there(cli: Cli, store: Path) -> None:
    (store / "policy/versions/000009").mkdir()
    ran = cli("verify", store / "policy/versions/000009")
    assert ran.code == 11
    assert "cannot be checked" in ran.stdout


# --- export -----------------------------------------------------------------------------------


def test_export_writes_plain_files_once(cli: Cli, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = cli("export", "policy", "--store", store, "--out", out, "--json").event("exported")
    head = out / "v1/policy/head"
    assert head.read_bytes() == (store / "policy/head.json").read_bytes()
    assert first["blobs_written"] == len(list((out / "v1/policy/blobs").iterdir()))
    second = cli("export", "policy", "--store", store, "--out", out, "--json").event("exported")
    assert (second["blobs_written"], second["blobs_kept"]) == (0, first["blobs_written"])
    assert not list(out.rglob("*.tmp"))


def test_export_removes_what_the_head_no_longer_reaches(
    cli: Cli, store: Path, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    before = cli("export", "policy", "--store", store, "--out", out, "--json").event("exported")
    (checkpoint / "config.json").write_text("{ }")
    cli("publish", checkpoint, "--run", "policy", "--store", store, "--keep", 1)
    after = cli("export", "policy", "--store", store, "--out", out, "--json").event("exported")
    # config.json, layout, part and manifest are new; the rest of the shards are the same blobs
    assert (after["blobs_written"], after["blobs_removed"]) == (4, 4)
    assert after["blobs_kept"] == before["blobs_written"] - 4


def test_export_stops_at_damage_and_leaves_the_old_head(
    cli: Cli, store: Path, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    cli("export", "policy", "--store", store, "--out", out)
    head = (out / "v1/policy/head").read_bytes()
    (checkpoint / "config.json").write_text("{ }")
    cli("publish", checkpoint, "--run", "policy", "--store", store)
    (store / "policy/versions/000002/config.json").write_text("??")
    ran = cli("export", "policy", "--store", store, "--out", out)
    assert ran.code == 11
    assert (out / "v1/policy/head").read_bytes() == head


def test_export_of_a_run_that_is_not_there(cli: Cli, store: Path, tmp_path: Path) -> None:
    ran = cli("export", "other", "--store", store, "--out", tmp_path / "out")
    assert ran.code == 2
    assert "runs here: policy" in ran.stderr
    assert cli("export", "x", "--store", tmp_path / "none", "--out", tmp_path / "o").code == 2


# --- gc, withdraw, hold -----------------------------------------------------------------------


def test_gc_frees_what_no_head_reaches(cli: Cli, store: Path, checkpoint: Path) -> None:
    shutil.copytree(store / "policy/versions/000001", store / "policy/versions/000007")
    blob = store / "policy/blobs" / f"{'0' * 64}.bin"
    blob.write_bytes(b"x" * 100)
    dry = cli("gc", "--store", store, "--dry-run")
    assert "would free" in dry.stdout
    assert blob.exists()
    event = cli("gc", "--store", store, "--json").event("evicted")
    assert (event["run"], event["versions"], event["blobs"]) == ("policy", [7], 1)
    assert not blob.exists()
    assert not (store / "policy/versions/000007").exists()
    assert cli("verify", store).code == 0


def test_gc_says_that_it_leaves_documents_alone_while_some_are_uploaded(
    cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "UPLOAD_WAIT_S", 0.0)
    blob = store / "policy/blobs" / f"{'0' * 64}.bin"
    blob.write_bytes(b"x")
    uploader = retention.unnamed_lock(Store(store).run("policy"), exclusive=False)
    uploader.acquire()
    try:
        event = cli("gc", "--store", store, "--json").event("evicted")
        assert (event["blobs"], event["uploading"]) == (0, True)
        assert "some are being uploaded" in cli("gc", "--store", store).stdout
        assert blob.exists()
    finally:
        uploader.release()
    event = cli("gc", "--store", store, "--json").event("evicted")
    assert (event["blobs"], event["uploading"]) == (1, False)


def test_gc_leaves_a_run_without_a_head_alone(cli: Cli, store: Path) -> None:
    (store / "other" / "state").mkdir(parents=True)
    ran = cli("gc", "--store", store)
    assert ran.code == 0
    assert "other: no head" in ran.stderr


def test_withdraw_and_hold_change_the_head(cli: Cli, store: Path, checkpoint: Path) -> None:
    cli("publish", checkpoint, "--run", "policy", "--store", store)
    ran = cli("withdraw", "policy", 2, "--store", store)
    assert ran.code == 0
    assert "newest is now 1" in ran.stdout
    assert cli("withdraw", "policy", 2, "--store", store).code == 12
    assert cli("withdraw", "policy", 9, "--store", store).code == 2
    assert cli("withdraw", "policy", 1, "--store", store).stdout.endswith("left to move to\n")
    assert cli("hold", "policy", "--store", store, "--json").event("hold")["hold"] is True
    assert cli("hold", "policy", "--store", store, "--off", "--json").event("hold")["hold"] is False


def test_withdraw_and_hold_need_run_and_key(cli: Cli, store: Path, tmp_path: Path) -> None:
    assert cli("hold", "other", "--store", store).code == 2
    assert cli("hold", "policy", "--store", store, "--to", "http://127.0.0.1:1").code == 2
    assert cli("hold", "policy", "--to", "http://127.0.0.1:1").code == 2
    (tmp_path / "xdg_config_home/shardcast/shardcast.key").unlink()
    ran = cli("hold", "policy", "--store", store)
    assert ran.code == 2
    assert "--key FILE" in ran.stderr


@pytest.mark.parametrize("command", [("withdraw", "policy", 1), ("hold", "policy")])
@pytest.mark.parametrize("remote", [False, True])
def test_withdraw_and_hold_say_which_publisher_they_wait_for(
    cli: Cli,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[object, ...],
    *,
    remote: bool,
) -> None:
    monkeypatch.setattr(announcing, "LOCK_WAIT_S", 0.0)
    token = tmp_path / "token"
    token.write_text("a-token-that-is-long-enough")
    url = "http://127.0.0.1:1"
    where = ("--to", url, "--token-file", token) if remote else ("--store", store)
    memory = RunStore(remote_memory(url, "policy") if remote else store / "policy", "policy")
    with memory.lock("publish"):
        ran = cli(*command, *where)
    assert ran.code == 2
    assert f"process {os.getpid()}; waiting for it" in ran.stderr


# --- inspect ----------------------------------------------------------------------------------


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its signature
        pass


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serves a directory as any static web server does."""
    handler = functools.partial(QuietHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def static(cli: Cli, store: Path, tmp_path: Path) -> Iterator[str]:
    assert cli("export", "policy", "--store", store, "--out", tmp_path / "www").code == 0
    with serving(tmp_path / "www") as url:
        yield url


def test_inspect_shows_head_versions_and_files(cli: Cli, static: str, tmp_path: Path) -> None:
    ran = cli("inspect", "policy", "--from", static)
    assert ran.code == 0
    assert "unverified: no --pubkey was given" in ran.stdout
    for text in ("newest     version 1", "sub/tokenizer.json", "768 kB", "signed this head"):
        assert text in ran.stdout
    public = tmp_path / "xdg_config_home/shardcast/shardcast.pub"
    assert (
        "signature verified"
        in cli("inspect", "policy", "--from", static, "--pubkey", public).stdout
    )
    event = cli("inspect", "policy", "--from", static, "--json").event("inspected")
    assert event["head"]["versions"][0]["version"] == 1
    assert event["layouts"]["1"]["files"][0]["path"] == "config.json"
    assert event["verified"] is False


def test_inspect_says_what_cannot_be_had(cli: Cli, static: str, tmp_path: Path) -> None:
    for blob in (tmp_path / "www/v1/policy/blobs").iterdir():
        blob.unlink()
    ran = cli("inspect", "policy", "--from", static)
    assert ran.code == 0
    assert "its documents are not to be had" in ran.stdout


def test_inspect_fails_by_what_is_wrong(cli: Cli, static: str, tmp_path: Path) -> None:
    cli("keygen", "--out", tmp_path / "other")
    wrong = tmp_path / "other" / "shardcast.pub"
    assert cli("inspect", "policy", "--from", static, "--pubkey", wrong).code == 12
    assert cli("inspect", "policy", "--from", static, "--version", 9).code == 2
    unknown = cli("inspect", "other", "--from", static)
    assert unknown.code == 2
    assert "run 'other' is not known there" in unknown.stderr
    assert cli("inspect", "policy", "--from", "http://127.0.0.1:1").code == 13
    assert cli("inspect", "policy", "--from", "nonsense").code == 2
    (tmp_path / "www/v1/policy/head").write_bytes(b"{}")
    assert cli("inspect", "policy", "--from", static).code == 10


# --- what could go wrong before anything is done ----------------------------------------------


@pytest.mark.parametrize("below", [".", "store", "sub/store"])
def test_a_store_within_the_checkpoint_is_refused_before_anything_is_made(
    cli: Cli, tmp_path: Path, checkpoint: Path, below: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    ran = cli("publish", checkpoint, "--store", checkpoint / below, "--json")
    assert (ran.code, ran.event("error")["code"]) == (2, "usage")
    assert "lies within the checkpoint" in ran.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--step", 2**53 + 1),
        ("--lineage", ""),
        ("--lineage", "x" * 257),
        ("--lineage", "\udcff"),
        ("--metadata", "k=" + "v" * 70_000),
        ("--metadata", "k=\udcff"),
    ],
)
def test_what_no_layout_can_hold_is_a_usage_error_before_anything_is_made(
    cli: Cli, tmp_path: Path, checkpoint: Path, option: str, value: object
) -> None:
    before = sorted(tmp_path.rglob("*"))
    ran = cli("publish", checkpoint, option, value, "--json")
    assert (ran.code, ran.event("error")["code"]) == (2, "usage")
    assert option in ran.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_the_path_in_an_event_does_not_depend_on_the_working_directory(
    cli: Cli, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("publish", checkpoint, "--store", "s", "--json")
    assert ran.event("published")["path"] == str(tmp_path / "s/default/versions/000001")


@pytest.mark.parametrize("token", ["very-secret\nX-Injected: y", "very secret", "very-sécret"])
def test_a_token_that_cannot_be_one_is_refused_and_not_shown(
    cli: Cli, tmp_path: Path, checkpoint: Path, token: str
) -> None:
    arguments = ("publish", checkpoint, "--to", "http://127.0.0.1:9", "--json", "--verbose")
    file = tmp_path / "token"
    file.write_text(token.replace("\n", " "))
    for ran in (
        cli(*arguments, "--token-file", file),
        cli(*arguments, env={"SHARDCAST_TOKEN": token.replace("\n", "\r")}),
    ):
        assert (ran.code, ran.event("error")["code"]) == (2, "usage")
        assert "very" not in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", "CKPT", "--to", "URL"],
        ["relay", "--parent", "URL", "--trust-on-first-use"],
        ["pull", "r", "--from", "URL", "--out", "OUT", "--trust-on-first-use"],
        ["inspect", "r", "--from", "URL"],
        ["status", "URL"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    "url", ["http://u:very-secret@h", "http://u:very-secret@h:x", "u:very-secret@h"]
)
def test_a_password_in_a_url_is_refused_and_not_shown(
    cli: Cli, tmp_path: Path, checkpoint: Path, arguments: list[str], url: str
) -> None:
    words = {"CKPT": str(checkpoint), "URL": url, "OUT": str(tmp_path / "out")}
    ran = cli(
        *(words.get(word, word) for word in arguments), "--json", "--verbose",
        env={"SHARDCAST_TOKEN": "0123456789abcdef"},
    )  # fmt: skip
    assert (ran.code, ran.event("error")["code"]) == (2, "usage")
    assert "very-secret" not in ran.stdout + ran.stderr


# --- directories that are no store ------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["gc"], ["hold", "sub"], ["export", "sub", "--out", "e"]])
def test_a_directory_that_is_no_store_is_left_as_it_is(
    cli: Cli, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli("keygen", "--out", tmp_path / "xdg_config_home" / "shardcast").code == 0
    before = sorted(tmp_path.rglob("*"))
    cli(*arguments, "--store", checkpoint)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_directory_of_one_run_is_not_taken_for_a_store(cli: Cli, store: Path) -> None:
    before = sorted(store.rglob("*"))
    for arguments in (["gc"], ["hold", "blobs"], ["export", "versions", "--out", "e"]):
        ran = cli(*arguments, "--store", store / "policy", "--json")
        assert (ran.code, ran.event("error")["code"]) == (2, "usage")
        assert "directory above" in ran.stderr
    assert sorted(store.rglob("*")) == before


def test_a_dry_run_counts_the_documents_of_what_it_would_remove(
    cli: Cli, tmp_path: Path, checkpoint: Path
) -> None:
    store = tmp_path / "s"
    for _ in range(2):
        assert cli("publish", checkpoint, "--store", store).code == 0
    head = (store / "default" / "head.json").read_bytes()
    assert cli("publish", checkpoint, "--store", store, "--keep", 4).code == 0
    (store / "default" / "head.json").write_bytes(head)  # version 3 is reached by nothing now
    would = cli("gc", "--store", store, "--dry-run", "--json").event("evicted")
    did = cli("gc", "--store", store, "--json").event("evicted")
    assert (would["versions"], would["blobs"], would["bytes"]) == (
        did["versions"], did["blobs"], did["bytes"],
    )  # fmt: skip
    assert did["blobs"] == 3


# --- verify of what is not whole --------------------------------------------------------------


def test_verify_passes_over_a_publication_that_was_killed_at_its_start(
    cli: Cli, store: Path
) -> None:
    (store / "policy" / "state" / "staging" / "000050" / "sub").mkdir(parents=True)
    ran = cli("verify", store, "--json")
    assert ran.code == 0, ran.stderr
    assert ran.event("verified")["versions"] == [{"run": "policy", "version": 1}]


def test_verify_says_that_the_newest_version_is_not_here(cli: Cli, store: Path) -> None:
    shutil.rmtree(store / "policy" / "versions" / "000001")
    ran = cli("verify", store, "--json")
    assert ran.event("verified")["absent"] == [{"run": "policy", "version": 1}]
    assert "version 1 of run 'policy', the newest by its head, is not here" in ran.stderr


def test_verify_reads_no_more_of_a_head_than_a_head_may_have(cli: Cli, store: Path) -> None:
    os.truncate(store / "policy" / "head.json", 1 << 40)
    assert cli("verify", store).code == 10


def test_gc_removes_what_killed_publications_left(cli: Cli, store: Path) -> None:
    state = store / "policy" / "state"
    fresh, stale = state / "staging" / "000050", state / "staging" / "000051"
    for directory in (fresh, stale):
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"x")
    os.utime(stale, (0, 0))
    for name in ("000007.json", "000007.shards"):  # of a version that is gone
        (state / name).write_bytes(b"{}")
    assert cli("gc", "--store", store).code == 0
    assert fresh.exists()
    assert not stale.exists()
    assert {path.name for path in state.glob("0*")} == {"000001.json", "000001.shards"}
    assert cli("verify", store).code == 0


@pytest.mark.parametrize("below", [".", "policy"])
@pytest.mark.parametrize("command", ["pull", "follow"])
def test_no_worker_works_in_a_store(cli: Cli, store: Path, command: str, below: str) -> None:
    before = sorted(store.rglob("*"))
    ran = cli(
        command, "policy", "--from", "http://127.0.0.1:9", "--out", store / below,
        "--trust-on-first-use", "--json",
    )  # fmt: skip
    assert (ran.code, ran.event("error")["code"]) == (2, "usage")
    assert "choose another --out" in ran.stderr
    assert sorted(store.rglob("*")) == before


def test_a_run_s_directory_is_no_checkpoint(cli: Cli, store: Path, tmp_path: Path) -> None:
    ran = cli("publish", store / "policy", "--store", tmp_path / "other", "--json")
    assert (ran.code, ran.event("error")["code"]) == (2, "usage")
    assert not (tmp_path / "other").exists()
    version = store / "policy" / "versions" / "000001"
    assert cli("publish", version, "--store", tmp_path / "other").code == 0


def test_the_command_says_which_store_and_what_to_do(tmp_path: Path, cli: Cli) -> None:
    store, checkpoint = tmp_path / "store", tmp_path / "ckpt"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(bytes(1000))
    claim_role(store, Role.RELAY)
    argv = ("publish", str(checkpoint), "--store", str(store), "--json")
    failed = cli(*argv)
    assert failed.code == 2
    assert f"store {store} is a relay's" in failed.stdout + failed.stderr
    assert cli(*argv, "--take-over").code == 0
    assert role_of(store) is Role.ORIGIN
    failed = cli("publish", str(checkpoint), "--to", "http://127.0.0.1:1", "--take-over")
    assert (failed.code, "--take-over is for a local store" in failed.stderr) == (2, True)
