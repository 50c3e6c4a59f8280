"""`draftsmith generate`: decode one prompt in a terminal, with each token coloured by its origin."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.decode import Counts, autoregressive_generate, speculative_generate
from draftsmith.decode.clock import speed
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.proposers.base import Proposal, StatelessProposer
from draftsmith.decode.rules import as_rule
from draftsmith.decode.speculative import Round
from draftsmith.decode.tree import Tree
from draftsmith.distill.kind import DraftModel, RenumberedDraft
from draftsmith.scripts.configs import GenerateConfig
from draftsmith.scripts.kinds import KINDS, NONE, drafter_specs, kind_named
from draftsmith.scripts.pair import load_pair
from draftsmith.scripts.summary import PICTURES
from draftsmith.train.cli import INTERRUPTED, parse_config
from draftsmith.train.data.prompts import Prompt, encode_prompt
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.models import default_device, load_tokenizer, vocabulary_size

# Corrections are also underlined: many are spaces, and not everyone can tell red from green.
STYLES = {"prompt": "dim", "accepted": "green", "corrected": "red underline", "bonus": "cyan", "undrafted": ""}


class NoDraft(StatelessProposer):
    """A proposer of empty drafts: each round is one token of plain decoding."""

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Return empty drafts."""
        return [Proposal(context.new_zeros(0), None, Tree.chain(0)) for context in contexts]


def generate(config: GenerateConfig, console: Console, errors: Console) -> int:
    """Decode the prompt, the text on `console` and a summary on `errors`, and return the exit code.

    The text is coloured on a terminal with colours, and plain elsewhere. An interrupt keeps the text so far.
    """
    prompt = _prompt(config)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    ids = _encode(config, prompt, tokenizer, vocabulary_size(config.target, trust_remote_code=config.trust_remote_code))
    specs = _drafters(config)
    pair = load_pair(config.target, tokenizer, specs, config.dtype, config.trust_remote_code)
    target, input_ids = pair.target, torch.tensor([ids], device=default_device())
    proposer = pair.drafter.proposer if pair.drafters else NoDraft()
    pair.check_positions(len(ids), config.max_new_tokens)
    options: dict[str, Any] = {"seed": config.seed, **config.generate_kwargs()}

    def speculative(new: int, progress: Progress | None = None) -> DecodeOutput:
        rounds: dict[str, Any] = {"draft_length": config.draft_length, "rule": config.rule, "observer": progress}
        return speculative_generate(target, proposer, input_ids, max_new_tokens=new, **rounds, **options)

    def plain(new: int) -> DecodeOutput:
        return autoregressive_generate(target, input_ids, max_new_tokens=new, **options)

    speculative(2)  # a warm-up: the first forwards allocate
    progress = Progress(console, Detokenizer(tokenizer, ids))
    output = None
    try:
        try:
            progress.begin()
            output = speculative(config.max_new_tokens, progress)
        finally:
            progress.write("\n", "prompt")
        _summarise(config, progress, output, errors)
        pair.warn_undrafted([len(ids)], [output.sequences.shape[1]])
        if config.compare:
            with errors.status("decoding plainly"):
                plain(2)
                start = time.perf_counter()
                expected = plain(config.max_new_tokens).sequences[0].tolist()  # waits for the device
                seconds = time.perf_counter() - start
            config, text = replace(config, dtype=pair.dtype), output.sequences[0].tolist()
            compared = _comparison(config, progress, text, expected, len(ids), seconds)
            errors.print(compared, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        if output is None:
            _summarise(config, progress, output, errors)
        return INTERRUPTED
    return 0


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


@dataclass
class Progress:
    """An observer that prints the tokens of each round and counts them; `seconds` of decoding exclude the printing."""

    console: Console
    detokenizer: Detokenizer
    counts: Counts = field(default_factory=Counts)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def begin(self) -> None:
        """Print the prompt and start the clock."""
        self.write(self.detokenizer.prompt, "prompt")
        self._printed = time.perf_counter()

    def __call__(self, round: Round) -> None:
        """Print a round's tokens."""
        self.seconds += time.perf_counter() - self._printed
        self.counts += round.counts
        kinds = kinds_of(round)
        self.kinds.update(kinds)
        for token, kind in zip(round.tokens, kinds, strict=True):
            self.write(self.detokenizer.push(token), kind)
        if round.done:
            self.write(self.detokenizer.flush(), kinds[-1])
        self._printed = time.perf_counter()

    def write(self, text: str, kind: str) -> None:
        """Print text in the style of its kind; without colours as it is, for pipes and files."""
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.no_color:
            text = text.translate(PICTURES)
            self.console.print(Text(text, STYLES[kind]), soft_wrap=True, end="")
        else:
            self.console.file.write(text)
        self.console.file.flush()

    def tokens_per_second(self) -> float:
        """Return emitted tokens ÷ decoding time, the prompt's forward included; 0 before the first round."""
        return self.counts.num_emitted_tokens / self.seconds if self.seconds else 0.0


def kinds_of(round: Round) -> list[str]:
    """Return the origin of each token of a round: accepted, and the last corrected, a bonus, or undrafted."""
    last = "undrafted" if not round.drafted else "bonus" if round.bonus else "corrected"
    return ["accepted"] * round.accepted + [last] * (len(round.tokens) - round.accepted)


def _prompt(config: GenerateConfig) -> str:
    text = config.prompt
    if text == "-":
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"prompt: expected UTF-8 on standard input, found: {error}") from error
    if not text:
        raise InputError("prompt: expected some text, found an empty string")
    return text


def _encode(config: GenerateConfig, text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    if config.chat and tokenizer.chat_template is None:
        raise InputError(f"chat: expected a tokenizer with a chat template, found none in {config.target}")
    messages = [{"role": "user", "content": text}]
    prompt = Prompt("prompt", None, messages, None) if config.chat else Prompt("prompt", text, None, None)
    return encode_prompt(prompt, tokenizer, vocab_size=vocab_size, **config.encoding)


def _drafters(config: GenerateConfig) -> list[DrafterSpec]:
    specs = drafter_specs(config.drafter, [config.draft_length])
    if config.rule == "cascade" and specs and not kind_named(specs[0].kind).has_confidence:
        expected = " or ".join(kind.name for kind in KINDS if kind.has_confidence)
        raise InputError(f"rule: expected a drafter with a confidence ({expected}) for cascade, found {specs[0].kind}")
    # A draft model may have other ids here: nothing is compared with replay, which needs one tokenizer.
    return [replace(spec, kind=RenumberedDraft.name) if spec.kind == DraftModel.name else spec for spec in specs]


def _summarise(config: GenerateConfig, progress: Progress, output: DecodeOutput | None, errors: Console) -> None:
    """Print the summary; `output` is None after an interrupt. The names of the kinds are the legend of the colours."""
    counts, kinds = progress.counts, progress.kinds
    tau, rate = counts.mean_acceptance_length(), counts.draft_acceptance_rate()
    pace = f"{speed(progress.tokens_per_second())} tokens/s"
    interrupted = "" if output is not None else ", interrupted"
    tau_text = "" if tau is None else f", τ {tau:.2f}"
    lines = [Text(f"{counts.num_emitted_tokens} tokens in {counts.num_drafts} rounds{tau_text}, {pace}{interrupted}")]
    if config.drafter != [NONE]:
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
        return "its departure from the target is not known of an interrupted text"
    if config.temperature > 0:
        distance = f"{departure.mean_total_variation():.3f}"
        return f"a token's distribution is {distance} away from the target's (mean total variation)"
    return f"{departure.argmax_disagreement():.1%} of the tokens are not the target's argmax"


def _comparison(
    config: GenerateConfig, progress: Progress, drafted: list[int], plain: list[int], length: int, seconds: float
) -> str:
    """Compare the texts (with a prompt of `length` tokens) and the speeds of speculative and plain decoding."""
    rate = (len(plain) - length) / seconds
    text = f"plain decoding: {speed(rate)} tokens/s, so {progress.tokens_per_second() / rate:.2f}× as fast here; "
    if config.temperature > 0:
        return text + "the texts are two samples, not to be identical"
    part = first_difference(drafted, plain)
    if part is None:
        return text + "the texts are identical"
    lossy, exact_dtype = as_rule(config.rule).lossy, config.dtype in ("float32", "float64")
    why = " (the rule is lossy)" if lossy else "" if exact_dtype else f" (a near-tie in {config.dtype})"
    return text + f"the texts part at token {part - length + 1}{why}"


def main(argv: Sequence[str] | None = None) -> int:
    """Decode the prompt as the flags say; return 130 after an interrupt."""
    config = parse_config(GenerateConfig, argv, prog="draftsmith generate")
    return generate(config, Console(), Console(stderr=True))
