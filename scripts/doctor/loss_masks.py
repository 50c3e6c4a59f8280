"""Loss masks of samples: counted, and shown in the terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import track
from draftsmith.scripts.doctor.checks import Setup
from draftsmith.scripts.doctor.config import DoctorConfig
from draftsmith.scripts.doctor.findings import Finding
from draftsmith.scripts.summary import PICTURES
from draftsmith.train.data.chat.masks import ClosingTokens
from draftsmith.train.data.generate import load_completions, other_target
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import encode_prompt, mask_answers


@dataclass(frozen=True)
class MaskedSample:
    """A sample to train on.

    `answered` is false if the target is to write the answer. `left_out` has a reason for each turn of the assistant
    that is not learned from.
    """

    name: str
    ids: list[int]
    mask: list[int]
    answered: bool = True
    left_out: tuple[str, ...] = ()


@dataclass
class Samples:
    """The encoded samples, and the errors of those that cannot be encoded."""

    all: list[MaskedSample] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def read(
    config: DoctorConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: Sequence[int] = ()
) -> Samples:
    """Read the samples that a config names, with loss masks; `ends` are the tokens that end the target's texts."""
    samples, closing = Samples(), ClosingTokens.of(tokenizer)
    if config.completions is not None:
        rows = load_completions(config.completions, vocab_size)
        chosen = rows.select(range(min(len(rows), config.limit or len(rows))))
        for row in track(chosen, "samples", "texts"):
            samples.all.append(MaskedSample(row["id"], row["input_ids"], row["loss_mask"]))
    elif config.prompts is not None:
        prompts = read_prompts(
            config.prompts, split=config.split, limit=config.limit, answers="kept", invalid=config.invalid_prompts
        )
        for prompt in track(prompts, "samples", "texts"):
            try:
                if prompt.has_answer:
                    (masked,) = mask_answers(prompt, tokenizer, vocab_size, closing, ends, **config.template)
                    reasons = tuple(masked.left_out.values())
                    samples.all.append(MaskedSample(prompt.id, masked.ids, masked.mask, True, reasons))
                else:
                    ids = encode_prompt(prompt, tokenizer, vocab_size=vocab_size, **config.encoding)
                    samples.all.append(MaskedSample(prompt.id, ids, [0] * len(ids), answered=False))
            except InputError as error:
                samples.refused.append(str(error))
    return samples


def check_origin(completions: str, target: str) -> Finding:
    """Check that this target wrote the completions."""
    other = other_target(completions, target)
    if other is None:
        return Finding("ok", "origin", "written by this target")
    return Finding("warning", "origin", f"written by {other}, another target", "let this one write them: prepare")


def check_masks(samples: Samples) -> Iterator[Finding]:
    """Count the tokens in the loss, and the samples and turns that train nothing."""
    answered = [sample for sample in samples.all if sample.answered]
    if samples.refused:
        text = f"{len(samples.refused)} cannot be used; {samples.refused[0]}"
        yield Finding("error", "samples", text, "leave them out, or let the target write the answers (prepare)")
    reasons = Counter(reason for sample in answered for reason in sample.left_out)
    if reasons:
        cut = sum(len(sample.left_out) > 0 for sample in answered)
        text = f"{reasons.total()} assistant turns in {cut} samples do not count: {'; '.join(sorted(reasons))}"
        remedy = "fine if meant so; else prepare --turns all, which makes a sample of each context"
        yield Finding("warning", "turns", text, remedy)
    empty = [sample.name for sample in answered if not any(sample.mask)]
    prompts = len(samples.all) - len(answered)
    loss, total = sum(sum(sample.mask) for sample in answered), sum(len(sample.mask) for sample in answered)
    text = f"{loss} of {total} tokens count in {len(answered)} samples with an answer, {len(empty)} with an empty mask"
    if prompts:
        text += f"; {prompts} more end with the user's turn, for the target to answer"
    if answered and len(empty) == len(answered):
        yield Finding("error", "loss masks", text, "there is nothing to learn: give samples with answers")
    elif empty:
        yield Finding("warning", "loss masks", f"{text}: {', '.join(empty[:5])}", "they train nothing: leave them out")
    elif samples.all:
        yield Finding("ok", "loss masks", text)


def check_lengths(samples: Sequence[MaskedSample], setup: Setup) -> Finding | None:
    """Compare the samples with the models' positions; None without samples or limits."""
    limits = setup.positions
    if not samples or not limits:
        return None
    role = min(limits, key=lambda name: limits[name])
    longest, limit = max(len(sample.ids) for sample in samples), limits[role]
    long = sum(len(sample.ids) > limit for sample in samples)
    if long:
        text = f"{long} of {len(samples)} samples are longer than the {role}'s {limit} positions, the longest {longest}"
        cut = f"max_prompt_tokens of prepare and measure, max_length {limit} of distill"
        return Finding("warning", "lengths", text, f"leave them out, or cut them: {cut}")
    return Finding("ok", "lengths", f"{longest} tokens at most, of the {role}'s {limit}")


def coloured(sample: MaskedSample, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Return a sample's text: tokens in the loss green, the rest dimmed, special tokens bold, line ends marked.

    A character whose tokens differ in their masks takes the style of its last token.
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    kinds = [(bit, token in special) for token, bit in zip(sample.ids, sample.mask, strict=True)]
    text, shown, end = Text(), "", 0
    for (bit, bold), stretch in groupby(kinds):
        end += len(list(stretch))
        # Decoded from the beginning: a token's text may depend on the token before, as spaces do.
        options: Any = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        whole = str(tokenizer.decode(sample.ids[:end], **options))
        if end < len(sample.ids):
            whole = whole.rstrip("\ufffd")
        piece, shown = whole[len(shown) :].replace("\n", "↵\n").translate(PICTURES), max(whole, shown, key=len)
        text.append(piece, ("green" if bit else "dim") + (" bold" if bold else ""))
    return text


def bracketed(text: Text) -> Text:
    """Return the text with its green stretches in ⟦⟧, for output without colours."""
    green = {index for span in text.spans if "green" in str(span.style) for index in range(span.start, span.end)}
    stretches = groupby(enumerate(text.plain), key=lambda item: item[0] in green)
    pieces = [(counts, "".join(character for _, character in stretch)) for counts, stretch in stretches]
    return Text("".join(f"⟦{piece}⟧" if counts else piece for counts, piece in pieces))


def show(samples: Samples, count: int, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print the first `count` samples, coloured by their loss masks."""
    colours = console.is_terminal and not console.no_color
    for sample in samples.all[:count]:
        text = coloured(sample, tokenizer)
        title = f"sample {sample.name!r}: {len(sample.ids)} tokens, {sum(sample.mask)} count in the loss"
        console.print(Text.assemble("\n", (title, "bold underline")), soft_wrap=True)
        end = "" if text.plain.endswith("\n") else "\n"
        console.print(text if colours else bracketed(text), soft_wrap=True, highlight=False, end=end)
