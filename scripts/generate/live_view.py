"""Text in a terminal as it is decoded, every token in the colour of how it came about, above the running figures."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.decode import Counts
from draftsmith.decode.clock import speed
from draftsmith.decode.speculative import Round
from draftsmith.scripts.summary import PICTURES

# Corrections are underlined too: many of them are spaces, and red beside green is no difference to some eyes.
STYLES = {"prompt": "dim", "accepted": "green", "corrected": "red underline", "bonus": "cyan", "undrafted": ""}


class Detokenizer:
    """Turns tokens into text as they come: the prompt and the pieces join to the decoded whole.

    A window of tokens is decoded, from a place where the text was whole, and what it says beyond the text that is out
    already is the next piece. So spaces that depend on the token before come out right, and the bytes of a character
    are held back, U+FFFD as they decode to, until its last token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]):
        self._tokenizer, self._window, self._out = tokenizer, list(prompt_ids), len(prompt_ids)
        self.prompt = self._shown = self._decode()

    def push(self, token: int) -> str:
        """Return the text that a token completes, possibly none."""
        self._window.append(token)
        text = self._decode()
        piece = text[len(self._shown) :]
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._window = self._window[self._out :]
        self._out, self._shown = len(self._window), self._decode()
        return piece

    def flush(self) -> str:
        """Return what is held back still, at the end of the text."""
        return self._decode()[len(self._shown) :]

    def _decode(self) -> str:
        # A clean-up of spaces would take back what is out already.
        options: Any = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(self._window, **options))


class Plain:
    """For pipes and files: the text alone, as it is."""

    def __init__(self, file: IO[str]):
        self._file = file

    def write(self, text: str, kind: str) -> None:
        """Write the text."""
        self._file.write(text)

    def show(self, status: Text) -> None:
        """Make the text visible."""
        self._file.flush()

    def close(self) -> None:
        """End the last line."""
        self._file.write("\n")
        self._file.flush()


class Terminal:
    """Coloured text above a status line: only the row that is being written and the status are drawn again."""

    def __init__(self, console: Console):
        self._console, self._row, self._rows = console, Text(), list[Text]()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def write(self, text: str, kind: str) -> None:
        """Append text of a kind, one of `STYLES`, and set finished rows aside."""
        for i, line in enumerate(text.split("\n")):
            if i:
                self._end_row()
            self._row.append(line.translate(PICTURES), STYLES[kind])
            self._row.expand_tabs(8)
            while (end := row_end(self._row.plain, self._console.width)) is not None:
                row, self._row = self._row.divide([end])
                self._rows.append(row)

    def show(self, status: Text) -> None:
        """Print the rows set aside above the row being written and the status."""
        # The terminal echoes an interrupt as ^C behind the status: no room for it would scroll the screen by a row.
        status.truncate(max(self._console.width - 3, 1), overflow="ellipsis")
        self._draw(Group(self._row, Text(), status))

    def close(self) -> None:
        """Print the last row and take the status away."""
        if self._row:
            self._end_row()
        self._draw(Text())
        self._live.stop()

    def _end_row(self) -> None:
        self._rows.append(self._row)
        self._row = Text()

    def _draw(self, bottom: Group | Text) -> None:
        self._live.update(bottom)
        with self._console:  # in one write: the rows with the old bottom below them, and the new one in its place
            if self._rows:
                self._console.print(Text("\n").join(self._rows), no_wrap=True, overflow="crop")
            self._live.refresh()
        self._rows = []


def row_end(line: str, width: int) -> int | None:
    """Return where a terminal row of `width` cells ends, after a word if there is one; None if the line fits."""
    cells = 0
    for i, character in enumerate(line):
        cells += cell_len(character)
        if cells > width:
            indent = len(line) - len(line.lstrip(" "))
            return line.rfind(" ", indent, i + 1) + 1 or max(i, 1)
    return None


@dataclass
class Progress:
    """Watches the rounds: draws their tokens, and counts. The seconds leave out what the drawing takes."""

    screen: Plain | Terminal
    detokenizer: Detokenizer
    counts: Counts = field(default_factory=Counts)
    kinds: Counter[str] = field(default_factory=Counter)
    """Emitted tokens by how they came about."""
    seconds: float = 0.0
    """Decoding time up to the last round."""

    def begin(self) -> None:
        """Show the prompt and start the clock."""
        self.screen.write(self.detokenizer.prompt, "prompt")
        self.screen.show(self.status())
        self._drawn = time.perf_counter()

    def __call__(self, round: Round) -> None:
        """Draw a round's tokens and the status."""
        self.seconds += time.perf_counter() - self._drawn
        self.counts += round.counts
        kinds = kinds_of(round)
        self.kinds.update(kinds)
        for token, kind in zip(round.tokens, kinds, strict=True):
            self.screen.write(self.detokenizer.push(token), kind)
        if round.done:
            self.screen.write(self.detokenizer.flush(), kinds[-1])
        self.screen.show(self.status())
        self._drawn = time.perf_counter()

    def tokens_per_second(self) -> float:
        """Return emitted tokens over decoding time, the prompt's forward included; 0 before the first."""
        return self.counts.num_emitted_tokens / self.seconds if self.seconds else 0.0

    def status(self) -> Text:
        """Return the running figures in one line; the names of the kinds are the legend of the colours."""
        counts, tau = self.counts, self.counts.mean_acceptance_length() or 0.0
        parts = [Text(f"τ {tau:.2f}", "bold"), Text(f"{speed(self.tokens_per_second())} tokens/s")]
        parts.append(Text(f"{counts.num_accepted_tokens}/{counts.num_draft_tokens} accepted", STYLES["accepted"]))
        parts += [Text(f"{self.kinds[kind]} {kind}", STYLES[kind]) for kind in ("corrected", "bonus")]
        if self.kinds["undrafted"]:
            parts.append(Text(f"{self.kinds['undrafted']} undrafted", STYLES["undrafted"]))
        parts.append(Text(f"{counts.num_drafts} rounds", "dim"))
        return Text("  ").join(parts)


def kinds_of(round: Round) -> list[str]:
    """Say how each token of a round came about: accepted, and after those corrected, a bonus, or undrafted."""
    last = "undrafted" if not round.drafted else "bonus" if round.bonus else "corrected"
    return ["accepted"] * round.accepted + [last] * (len(round.tokens) - round.accepted)
