"""`draftsmith generate`: decode one prompt in a terminal, every token in the colour of how it came about."""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

import torch
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import (
    Counts,
    DraftModelProposer,
    RetokenizedProposer,
    autoregressive_generate,
    speculative_generate,
)
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.proposers.draft_model import DynamicTree
from draftsmith.decode.proposers.protocol import Proposal, Proposer, StatelessProposer
from draftsmith.decode.rules import as_rule
from draftsmith.decode.speculative import Round
from draftsmith.decode.tree import Tree
from draftsmith.train.cli import parse_config, run
from draftsmith.train.models import (
    DTYPES,
    check_head,
    default_device,
    load_model,
    load_tokenizer,
)
from draftsmith.train.prompts import Prompt, encode_prompt

PROPOSERS = ("draft", "prompt_lookup", "lookahead", "blind", "early_exit", "none")
MODELS = ("draft", "early_exit")  # those that are models: their confidence says something, and they can grow trees
# Corrections are underlined too: many of them are spaces, and red beside green is no difference to some eyes.
STYLES = {"prompt": "dim", "accepted": "green", "corrected": "red underline", "bonus": "cyan", "undrafted": ""}
# What a model writes must not steer the terminal: control characters are shown as their pictures, U+2400 on.
PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
PICTURES |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
INTERRUPTED, BROKEN_PIPE = 128 + 2, 128 + 13  # the exit codes a shell gives for SIGINT and SIGPIPE


@dataclass
class GenerateConfig:
    """Try a target with a drafter on one prompt, and watch in colour which tokens the drafter got right."""

    target: str
    """The target: a model directory or hub id."""
    prompt: str
    """The text to go on from; `-` reads it from standard input, without its last newline."""
    draft: str | None = None
    """The draft model, for the proposer `draft`. If its tokenizer is another than the target's, in more than the ids of
    its tokens, its text is re-encoded: at temperature 0 alone, in chains."""
    proposer: str = "draft"
    """What drafts: draft, prompt_lookup, lookahead, blind, early_exit, or none for plain decoding."""
    exit_layers: int | None = None
    """The target's layers that draft, for the proposer `early_exit`."""
    draft_length: int = 4
    """γ, drafted tokens a round; of a tree its depth."""
    width: int = 0
    """Draft a tree grown by probability, so many children a node and `width`·γ nodes in all; 0 drafts a chain."""
    rule: str = "exact"
    """Which drafted tokens stand: exact, which is lossless, or the lossy typical, threshold or cascade."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this much probability; 1 for all."""
    max_new_tokens: int = 128
    """Tokens of the text at most."""
    chat: bool = False
    """Put the prompt into the tokenizer's chat template, as a user's turn."""
    compare: bool = False
    """Decode plainly too, and say how fast that was and whether the texts are identical."""
    seed: int = 0
    """Seeds the sampling."""
    dtype: str = "bfloat16"
    """Weights and arithmetic of all models. T=0 texts are identical for certain in float32 and float64 only."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""

    def __post_init__(self) -> None:
        if self.proposer not in PROPOSERS:
            raise InputError(f"proposer: expected one of {', '.join(PROPOSERS)}, found {self.proposer!r}")
        for proposer, name in (("draft", "draft"), ("early_exit", "exit_layers")):
            if self.proposer == proposer and getattr(self, name) is None:
                raise InputError(f"{name}: expected one with the proposer {proposer}, found none")
        for name, least in (("draft_length", 1), ("max_new_tokens", 1), ("exit_layers", 1), ("width", 0), ("top_k", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name}: expected at least {least}, found {value}")
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature: expected a finite number, 0 or more, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: expected more than 0 and at most 1, found {self.top_p}")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")
        as_rule(self.rule)
        for name, wanted in (("width", self.width > 0), ("rule", self.rule == "cascade")):
            if wanted and self.proposer not in MODELS:
                raise InputError(
                    f"{name}: expected a proposer that is a model ({' or '.join(MODELS)}) with {name} "
                    f"{getattr(self, name)}, found {self.proposer}"
                )
        if self.compare and self.proposer == "none":
            raise InputError("compare: expected a proposer that drafts, found none")


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


class Screen(Protocol):
    """Where the text appears."""

    def write(self, text: str, kind: str) -> None:
        """Go on with a piece of text; `kind` is one of `STYLES`."""

    def show(self, status: Text) -> None:
        """Make what was written visible, and the status beside it."""

    def close(self) -> None:
        """End the text; the status goes."""


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
        """Append text, and set finished rows aside."""
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

    screen: Screen
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
        self.counts += Counts.of_round(round.drafted, round.accepted, len(round.tokens), nodes=round.nodes)
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
        parts = [Text(f"τ {tau:.2f}", "bold"), Text(f"{self.tokens_per_second():.0f} tokens/s")]
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


class NoDraft(StatelessProposer):
    """Drafts nothing: each round is one token of plain decoding, and can be watched like any other."""

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Return empty drafts."""
        return [Proposal(context.new_zeros(0), None, Tree.chain(0)) for context in contexts]


def generate(config: GenerateConfig, console: Console, errors: Console) -> int:
    """Decode the prompt, the text on `console` and a summary on `errors`, and return the exit code.

    The text is coloured where `console` is a terminal that may be coloured, and is plain elsewhere. What was written
    stands when the user interrupts it.

    Raises:
        InputError: models, tokenizers or a prompt that do not fit.
    """
    prompt = _prompt(config)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    ids = _encode(config, prompt, tokenizer)
    target = load_model(config.target, field="target", dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    check_head(target, tokenizer, "target")
    _check_positions(config, target, len(ids), "target")
    proposer = _proposer(config, target, tokenizer, len(ids))
    # `generate` fills what is left open from here: only where a text ends may come from the target, not how it samples.
    ends = target.generation_config.eos_token_id
    target.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    input_ids = torch.tensor([ids], device=default_device())
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    options: dict[str, Any] = {"do_sample": config.temperature > 0, "seed": config.seed}
    options |= sampling if config.temperature > 0 else {}

    def speculative(new: int, progress: Progress | None = None) -> DecodeOutput:
        return speculative_generate(
            target, proposer, input_ids, draft_length=config.draft_length, rule=config.rule, max_new_tokens=new,
            observer=progress, **options,
        )  # fmt: skip

    def plain(new: int) -> DecodeOutput:
        return autoregressive_generate(target, input_ids, max_new_tokens=new, **options)

    speculative(2)  # the first forwards allocate
    coloured = console.is_terminal and not console.is_dumb_terminal and not console.no_color
    screen: Screen = Terminal(console) if coloured else Plain(console.file)
    progress = Progress(screen, Detokenizer(tokenizer, ids))
    output = None
    try:
        try:
            progress.begin()
            output = speculative(config.max_new_tokens, progress)
        finally:
            screen.close()
        _summarise(config, progress, output, errors)
        if config.compare:
            with errors.status("decoding plainly"):
                plain(2)
                start = time.perf_counter()
                other = plain(config.max_new_tokens)
                other_sequence = other.sequences[0].tolist()  # waits for the device
                seconds = time.perf_counter() - start
            compared = _comparison(config, progress, output.sequences[0].tolist(), other_sequence, len(ids), seconds)
            errors.print(compared, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        if output is None:
            _summarise(config, progress, output, errors)
        return INTERRUPTED
    return 0


def _prompt(config: GenerateConfig) -> str:
    text = config.prompt
    if text == "-":
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"prompt: expected UTF-8 on standard input, found: {error}") from error
    if not text:
        raise InputError("prompt: expected some text, found an empty string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # a command line's bytes that are no UTF-8 arrive as lone surrogates
        raise InputError("prompt: expected UTF-8 text, found bytes that are none") from error
    return text


def _encode(config: GenerateConfig, prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not config.chat:
        return encode_prompt(Prompt("prompt", prompt, None, None), tokenizer)
    if tokenizer.chat_template is None:
        raise InputError(f"chat: expected a tokenizer with a chat template, found none in {config.target}")
    return encode_prompt(Prompt("prompt", None, [{"role": "user", "content": prompt}], None), tokenizer)


def _check_positions(config: GenerateConfig, model: PreTrainedModel, length: int, name: str) -> None:
    # Not every architecture has such a limit; past it, a model that has one writes noise or fails.
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length + config.max_new_tokens > limit:
        raise InputError(
            f"max_new_tokens: expected prompt and text within the {name}'s {limit} positions, found "
            f"{length} + {config.max_new_tokens} tokens"
        )


def _proposer(
    config: GenerateConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int
) -> Proposer:
    tree = DynamicTree(config.width, config.width * config.draft_length) if config.width else None
    if config.proposer == "draft" and config.draft is not None:
        remote = config.trust_remote_code
        own = load_tokenizer(config.draft, field="draft", trust_remote_code=remote)
        draft = load_model(config.draft, field="draft", dtype=config.dtype, trust_remote_code=remote)
        check_head(draft, own, "draft")
        if tokenizer.get_vocab() != own.get_vocab():
            proposer = RetokenizedProposer(draft, own, tokenizer, tree)
            if proposer.renumbers:  # elsewhere it has another length in the draft's tokens, and minds it itself
                _check_positions(config, draft, length, "draft")
            return proposer
        _check_positions(config, draft, length, "draft")
        return DraftModelProposer(draft, tree)
    if config.proposer == "prompt_lookup":
        from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer

        return PromptLookupProposer()
    if config.proposer == "lookahead":
        from draftsmith.decode.proposers.lookahead import LookaheadProposer

        return LookaheadProposer()
    if config.proposer == "blind":
        from draftsmith.decode.proposers.blind import BlindProposer

        return BlindProposer()
    if config.proposer == "early_exit" and config.exit_layers is not None:
        from draftsmith.decode.proposers.early_exit import early_exit

        depth = target.config.get_text_config().num_hidden_layers
        if config.exit_layers > depth:
            raise InputError(f"exit_layers: expected at most the target's {depth} layers, found {config.exit_layers}")
        return DraftModelProposer(early_exit(target, config.exit_layers), tree)
    return NoDraft()


def _summarise(config: GenerateConfig, progress: Progress, output: DecodeOutput | None, errors: Console) -> None:
    """Print the summary; `output` is None where the user interrupted."""
    counts, kinds = progress.counts, progress.kinds
    tau, rate = counts.mean_acceptance_length(), counts.draft_acceptance_rate()
    speed = f"{progress.tokens_per_second():.0f} tokens/s"
    interrupted = "" if output is not None else ", interrupted"
    tau_text = "" if tau is None else f", τ {tau:.2f}"
    lines = [Text(f"{counts.num_emitted_tokens} tokens in {counts.num_drafts} rounds{tau_text}, {speed}{interrupted}")]
    if config.proposer != "none":
        drafted = f"{counts.num_accepted_tokens} of {counts.num_draft_tokens} drafted accepted"
        rate_text = "" if rate is None else f" ({rate:.0%} at γ = {config.draft_length})"
        parts = [Text(drafted, STYLES["accepted"]) + Text(rate_text)]
        parts += [Text(f"{kinds[k]} {k}", STYLES[k]) for k in ("corrected", "bonus", "undrafted") if kinds[k]]
        lines.append(Text(", ").join(parts))
    if not as_rule(config.rule).lossy:
        lines.append(Text(f"rule {config.rule}: lossless"))
    else:
        lines.append(Text(f"rule {config.rule}: lossy, {_departure(config, output)}"))
    if errors.is_terminal:
        errors.line()
    for line in lines:
        errors.print(line, highlight=False, soft_wrap=True)


def _departure(config: GenerateConfig, output: DecodeOutput | None) -> str:
    departure = None if output is None else output.departure
    if departure is None:
        return "its departure from the target's law is not known of an interrupted text"
    if config.temperature > 0:
        return f"a token's law is {departure.mean_total_variation():.3f} away from the target's (mean total variation)"
    return f"{departure.argmax_disagreement():.1%} of the tokens are not the target's argmax"


def _comparison(
    config: GenerateConfig, progress: Progress, own: list[int], other: list[int], length: int, seconds: float
) -> str:
    speed = (len(other) - length) / seconds
    said = f"plain decoding: {speed:.0f} tokens/s, so {progress.tokens_per_second() / speed:.2f}× as fast here; "
    if config.temperature > 0:
        return said + "the texts are two samples, not to be identical"
    if own == other:
        return said + "the texts are identical"
    part = next(i for i, (a, b) in enumerate(zip([*own, -1], [*other, -1], strict=False)) if a != b)
    lossy, exact_dtype = as_rule(config.rule).lossy, config.dtype in ("float32", "float64")
    why = " (the rule is lossy)" if lossy else "" if exact_dtype else f" (a near-tie in {config.dtype})"
    return said + f"the texts part at token {part - length + 1}{why}"


def main(argv: Sequence[str] | None = None) -> int:
    """Decode the prompt as the flags say; 130 where the user interrupted it."""
    config = parse_config(GenerateConfig, argv, prog="draftsmith generate")
    try:
        return generate(config, Console(), Console(stderr=True))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader had enough; the interpreter must not flush into the pipe once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(run(main))
