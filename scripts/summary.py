"""Printed output of several commands: summaries of written files, tables of figures, and text of models."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

DOUBTFUL = "These costs were measured twice and do not agree, so predicted speed-ups may be wrong; measure again"
SHOWN_DOUBTS = 3

# A model's text must not control the terminal: control characters are shown as their pictures, from U+2400.
PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
PICTURES |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def print_summary(rows: Mapping[str, str], title: str, output: Path) -> None:
    """Print a table of names and values, and the directory in a line of its own, to be copied."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console = Console()
    console.print(table)
    console.print(f"{title}: {output}", soft_wrap=True, highlight=False, markup=False)


def print_doubts(console: Console, doubts: Sequence[str]) -> None:
    """Print the first costs that were measured twice and do not agree; a noisy machine has a line for each round."""
    if not doubts:
        return
    more = len(doubts) - SHOWN_DOUBTS
    console.print(f"{DOUBTFUL}:", highlight=False)
    for line in doubts[:SHOWN_DOUBTS]:
        console.print(f"  {line}", highlight=False, markup=False)
    if more > 0:
        console.print(f"  and {more} more, which the report names", highlight=False)


def figures_table(columns: Sequence[str], names: str, title: str, caption: str | None = None) -> Table:
    """Return an empty table of figures; long names in the column `names` wrap, and no figure is cut off."""
    table = Table(
        title=escape(title), caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    table.title_justify = table.caption_justify = "left"
    for name in columns:
        if name == names:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table
