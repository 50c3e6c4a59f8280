"""How the commands that fill a directory say what they wrote."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_summary(rows: Mapping[str, str], title: str, output: Path) -> None:
    """Print a table of names and values, and in a line of its own, to be copied, where the directory is."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console = Console()
    console.print(table)
    console.print(f"{title}: {output}", soft_wrap=True, highlight=False, markup=False)
