"""A live view of decoding: text with each token coloured by its origin, above a status line."""

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

# Corrections are also underlined: many are spaces, and not everyone can tell red from green.
STYLES = {"prompt": "dim", "accepted": "green", "corrected": "red underline", "bonus": "cyan", "undrafted": ""}


class Detokenizer:
    """An incremental detokenizer: the prompt and all pieces join to the decoded whole.

    A window of tokens since the last complete piece is decoded, and its text past the pieces returned so far is the
    next one. So spaces that depend on the token before come out right, and an incomplete character, which decodes to
    U+FFFD, waits for its last token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]):
        self._tokenizer, self._window, self._out = tokenizer, list(prompt_ids), len(prompt_ids)
        self.prompt = self._shown = self._decode()

    def push(self, token: int) -> str:
        """Return the text that a token completes, possibly empty."""
        self._window.append(token)
        text = self._decode()
        piece = text[len(self._shown) :]
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._window = self._window[self._out :]
        self._out, self._shown = len(self._window), self._decode()
        return piece

    def flush(self) -> str:
        """Return the rest of the text, at its end."""
        return self._decode()[len(self._shown) :]

    def _decode(self) -> str:
        # A clean-up of spaces would change text that was already returned.
        options: Any = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(self._window, **options))


class Plain:
    """A screen for pipes and files: plain text without a status."""

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
    """A screen with coloured text above a status line; only the last row and the status are redrawn."""

    def __init__(self, console: Console):
        self._console, self._row, self._rows = console, Text(), list[Text]()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def write(self, text: str, kind: str) -> None:
        """Append text of a kind in `STYLES`; finished rows wait for `show`."""
        for i, line in enumerate(text.split("\n")):
            if i:
                self._end_row()
            self._row.append(line.translate(PICTURES), STYLES[kind])
            self._row.expand_tabs(8)
            while (end := row_end(self._row.plain, self._console.width)) is not None:
                row, self._row = self._row.divide([end])
                self._rows.append(row)

    def show(self, status: Text) -> None:
        """Print the finished rows, the row being written and the status."""
        # The terminal echoes an interrupt as ^C after the status; without room for it the screen would scroll.
        status.truncate(max(self._console.width - 3, 1), overflow="ellipsis")
        self._draw(Group(self._row, Text(), status))

    def close(self) -> None:
        """Print the last row and remove the status."""
        if self._row:
            self._end_row()
        self._draw(Text())
        self._live.stop()

    def _end_row(self) -> None:
        self._rows.append(self._row)
        self._row = Text()

    def _draw(self, bottom: Group | Text) -> None:
        self._live.update(bottom)
        with self._console:  # one write for the rows and the new bottom, against flicker
            if self._rows:
                self._console.print(Text("\n").join(self._rows), no_wrap=True, overflow="crop")
            self._live.refresh()
        self._rows = []


def row_end(line: str, width: int) -> int | None:
    """Return the end of a terminal row of `width` cells, after a word if possible; None if the line fits."""
    cells = 0
    for i, character in enumerate(line):
        cells += cell_len(character)
        if cells > width:
            indent = len(line) - len(line.lstrip(" "))
            return line.rfind(" ", indent, i + 1) + 1 or max(i, 1)
    return None


@dataclass
class Progress:
    """An observer that draws the tokens of each round and counts them; `seconds` of decoding exclude the drawing."""

    screen: Plain | Terminal
    detokenizer: Detokenizer
    counts: Counts = field(default_factory=Counts)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

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
        """Return emitted tokens ÷ decoding time, the prompt's forward included; 0 before the first round."""
        return self.counts.num_emitted_tokens / self.seconds if self.seconds else 0.0

    def status(self) -> Text:
        """Return the current figures in one line; the names of the kinds are the legend of the colours."""
        counts, tau = self.counts, self.counts.mean_acceptance_length() or 0.0
        parts = [Text(f"τ {tau:.2f}", "bold"), Text(f"{speed(self.tokens_per_second())} tokens/s")]
        parts.append(Text(f"{counts.num_accepted_tokens}/{counts.num_draft_tokens} accepted", STYLES["accepted"]))
        parts += [Text(f"{self.kinds[kind]} {kind}", STYLES[kind]) for kind in ("corrected", "bonus")]
        if self.kinds["undrafted"]:
            parts.append(Text(f"{self.kinds['undrafted']} undrafted", STYLES["undrafted"]))
        parts.append(Text(f"{counts.num_drafts} rounds", "dim"))
        return Text("  ").join(parts)


def kinds_of(round: Round) -> list[str]:
    """Return the origin of each token of a round: accepted, and the last corrected, a bonus, or undrafted."""
    last = "undrafted" if not round.drafted else "bonus" if round.bonus else "corrected"
    return ["accepted"] * round.accepted + [last] * (len(round.tokens) - round.accepted)
