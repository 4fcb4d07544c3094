"""What changed between two versions, tensor by tensor, as ``diff`` and ``inspect`` show it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from shardcast.cli.output import Output, is_terminal, table
from shardcast.cli.units import count, size

if TYPE_CHECKING:
    from shardcast.tensor_changes import Changes, Row

MOST_ROWS: Final = 30
"""So many tensors are listed unless all are asked for: those that cost most."""

_BAR: Final = 24
_TITLES: Final = ("tensor", "type", "change", "changed", "of", "density", "bytes", "codec", "ratio")


def show_changes(out: Output, changes: Changes, *, every: bool) -> None:
    """Show tensors and other bytes: events, a chart on a terminal, else plain lines."""
    for row in changes.tensors:
        out.event("tensor", **members(row))
    for row in changes.others:
        out.event("other_bytes", **members(row))
    if out.json:
        return
    shown, hidden = choose(changes, every=every)
    if is_terminal(sys.stdout):
        _draw(shown)
    elif shown:
        out.result(table(_TITLES, [_cells(row) for row in shown]))
    if hidden:
        out.result(f"and {count(hidden, 'more tensor')}: --all lists every one")
    for line in summary(changes):
        out.result(line)


def choose(changes: Changes, *, every: bool) -> tuple[list[Row], int]:
    """Return the rows to list, and how many are left out."""
    rows = [*changes.tensors, *(row for row in changes.others if row.change != "same")]
    if every:
        return rows, 0
    told = [row for row in rows if row.change != "same" or row.moved]
    told.sort(key=lambda row: (-row.wire_bytes, row.name))
    return told[:MOST_ROWS], len(rows) - len(told[:MOST_ROWS])


def summary(changes: Changes) -> list[str]:
    """Return what the tensors come to."""
    tensors = [row for row in changes.tensors if row.change != "removed"]
    changed = sum(row.changed for row in tensors)
    compared = sum(row.compared for row in tensors)
    wire = sum(row.wire_bytes for row in tensors)
    kinds = ("same", "changed", "added", "removed", "retyped")
    told = [f"{changes.count(kind)} {kind}" for kind in kinds if changes.count(kind)]
    moved = sum(row.moved for row in tensors)
    if moved:
        told.append(f"{moved} moved")
    text = f"{count(len(tensors), 'tensor')}, {size(sum(row.bytes for row in tensors))}"
    lines = [f"{text}: {', '.join(told)}" if told else text]
    if compared:
        line = f"{changed:,} of {compared:,} elements changed ({density(changed / compared)})"
        if changed:
            line += f", {wire / changed:.2f} bytes each"
        lines.append(line)
    return lines


def density(share: float | None) -> str:
    """Return a share as people read it."""
    return "-" if share is None else f"{100 * share:.3g} %"


def ratio(value: float | None) -> str:
    """Return how many times smaller something is."""
    return "-" if value is None else f"{value:,.0f}x" if value >= 99.5 else f"{value:.3g}x"


def members(row: Row) -> dict[str, object]:
    """Return the members of a row's event."""
    return {
        "path" if row.dtype is None else "tensor": row.name,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "bytes": row.bytes,
        "elements": row.elements,
        "change": row.change,
        "old_dtype": row.old_dtype,
        "moved": row.moved,
        "resized": row.resized,
        "compared": row.compared,
        "changed": row.changed,
        "density": row.density,
        "wire_bytes": row.wire_bytes,
        "codec": row.codec,
        "ratio": row.ratio,
    }


def _cells(row: Row) -> tuple[object, ...]:
    change = f"{row.change}, moved" if row.moved else row.change
    kind = row.dtype if row.old_dtype is None else f"{row.old_dtype} -> {row.dtype}"
    compared = row.compared or None
    return (
        row.name,
        kind or "-",
        change,
        row.changed if compared else None,
        compared,
        density(row.density),
        size(row.wire_bytes),
        row.codec,
        ratio(row.ratio),
    )


def _draw(rows: list[Row]) -> None:
    """Draw a table with a bar for what each tensor costs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (*_TITLES, "share of the bytes"):
        left = title in ("tensor", "type", "change", "codec", "share of the bytes")
        drawn.add_column(title, justify="left" if left else "right", no_wrap=title != "tensor")
    most = max((row.wire_bytes for row in rows), default=0) or 1
    for row in rows:
        cells = [Text("-" if cell is None else printable(str(cell))) for cell in _cells(row)]
        bar = Text("█" * round(_BAR * row.wire_bytes / most) or "▏", style="cyan")
        drawn.add_row(*cells, bar)
    Console(soft_wrap=False).print(drawn)


def printable(text: str) -> str:
    """Return text without what would steer the terminal: names come from others."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
