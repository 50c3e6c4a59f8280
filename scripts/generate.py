"""`draftsmith generate`: decode one prompt in a terminal, every token in the colour of how it came about."""

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import DraftModelProposer, RetokenizedProposer, autoregressive_generate, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.proposers.base import Proposal, Proposer, StatelessProposer
from draftsmith.decode.proposers.draft_model import DynamicTree
from draftsmith.decode.rules import as_rule
from draftsmith.decode.tree import Tree
from draftsmith.scripts.live_view import STYLES, Detokenizer, Plain, Progress, Screen, Terminal
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.prompts import Prompt, encode_prompt
from draftsmith.train.models import DTYPES, check_head, default_device, load_model, load_tokenizer

PROPOSERS = ("draft", "medusa", "prompt_lookup", "lookahead", "blind", "early_exit", "none")
MODELS = ("draft", "early_exit")  # those that are models: their confidence says something, and they can grow trees
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
    """What drafts: draft, medusa, prompt_lookup, lookahead, blind, early_exit, or none for plain decoding."""
    medusa: str | None = None
    """The directory of the heads, for the proposer `medusa`; they draft their tree, no deeper than `draft_length`."""
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
        for proposer, name in (("draft", "draft"), ("medusa", "medusa"), ("early_exit", "exit_layers")):
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
    if config.proposer == "medusa" and config.medusa is not None:
        from draftsmith.medusa import MedusaHeads, MedusaProposer

        heads: Any = MedusaHeads.from_pretrained(config.medusa)
        heads.check_fits(target)
        return MedusaProposer(heads.to(target.device, target.dtype))
    if config.proposer == "prompt_lookup":
        from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer

        return PromptLookupProposer()
    if config.proposer == "lookahead":
        from draftsmith.decode.proposers.lookahead import LookaheadProposer

        return LookaheadProposer()
    if config.proposer == "blind":
        from draftsmith.decode.proposers.unigram import BlindProposer

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
