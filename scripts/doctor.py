"""`draftsmith doctor`: will this pair of target and draft work? One line a check, before any weights are loaded."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.decode.cache import check_model
from draftsmith.decode.errors import InputError
from draftsmith.decode.planner import Costs, acceptance_length, verification_costs
from draftsmith.decode.proposers.retokenized import matching_ids
from draftsmith.scripts import loss_masks
from draftsmith.scripts.findings import SYMBOLS, Finding, State, report
from draftsmith.train.cli import parse_config, run
from draftsmith.train.masks import has_generation_markers, mask_conversation
from draftsmith.train.models import (
    DTYPES,
    check_head,
    check_same_tokenizer,
    load_model,
    load_tokenizer,
    tokenizer_size,
)

BLOCKS = (1, 2, 4, 5, 8)  # 5 is what γ = 4 verifies
GAMMA = 4
CONTEXT = 64
CHEAP = 0.5  # a draft of more than this share of the target's parameters hardly pays
HARD = 0.9  # an acceptance rate that few drafts reach


@dataclass
class DoctorConfig:
    """Check a target, a draft and training samples before they cost any time: what fits, what does not, a way out."""

    target: str
    """The target: a model directory or hub id."""
    draft: str | None = None
    """The draft model; without one the target and the samples are checked alone."""
    prompts: str | None = None
    """Conversations with the assistant's answers, or prompts, as `prepare` reads them: their loss masks are checked."""
    completions: str | None = None
    """Completions written by `prepare`, whose loss masks are checked instead."""
    split: str = "train"
    """The split of a directory or hub id of prompts."""
    limit: int | None = None
    """Check the first so many samples only."""
    show_mask: int = 0
    """Print the first so many samples: in green what a draft learns from, dimmed what it only reads."""
    costs: bool = False
    """Load both models and measure what a forward costs here, and the acceptance rate from which γ = 4 pays."""
    dtype: str = "bfloat16"
    """Weights and arithmetic for the costs."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""

    def __post_init__(self) -> None:
        if self.show_mask < 0:
            raise InputError(f"show_mask: expected 0 or more, found {self.show_mask}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit: expected at least 1, found {self.limit}")
        if self.prompts is not None and self.completions is not None:
            raise InputError("completions: expected either prompts or completions, found both")
        if self.show_mask and self.prompts is None and self.completions is None:
            raise InputError("show_mask: expected samples to show in prompts or completions, found none")
        if self.costs and self.draft is None:
            raise InputError("costs: expected a draft to measure, found none")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")


@dataclass(frozen=True)
class Side:
    """A target or a draft, without its weights."""

    role: str
    path: str
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    """On the meta device."""
    ends: tuple[int, ...]
    """The ids that end a text, by its generation config."""

    @property
    def config(self) -> Any:
        """The text model's config."""
        return self.model.config.get_text_config()

    @property
    def head(self) -> int:
        """Logits a position."""
        return int(self.config.vocab_size)

    @property
    def positions(self) -> int | None:
        """The longest text, in tokens; None where the architecture has no such limit."""
        return getattr(self.config, "max_position_embeddings", None)


def load(config: DoctorConfig) -> tuple[list[Side], list[Finding]]:
    """Load target and draft without their weights; what does not load is an error among the findings."""
    sides, findings = [], []
    for role, path in (("target", config.target), ("draft", config.draft)):
        if path is not None:
            try:
                side = _load(role, path, config.trust_remote_code)
            except InputError as error:
                said = str(error).removeprefix(f"{role}: ")
                findings.append(Finding("error", role, said, "give the directory of a causal LM and its tokenizer"))
            else:
                sides.append(side)
                findings.append(_checkpoint(side))
    return sides, findings


def diagnose(sides: list[Side]) -> Iterator[Finding]:
    """Check the models that loaded, and the pair where both did."""
    if not sides:
        return
    target = sides[0] if sides[0].role == "target" else None
    draft = sides[-1] if sides[-1].role == "draft" else None
    if target is not None and draft is not None:
        yield _sizes(target, draft)
        yield _tokenizers(target, draft)
    yield _heads(sides)
    yield _rollback(sides)
    yield _positions(sides)
    if target is not None:
        yield _chat_template(target, draft)
        yield _special_tokens(target, draft)


def _load(role: str, path: str, trust_remote_code: bool) -> Side:
    try:
        tokenizer = load_tokenizer(path, field=role, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except InputError:
        raise
    except Exception as error:  # a broken config raises whatever its architecture stumbles over
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{role}: expected a causal LM in {path}, found: {said}") from error
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    ends = generation.eos_token_id
    return Side(role, path, tokenizer, model, tuple([ends] if isinstance(ends, int) else ends or ()))


def _checkpoint(side: Side) -> Finding:
    count, layers = side.model.num_parameters(), getattr(side.config, "num_hidden_layers", "?")
    said = f"{type(side.model).__name__}, {layers} layer{'' if layers == 1 else 's'}, {_count(count)} parameters"
    directory = Path(side.path)
    if not directory.is_dir():
        return Finding("ok", side.role, f"{said}; the weights, on the hub, were not looked at")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        if any(directory.glob("pytorch_model*.bin")):
            return Finding(
                "warning", side.role, f"{said}, in pickled weights", "save it again with save_pretrained: safetensors"
            )
        return Finding("error", side.role, f"{said}, but no weights in {side.path}", "copy its *.safetensors there")
    elements: Counter[str] = Counter()
    for file in files:
        try:
            with safe_open(file, "pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - it is no mapping
                    tensor = weights.get_slice(key)
                    elements[tensor.get_dtype()] += prod(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            return Finding("error", side.role, f"{said}, but {file.name} is damaged: {error}", "copy it there again")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, OSError) as error:
            return Finding("error", side.role, f"{said}, but {index.name} is damaged: {error}", "copy it there again")
        missing = sorted(shards - {file.name for file in files})
        if missing:
            count_missing = f"{len(missing)} of {len(shards)} files are missing, the first {missing[0]}"
            return Finding("error", side.role, f"{said}, but {count_missing}", "copy them there")
    if not elements:
        return Finding("error", side.role, f"{said}, but no weights in {files[0].name}", "copy it there again")
    (dtype, most), whole = elements.most_common(1)[0], elements.total()
    mixed = "" if most == whole else f" ({most / whole:.0%} of it)"
    return Finding("ok", side.role, f"{said}, stored as {dtype}{mixed}")


def _sizes(target: Side, draft: Side) -> Finding:
    p, q = target.model.num_parameters(), draft.model.num_parameters()
    said = f"the draft has {q / p:.1%} of the target's parameters"
    if q > CHEAP * p:
        return Finding("warning", "sizes", said, "a draft pays by being far cheaper: --costs true says from which α on")
    return Finding("ok", "sizes", said)


def _tokenizers(target: Side, draft: Side) -> Finding:
    name, alike = "tokenizers", matching_ids(draft.tokenizer, target.tokenizer) is not None
    try:
        check_same_tokenizer(target.tokenizer, draft.tokenizer, target.path, draft.path)
    except InputError as error:
        found = str(error).rpartition("found ")[2]
        if alike:
            return Finding(
                "warning",
                name,
                f"the same pieces under other ids: {found}",
                "generate and RetokenizedProposer renumber them at any temperature; distill and measure want one "
                "tokenizer for both",
            )
        return Finding(
            "warning",
            name,
            found,
            "generate and RetokenizedProposer encode the draft's text again, at T=0 alone; to distill and measure take "
            "a draft with the target's tokenizer",
        )
    size = len(target.tokenizer)
    if not alike and target.tokenizer.is_fast and draft.tokenizer.is_fast:
        return Finding(
            "warning",
            name,
            f"the same {size} tokens with the same ids, but text is split into them otherwise",
            "copy the target's tokenizer.json into the draft's directory; drafts read text as the target splits it",
        )
    return Finding("ok", name, f"the same {size} tokens with the same ids")


def _heads(sides: list[Side]) -> Finding:
    tokenizer = sides[0].tokenizer
    said = ", ".join(f"{side.role} {side.head} logits" for side in sides)
    for side in sides:
        try:
            check_head(side.model, side.tokenizer, side.role)
        except InputError as error:
            return Finding("error", "vocabulary", str(error), "resize_token_embeddings(len(tokenizer)), and train them")
    padding = [side.head - tokenizer_size(side.tokenizer) for side in sides]
    if any(padding):
        said += f" for {tokenizer_size(tokenizer)} tokens: padding is never drafted or written"
    if len({side.head for side in sides}) > 1 and sides[0].tokenizer.get_vocab() == sides[-1].tokenizer.get_vocab():
        # SpeculativeConfig.verify_equal_vocab_size_if_draft_model, called for the method draft_model
        return Finding(
            "warning",
            "vocabulary",
            said,
            "fine here, but vLLM's draft_model refuses unequal vocab_size: "
            f"resize_token_embeddings({max(side.head for side in sides)}) before training",
        )
    return Finding("ok", "vocabulary", said)


def _rollback(sides: list[Side]) -> Finding:
    for side in sides:
        try:
            check_model(side.model, side.role)
        except InputError as error:
            return Finding("error", "rollback", str(error), "take another architecture, or attn_implementation sdpa")
    return Finding("ok", "rollback", "rejected tokens can be dropped from the cache")


def _positions(sides: list[Side]) -> Finding:
    said = ", ".join(f"{side.role} {side.positions or 'without limit'}" for side in sides)
    known = [side.positions for side in sides]
    if len(known) == 2 and known[1] is not None and (known[0] is None or known[1] < known[0]):
        return Finding(
            "warning", "positions", said, f"keep prompt and text within {known[1]} tokens, or take a longer draft"
        )
    return Finding("ok", "positions", said)


def _chat_template(target: Side, draft: Side | None) -> Finding:
    name, own = "chat template", target.tokenizer.chat_template
    if own is None:
        return Finding(
            "warning",
            name,
            "none in the target's tokenizer: prompts are plain text",
            "right for a base model; for a chat model copy its chat_template.jinja there, or acceptance is that of "
            "texts nobody asks for",
        )
    marked = has_generation_markers(target.tokenizer)
    said = "with generation markers" if marked else "without generation markers: turns are found by comparison"
    if draft is None or draft.tokenizer.chat_template == own:
        return Finding("ok", name, said + (", the same in both" if draft is not None else ""))
    other = "none in the draft" if draft.tokenizer.chat_template is None else "another one in the draft"
    return Finding("ok", name, f"{said}; {other}, which does not matter: the target's is used")


def _special_tokens(target: Side, draft: Side | None) -> Finding:
    name, tokenizer = "special tokens", target.tokenizer
    ends = {token: f"{tokenizer.decode([token])!r} ({token})" for token in target.ends}
    said = f"texts end with {', '.join(ends.values())}" if ends else "nothing ends a text in generation_config.json"
    said += f", padding is {tokenizer.pad_token!r}"
    wanted = {} if tokenizer.eos_token_id is None else {tokenizer.eos_token_id: "the tokenizer's end of sequence"}
    if tokenizer.chat_template is not None:
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        try:
            masked = mask_conversation(talk, tokenizer, "Hello")
        except InputError as error:
            return Finding("warning", name, f"{said}; {error}", "answers in your data cannot be masked as they are")
        last = next((token for token, bit in zip(masked.ids[::-1], masked.mask[::-1], strict=True) if bit), None)
        if last is not None and last in tokenizer.added_tokens_decoder:
            # What ends an answer matters; the tokenizer's own may end whole documents in pretraining alone.
            wanted = {last: "what ends an answer in the chat template"}
    for token, role in wanted.items():
        if token not in ends:
            return Finding(
                "warning",
                name,
                f"{said}, but not with {tokenizer.decode([token])!r} ({token}), {role}",
                f"put {sorted({*target.ends, token})} into generation_config.json as eos_token_id, or texts run on",
            )
    if draft is not None and draft.ends and set(draft.ends) != set(target.ends):
        said += f"; the draft's generation config says {list(draft.ends)}, which does not matter: the target decides"
    return Finding("ok" if ends else "warning", name, said, "" if ends else "put eos_token_id there, or texts run on")


def _costs(config: DoctorConfig) -> Finding:
    """Measure t(k) and d(1), and solve for the α from which γ = 4 is faster than plain decoding."""
    try:
        models = [
            load_model(path, field=role, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
            for role, path in (("target", config.target), ("draft", str(config.draft)))
        ]
        context = min(CONTEXT, *(_room(model) for model in models))
        target = verification_costs(models[0], 1, context, BLOCKS)
        costs = Costs(target, verification_costs(models[1], 1, context, [1])[1])
    except InputError as error:
        return Finding("error", "costs", str(error), "see the checks above")
    milliseconds = ", ".join(f"{target[k] * 1000:.2f} ({k})" for k in BLOCKS)
    said = f"target {milliseconds} ms for so many tokens, draft {costs.draft_step * 1000:.2f} ms a token"
    said += f" ({config.dtype}, {models[0].device.type}); "
    alpha = smallest_acceptance(costs)
    if alpha is None:
        best = costs.speedup(GAMMA + 1, GAMMA)
        return Finding(
            "warning",
            "costs",
            f"{said}γ = {GAMMA} pays at no α, for at α = 1 it is {best:.2f}× as fast",
            "take a smaller draft, or another dtype or device",
        )
    state: State = "warning" if alpha > HARD else "ok"
    remedy = "few drafts agree that often: take a smaller one" if state == "warning" else ""
    return Finding(state, "costs", f"{said}γ = {GAMMA} pays from α = {alpha:.2f} on", remedy)


def smallest_acceptance(costs: Costs, draft_length: int = GAMMA) -> float | None:
    """Return the smallest α, in hundredths, whose chains of γ tokens beat plain decoding; None where not even 1 does.

    The rounds' own bookkeeping counts as far as the costs say (`Costs.overhead`).
    """
    alphas = (percent / 100 for percent in range(101))
    return next((a for a in alphas if costs.speedup(acceptance_length([a] * draft_length), draft_length) > 1), None)


def _room(model: PreTrainedModel) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return CONTEXT if limit is None else max(limit - max(BLOCKS), 1)


def doctor(config: DoctorConfig, console: Console, errors: Console) -> int:
    """Print all findings and the samples asked for; 2 where the pair or the samples cannot be used, else 0."""
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        report(finding, console)

    sides, loaded = load(config)
    for finding in [*loaded, *diagnose(sides)]:
        found(finding)
    if config.costs and all(finding.state != "error" for finding in findings):
        with errors.status("measuring"):
            costs = _costs(config)
        found(costs)
    sampled = config.prompts is not None or config.completions is not None
    if sampled and sides and sides[0].role == "target":
        with errors.status("reading the samples"):
            samples = loss_masks.read(
                config.prompts, config.completions, sides[0].tokenizer, config.split, config.limit
            )
        for finding in loss_masks.check_masks(samples):
            found(finding)
        loss_masks.show(samples, config.show_mask, sides[0].tokenizer, console)
    states = Counter(finding.state for finding in findings)
    counts = ", ".join(f"{states[state]} {SYMBOLS[state]}" for state in ("ok", "warning", "error"))
    console.print(Text(f"\n{counts}"), highlight=False)
    first = next((finding for finding in findings if finding.state == "error"), None)
    if first is None:
        return 0
    line = f"error: {first.name}: {' '.join(first.text.split())}"
    errors.print(Text(line), soft_wrap=True, highlight=False)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Check as the flags say; 0 where all is well or only worth a warning, 2 where something cannot be used."""
    return doctor(parse_config(DoctorConfig, argv, prog="draftsmith doctor"), Console(), Console(stderr=True))


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)


if __name__ == "__main__":
    sys.exit(run(main))
