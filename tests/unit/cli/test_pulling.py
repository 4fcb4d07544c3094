"""pull in this process, from a static server: events, and exit codes by what is wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from shardcast import announcing, keys
from shardcast.cli.output import EVENT_MEMBERS, unix_ms
from shardcast.cli.serving import make_view, servable_head
from shardcast.config import NetConfig
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head
from shardcast.protocol.succession import renewed
from shardcast.store.run import RunStore
from tests.unit.cli.conftest import Cli, Ran
from tests.unit.cli.test_publishing import serving

Pull = Callable[..., Ran]


@pytest.fixture
def store(cli: Cli, checkpoint: Path, tmp_path: Path) -> Path:
    assert cli("publish", checkpoint, "--run", "policy", "--store", tmp_path / "store").code == 0
    return tmp_path / "store"


@pytest.fixture
def public(tmp_path: Path) -> Path:
    return tmp_path / "xdg_config_home/shardcast/shardcast.pub"


@pytest.fixture
def pull(cli: Cli, store: Path, public: Path, tmp_path: Path) -> Iterator[Pull]:
    """Exports the store and pulls from what was exported."""
    with serving(tmp_path / "www") as url:

        def run(*options: object, key: bool = True, run: str = "policy") -> Ran:
            assert cli("export", "policy", "--store", store, "--out", tmp_path / "www").code == 0
            trust = ["--pubkey", public] if key else []
            return cli(
                "pull", run, "--from", url, "--out", tmp_path / "out", "--durability", "none",
                *trust, *options,
            )  # fmt: skip

        yield run


def test_pull_brings_what_was_published(pull: Pull, checkpoint: Path, tmp_path: Path) -> None:
    ran = pull("--json")
    assert ran.code == 0, ran.stderr
    ready, committed = ran.event("ready"), ran.event("committed")
    for event in (ready, committed):
        assert set(EVENT_MEMBERS) <= set(event)
        assert (event["run"], event["version"]) == ("policy", 1)
    assert ready["bytes_fetched"] > 0
    here = Path(committed["path"])
    assert here == (tmp_path / "out/current").resolve()
    for file in checkpoint.rglob("*"):
        if file.is_file():
            assert (here / file.relative_to(checkpoint)).read_bytes() == file.read_bytes()


def test_pull_of_what_is_here_says_committed_again_and_fetches_nothing(pull: Pull) -> None:
    first = pull()
    assert "committed  policy version 1" in first.stdout
    assert "was here already" in pull().stdout
    assert pull("--json").event("committed")["bytes_fetched"] == 0


def test_a_deadline_is_a_time(pull: Pull) -> None:
    assert pull("--deadline", "soon").code == 2
    assert pull("--deadline", "0").code == 2
    assert pull("--deadline", "1h").code == 0


def test_stdout_is_events_and_nothing_else(pull: Pull) -> None:
    for event in pull("--json").events:
        assert event["event"] in {"head", "source", "progress", "ready", "committed"}
        assert isinstance(event["t"], int)


def test_a_version_may_be_chosen_by_number_or_manifest(
    pull: Pull, cli: Cli, store: Path, checkpoint: Path
) -> None:
    first = cli("publish", checkpoint, "--run", "policy", "--store", store, "--json")
    (checkpoint / "config.json").write_text("{  }")
    cli("publish", checkpoint, "--run", "policy", "--store", store)
    assert pull("--version", 1, "--json").event("committed")["version"] == 1
    manifest = first.event("published")["manifest"]
    assert pull("--manifest", manifest, "--json").event("committed")["version"] == 2
    assert pull("--json").event("committed")["version"] == 3
    assert pull("--version", 99).code == 2
    assert pull("--version", 1, "--manifest", manifest).code == 2
    assert pull("--manifest", "nonsense").code == 2


def test_trust_is_pinned_or_remembered_and_never_guessed(
    pull: Pull, cli: Cli, tmp_path: Path
) -> None:
    nobody = pull("--json", key=False)
    assert nobody.code == 2
    assert nobody.event("error")["code"] == "usage"
    assert nobody.event("error")["run"] == "policy"
    assert "--trust-on-first-use" in nobody.stderr
    assert pull("--trust-on-first-use").code == 2  # and a pin
    assert pull("--trust-on-first-use", key=False).code == 0
    assert pull(key=False).code == 0  # remembered
    cli("keygen", "--out", tmp_path / "other")
    wrong = pull("--pubkey", tmp_path / "other/shardcast.pub", key=False)
    assert wrong.code == 12
    assert "hint: compare the key ids" in wrong.stderr


def test_a_withdrawn_version_is_refused(
    pull: Pull, cli: Cli, store: Path, checkpoint: Path
) -> None:
    cli("publish", checkpoint, "--run", "policy", "--store", store)
    cli("withdraw", "policy", 2, "--store", store)
    ran = pull("--version", 2, "--json")
    assert ran.code == 12
    assert ran.event("error")["code"] == "withdrawn"
    assert pull("--json").event("committed")["version"] == 1


def test_an_expired_head_is_refused_unless_accepted(
    pull: Pull, store: Path, tmp_path: Path
) -> None:
    signer = keys.load_signer(tmp_path / "xdg_config_home/shardcast/shardcast.key")
    week_ago = 8 * 24 * 3600 * 1000
    run = RunStore(store / "policy", "policy")
    state = run.read_trust()
    assert state is not None
    (store / "policy/state/trust.json").unlink()
    (store / "policy/head.json").rename(tmp_path / "head")
    head = decode_head(open_unverified((tmp_path / "head").read_bytes())[1])
    issue = announcing.issue_for("policy", [signer], unix_ms() - week_ago, 1000)
    old = msgspec.structs.replace(head, sequence=1)
    announcing.announce(run, renewed(old, issue), [signer], issue)
    ran = pull("--json")
    assert ran.code == 12
    assert ran.event("error")["code"] == "expired"
    assert "--accept-expired" in pull().stderr
    assert pull("--accept-expired").code == 0


def test_damage_at_every_source_is_an_integrity_error(
    pull: Pull, cli: Cli, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.worker.NetConfig", lambda: NetConfig(give_up_after_s=1.0))
    cli("export", "policy", "--store", store, "--out", tmp_path / "www")
    blobs = sorted((tmp_path / "www/v1/policy/blobs").iterdir(), key=lambda p: p.stat().st_size)
    data = blobs[-1].read_bytes()
    blobs[-1].write_bytes(b"?" + data[1:])  # export does not write it again
    ran = pull("--json")
    assert ran.code == 11
    assert blobs[-1].stem in ran.event("error")["message"]


def test_a_directory_belongs_to_one_run(pull: Pull) -> None:
    assert pull().code == 0
    ran = pull(run="other")
    assert ran.code == 2
    assert "belongs to run 'policy'" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["policy", "--from", "http://127.0.0.1:1", "--out", "o"], 2),  # no key
        (["policy", "--out", "o", "--trust-on-first-use"], 2),  # no source
        (["policy", "--from", "http://127.0.0.1:1", "--trust-on-first-use"], 2),  # no out
        (["Bad Run", "--from", "http://127.0.0.1:1", "--out", "o", "--trust-on-first-use"], 2),
        (["policy", "--from", "gopher://x", "--out", "o", "--trust-on-first-use"], 2),
    ],
)
@pytest.mark.parametrize("command", ["pull", "follow"])
def test_wrong_options_are_exit_2(
    cli: Cli, command: str, arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli(command, *arguments).code == code


# --- what `follow --serve` shows of OUT --------------------------------------------------------


def test_a_head_is_served_once_its_newest_version_is_committed(
    store: Path, cli: Cli, checkpoint: Path
) -> None:
    run = RunStore(store / "policy", "policy")
    assert servable_head(run) == run.read_head()
    (store / "policy/versions/000001").rename(store / "policy/elsewhere")
    assert servable_head(run) is None
    (store / "policy/elsewhere").rename(store / "policy/versions/000001")
    cli("withdraw", "policy", 1, "--store", store)
    assert servable_head(run) is None
    (store / "policy/head.json").write_bytes(b"{}")
    assert servable_head(run) is None
    (store / "policy/head.json").unlink()
    assert servable_head(run) is None


def test_the_view_of_out_is_made_once_and_repaired(tmp_path: Path) -> None:
    view = make_view(tmp_path / "out", "policy")
    (tmp_path / "out/versions/000001").mkdir(parents=True)
    assert (view / "versions/000001").is_dir()
    (view / "blobs").unlink()
    (view / "blobs").symlink_to("/nowhere")
    assert make_view(tmp_path / "out", "policy") == view
    assert (view / "blobs").readlink() == tmp_path / "out/blobs"
