"""What a worker fetches that is eight versions behind, against one that took every version.

Real programs on loopback: a publisher with `--delta-bases 2,4,8`, an origin, two workers that pull
from it: one every version, one only the first and the last. For bf16 weights without masters, where
later steps touch much the same elements, and for fp32 masters, where changes add up. A third worker
pulls first and last from a run without further bases: its way is the chain of single deltas.
"""

from __future__ import annotations

from pathlib import Path

from loadtest import tables
from loadtest.checkpoints import bytes_below
from loadtest.materialize import compare
from loadtest.scenario import MB, Check, Report, Settings, Size, main
from loadtest.topology import Relay, Tree, last
from loadtest.training import REGIMES, Training

BEHIND = 8
SKIP_RATIO = 0.6
CHAIN_RATIO = 1.0
RUNS = {"bf16": "adam-bf16", "fp32": "adam"}

_TIMEOUT_S = 120.0


def write_versions(settings: Settings, regime: str) -> list[Path]:
    """Write a first version and eight more."""
    root = settings.fresh(f"checkpoints-{regime}")
    training = Training(settings.bytes, REGIMES[regime])
    versions = []
    for number in range(BEHIND + 1):
        if number:
            training.step()
        versions.append(root / f"{number:03}")
        training.write(versions[-1])
    return versions


def pull(tree: Tree, origin: Relay, name: str) -> tuple[int, list[int]]:
    """Bring a worker to the newest version; return what it fetched, and by way of what."""
    process = tree.pull(tree.root / name, sources=[origin.url], name=name, timeout=_TIMEOUT_S)
    ready = last(process, "ready")
    return int(ready["bytes_fetched"]), list(ready["via"])


def run_side(
    settings: Settings, versions: list[Path], name: str, *options: str
) -> tuple[list[int], int, list[int]]:
    """Publish all; return what each single step cost, what all at once cost, and by way of what."""
    steps: list[int] = []
    with Tree(settings.fresh(name)) as tree:
        keep = ["--keep", str(BEHIND + 2), *options]
        tree.publish(versions[0], *keep)
        origin = tree.origin()
        for worker in ("behind", "every"):
            pull(tree, origin, worker)
        for checkpoint in versions[1:]:
            tree.publish(checkpoint, *keep)
            steps.append(pull(tree, origin, "every")[0])
        fetched, via = pull(tree, origin, "behind")
        compare(versions[-1], tree.root / "behind" / "current")
        compare(versions[-1], tree.root / "every" / "current")
    return steps, fetched, via


def measure(settings: Settings) -> Report:
    """Compare one pull over eight versions with eight pulls."""
    checks: list[Check] = []
    samples: dict[str, list[float]] = {}
    total = 0
    for name, regime in RUNS.items():
        if settings.quick and name != "bf16":
            continue
        versions = write_versions(settings, regime)
        total = bytes_below(versions[0])
        steps, skipped, _ = run_side(settings, versions, f"{name}-skip", "--delta-bases", "2,4,8")
        chain, over_chain, via = run_side(settings, versions, f"{name}-chain")
        limit = SKIP_RATIO if name == "bf16" else CHAIN_RATIO
        checks += [
            Check(f"{name}_skip_vs_singles", skipped / sum(steps), limit, "of the bytes"),
            Check(f"{name}_chain_vs_singles", over_chain / sum(chain), CHAIN_RATIO, "of the bytes"),
        ]
        samples |= {
            f"{name}_single_bytes": [float(count) for count in steps],
            f"{name}_skip_bytes": [float(skipped)],
            f"{name}_chain_single_bytes": [float(count) for count in chain],
            f"{name}_chain_bytes": [float(over_chain)],
            f"{name}_chain_via": [float(number) for number in via],
        }
    return Report(
        checks=checks,
        samples=samples,
        conditions={
            "version_bytes": total,
            "behind": BEHIND,
            "delta_bases": "2,4,8; and none for the chain",
            "regimes": "made up, AdamW at 1e-6: bf16 weights only, and fp32 masters",
            "counted": "bytes_fetched of `ready`: documents, delta parts, blobs; not heads",
        },
    )


def as_table(report: Report) -> list[str]:
    """Return the report as paragraphs and a table."""
    seen = report.samples
    names = ["weights", "8 single deltas", "one delta over 8", "of that"]
    names += ["the chain in one pull", "of 8 single ones"]
    rows = []
    for name, what in (("bf16", "bf16 only"), ("fp32", "fp32 masters")):
        singles = sum(seen[f"{name}_single_bytes"])
        skip, chain = seen[f"{name}_skip_bytes"][0], seen[f"{name}_chain_bytes"][0]
        row = [what, f"{singles:,.0f}", f"{skip:,.0f}", f"{skip / singles:.2f}", f"{chain:,.0f}"]
        rows.append([*row, f"{chain / sum(seen[f'{name}_chain_single_bytes']):.2f}"])
    about = (
        f"`python -m loadtest.skip_deltas`: a worker 8 versions behind, bytes that it fetched (documents "
        f"included) against a worker that pulled every version. Versions of "
        f"{report.conditions['version_bytes'] / 1e6:.1f} MB, {report.conditions['regimes']}, one step a "
        "version. Publisher with `--keep 10 --delta-bases 2,4,8`; for the chain without further bases. "
        "Bytes decide here, no clock."
    )
    return [about, tables.table(names, rows)]


if __name__ == "__main__":
    main(
        measure,
        name="skip_deltas",
        full=Size(45 * MB, 1),
        quick=Size(12 * MB, 1),
        table=("A worker that is eight versions behind", as_table),
    )
