"""Checks of `draftsmith doctor` on configs and tokenizers, without weights, and on servers that give states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.decode.cache import check_rollback, follows_one_path, layers_with_states, runs_in_programs
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.scripts.doctor.config import DoctorConfig
from draftsmith.scripts.doctor.findings import Finding
from draftsmith.scripts.kinds import drafter_specs, recipe_of, run_of, stored_as
from draftsmith.scripts.pair import NOT_HERE
from draftsmith.train.checkpoint import unapplied_settings
from draftsmith.train.cli import parse_config
from draftsmith.train.data.chat.masks import mask_conversation
from draftsmith.train.kinds.parts import Part, Side, load_side
from draftsmith.train.kinds.quantities import count_of
from draftsmith.train.memory.machines import Machines
from draftsmith.train.models import DTYPES, check_head
from draftsmith.train.teacher.served import ServedTarget, urls_of
from draftsmith.train.teacher.served_check import LENGTHS, check_states, library_at_hand, require_files, require_served
from draftsmith.train.teacher.target_ends import read_ends

# The names that safetensors has for dtypes of arithmetic; all others are quantised.
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TEXT = """A server that holds a large model computes what a smaller one learns from. It reads a text once, from the
first word to the last, and keeps what each of its layers makes of every word. The smaller model sees these states, and
the words that followed them, and learns to guess the next ones: in a round of drafting it proposes several, and the
large model accepts those that it would have written itself. So nothing of the text changes, only the time it takes."""


@dataclass(frozen=True)
class Setup:
    """A target, None where it does not load, and the drafters that load and fit it."""

    target: Side | None
    drafters: Sequence[Part]

    @property
    def drafts(self) -> list[Side]:
        """The drafters with a tokenizer of their own."""
        return [part for part in self.drafters if isinstance(part, Side)]

    @property
    def sides(self) -> list[Side]:
        """The target, and the drafters with a tokenizer of their own."""
        return ([] if self.target is None else [self.target]) + self.drafts

    @property
    def parts(self) -> list[Part]:
        """The target and its drafters."""
        return ([] if self.target is None else [self.target]) + list(self.drafters)

    @property
    def positions(self) -> dict[str, int]:
        """The longest text in tokens of each part that has a limit, by role."""
        return {part.role: part.positions for part in self.parts if part.positions is not None}


def load_setup(path: str, drafters: Sequence[str], trust_remote_code: bool) -> tuple[Setup, list[Finding]]:
    """Load a target and drafters (values of `--drafter`), at best without weights.

    Return the parts that load and fit, and a finding for each part.
    """
    kinds, findings, parts = [stored_as(spec) for spec in drafter_specs(drafters)], list[Finding](), list[Part]()
    target: Side | None = None
    try:
        target = load_side("target", path, trust_remote_code)
        findings.append(Finding("ok", "target", target.text))
    except InputError as error:
        findings.append(Finding.of(error, "target"))
    for kind, spec in kinds:
        role = spec.name or spec.kind
        try:
            part = kind.inspect(spec, target, trust_remote_code)
        except InputError as error:
            findings.append(Finding.of(error, role, spec.kind, "drafter"))
            continue
        parts += [] if part is None else [part]
        findings.append(Finding("ok", role, f"{kind.title}: no files to check" if part is None else part.text))
    return Setup(target, parts), findings


def check_setup(setup: Setup, context: int | None, dtype: str) -> Iterator[Finding]:
    """Check the target and each drafter, and whether they fit each other.

    `context` is the length of texts in tokens, prompts included, or None for the models' positions; `dtype` names the
    dtype to run in.
    """
    target, drafts = setup.target, setup.drafts
    alone = [] if target is None else [target]
    for sides in [[*alone, draft] for draft in drafts] or [alone]:
        if sides:
            yield _vocabulary(sides)
    if setup.sides:
        yield _rollback(target, setup.sides)
    if setup.parts:
        yield _positions(setup.positions, context)
        yield _dtype(setup.parts, dtype)
    if target is not None:
        if target.tokenizer.chat_template is None:
            remedy = "right for a base model; for a chat model copy its chat_template.jinja there"
            text = "none in the target's tokenizer: prompts are plain text"
            yield Finding("warning", "chat template", text, remedy)
        yield _special_tokens(target)
        if settings := unapplied_settings(target.model.generation_config):
            text = f"the generation config has {', '.join(settings)}, which no command applies"
            yield Finding("warning", "own settings", text, "give them as fields, such as repetition_penalty")


def check_run(run: str, target: str) -> Finding:
    """Return whether a training run, KIND:FILE, can begin on a target: its plan makes the drafter, without weights."""
    kind, file = run_of(run)
    try:
        plan = planned(kind.name, file, target)
    except InputError as error:
        return Finding.of(error, f"{kind.name} run")
    return Finding("ok", f"{kind.name} run", f"{kind.title}, {plan.trained:,} trained parameters")


def planned(kind: str, file: str, target: str) -> Any:
    """Return the memory plan of a training run of such drafters, or raise an InputError as the run does."""
    # The training may run on another machine; on a CPU, bf16 does not require a GPU here.
    flags = ["--config", file, "--target", target, "--max_length", "2", "--training.use_cpu", "true"]
    recipe = recipe_of(kind)
    return recipe.memory_plan(parse_config(recipe.config_class(), flags, prog="draftsmith doctor"), Machines(gpus=8))


def _dtype(parts: Sequence[Part], dtype: str) -> Finding:
    stored = {part.role: part.stored for part in parts if part.stored is not None}
    text = ", ".join(f"{role} in {name}" for role, name in stored.items())
    text = f"stored: {text or 'not looked at'}; to run in {dtype}"
    kinds = {role: STORED[name] for role, name in stored.items() if name in STORED}
    rounded = [role for role, kind in kinds.items() if torch.promote_types(kind, DTYPES[dtype]) != DTYPES[dtype]]
    if rounded:
        return Finding("warning", "dtype", f"{text}, which rounds {' and '.join(rounded)}", "fine if it is served so")
    return Finding("ok", "dtype", text)


def _vocabulary(sides: list[Side]) -> Finding:
    tokenizer = sides[0].tokenizer
    text = ", ".join(f"{side.role} {side.head} logits" for side in sides)
    alike = tokenizer.get_vocab() == sides[-1].tokenizer.get_vocab()
    for side in sides:
        target_config = None if side is sides[0] or not alike else sides[0].config
        try:
            check_head(side.config, side.tokenizer, side.role, target_config)
        except InputError as error:
            return Finding.of(error, "vocabulary")
    tokens = token_count(tokenizer, sides[0].config)
    extra = sorted((number, piece) for piece, number in tokenizer.get_vocab().items() if number >= tokens)
    if extra:
        text += f"; {count_of(len(extra), 'added token')} without one, first {extra[0][1]!r}: never written, and "
        text += "texts that hold it are refused"
    if len({side.head for side in sides}) > 1 and alike:
        # vLLM: SpeculativeConfig.verify_equal_vocab_size_if_draft_model, called for the method draft_model
        resize = f"resize_token_embeddings({max(side.head for side in sides)}) before training"
        remedy = f"fine here, but vLLM's draft_model refuses unequal vocab_size: {resize}"
        return Finding("warning", "vocabulary", text, remedy)
    return Finding("ok", "vocabulary", text)


def _rollback(target: Side | None, sides: list[Side]) -> Finding:
    for side in sides[::-1]:  # drafts first: they are refused, and a target only costs a warning
        try:
            check_rollback(side.model, side.role)
        except InputError as error:
            if side is target:
                return Finding("warning", "rollback", f"{error}: not decoded here", NOT_HERE)
            return Finding.of(error, "rollback")
    texts = {side.role: _decoding(side) for side in sides}
    if len(set(texts.values())) == 1:
        return Finding("ok", "rollback", texts[sides[0].role])
    return Finding("ok", "rollback", "; ".join(f"{role}: {text}" for role, text in texts.items()))


def _decoding(side: Side) -> str:
    """Return how a model is decoded: in chains or trees, in programs or without."""
    count = layers_with_states(side.config)
    if count:
        layers = count_of(side.config.num_hidden_layers, "layer")
        return f"chains; {count} of {layers} keep states, so no trees and no compiled programs"
    if follows_one_path(side.config):
        return "chains; its attention has ALiBi, so no trees and no compiled programs"
    return "chains and trees" + ("" if runs_in_programs(side.model) else ", but no compiled programs")


def _positions(limits: dict[str, int], context: int | None) -> Finding:
    name, text = "positions", ", ".join(f"{role} {limit}" for role, limit in limits.items()) or "without limit"
    if context is not None:
        text += f", for texts of {context}"
        if context > limits.get("target", context):
            return Finding("error", name, text, f"--context {limits['target']} at most, or a target that reads further")
    needed = context or limits.get("target")
    least = min((limit for role, limit in limits.items() if role != "target"), default=None)
    if least is not None and (needed is None or least < needed):
        remedy = f"keep prompt and text within {least} tokens, past which nothing is drafted, or take a longer draft"
        return Finding("warning", name, text, remedy)
    return Finding("ok", name, text)


def _special_tokens(target: Side) -> Finding:
    name, tokenizer = "special tokens", target.tokenizer
    ends = {token: f"{tokenizer.decode([token])!r} ({token})" for token in target.ends}
    text = f"texts end with {', '.join(ends.values())}" if ends else "nothing ends a text"
    by_tokenizer = bool(ends) and target.model.generation_config.eos_token_id is None
    text += " by the tokenizer alone" if by_tokenizer else ""
    text += f", padding is {tokenizer.pad_token!r}"
    expected = {} if tokenizer.eos_token_id is None else {tokenizer.eos_token_id: "the tokenizer's end of sequence"}
    if tokenizer.chat_template is not None:
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        try:
            masked = mask_conversation(talk, tokenizer, "Hello")
        except InputError as error:
            return Finding("warning", name, f"{text}; {error}", "answers in your data cannot be masked as they are")
        last = next((token for token, bit in zip(masked.ids[::-1], masked.mask[::-1], strict=True) if bit), None)
        if last is not None and last in tokenizer.added_tokens_decoder:
            # The end of an answer matters: the tokenizer's own may end only whole documents in pretraining.
            expected = {last: "what ends an answer in the chat template"}
    for token, role in expected.items():
        if token not in ends:
            text += f", but not with {tokenizer.decode([token])!r} ({token}), {role}"
            remedy = f"put {sorted({*target.ends, token})} into generation_config.json as eos_token_id, or texts run on"
            return Finding("warning", name, text, remedy)
    if by_tokenizer or not ends:
        return Finding("warning", name, text, "put eos_token_id into generation_config.json, or `generate` runs on")
    return Finding("ok", name, text)


def check_teacher(config: DoctorConfig, target: Side) -> Iterator[Finding]:
    """Ask the servers of `--teacher` what they serve, and compare their states with the target's."""
    name, remedy = "teacher", "start the servers as docs/teachers.md says"
    urls = urls_of(config.teacher)
    try:
        with phase("asking the servers"), ServedTarget(urls) as teacher:
            served = teacher.served
            assert served is not None
            plans = [planned(kind.name, file, config.target) for kind, file in map(run_of, config.run)]
            for layer_ids in [plan.layer_ids for plan in plans] or [()]:
                require_served(served, urls[0], target.model.config, layer_ids)
            depths, quantized = ", ".join(map(str, served.layer_ids)), served.quantization or "not quantised"
            text = f"{', '.join(urls)}: {served.model} in {served.dtype}, {quantized}, by vLLM {served.vllm}"
            yield Finding(
                "ok", name, f"{text}; states after layers {depths}, texts of up to {served.max_model_len} tokens"
            )
            name, remedy = "its files", "serve the model that you name as --target"
            if require_files(served, urls[0], config.target):
                yield Finding("ok", name, f"those of {config.target}")
            else:
                text = f"those of {served.model} cannot be compared with {config.target}"
                yield Finding("warning", name, text, "give both as directories, or both as the hub's ids")
            name = "its states"
            ids = target.tokenizer.encode(TEXT)
            texts = [ids[start : start + length] for start, length in enumerate(LENGTHS)]
            ends = read_ends(config.target, served.dtype, trust_remote_code=config.trust_remote_code)
            library = library_at_hand(config.target, served.dtype, float("inf"), config.trust_remote_code)
            for found in check_states(teacher, ends, texts, library):
                yield Finding("ok", name, str(found))
    except InputError as error:
        refused = Finding.of(error, "teacher")
        yield replace(refused, name=name, remedy=remedy)
