"""The result of a check, and its line in the terminal."""

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.decode.errors import InputError

State = Literal["ok", "warning", "error"]
SYMBOLS = {"ok": "✓", "warning": "!", "error": "✗"}
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    state: State
    name: str
    text: str
    remedy: str = ""
    """Advice, for warnings."""

    @classmethod
    def of(cls, error: InputError, name: str, *fields: str) -> "Finding":
        """Return an error as a finding; the line begins with its name, in place of one of these fields."""
        text = " ".join(str(error).split())
        for field in (name, *fields):
            text = text.removeprefix(f"{field}: ")
        return cls("error", name, text)


def report(finding: Finding, console: Console) -> None:
    """Print a finding, with a hanging indent on a terminal, in one line elsewhere."""
    text = Text(finding.text)
    if finding.remedy:
        text.append(f" → {finding.remedy}", "dim")
    symbol = Text(SYMBOLS[finding.state], STYLES[finding.state])
    if not console.is_terminal:
        console.print(Text.assemble(symbol, f" {finding.name}: ", text), soft_wrap=True, highlight=False)
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=14, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(symbol, Text(finding.name, "bold"), text)
    console.print(grid, highlight=False)
