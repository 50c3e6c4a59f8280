"""Checks of `draftsmith doctor` on configs and tokenizers, without weights."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import torch

from draftsmith.decode.cache import check_rollback, follows_one_path, layers_with_states, runs_in_programs
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.scripts.pair import NOT_HERE
from draftsmith.train.checkpoint import unapplied_settings
from draftsmith.train.data.chat.masks import mask_conversation
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import STORED, Setup, Side
from draftsmith.train.kinds.quantities import count_of
from draftsmith.train.models import DTYPES, check_head


def check_setup(setup: Setup, context: int | None, dtype: str, device: torch.device) -> Iterator[Finding]:
    """Check the target and each drafter, and whether they fit each other.

    `context` is the length of texts in tokens, prompts included, or None for the models' positions; `dtype` names the
    dtype to run in.
    """
    target, drafts = setup.target, setup.drafts
    yield from _fits(setup, of_models=True)
    alone = [] if target is None else [target]
    for sides in [[*alone, draft] for draft in drafts] or [alone]:
        if sides:
            yield _vocabulary(sides)
    if setup.sides:
        yield _rollback(target, setup.sides)
        yield _positions(setup, context)
    yield from _fits(setup, of_models=False)
    if setup.parts:
        yield _dtype(setup, dtype, device)
    if target is not None:
        yield _chat_template(target, drafts)
        yield _special_tokens(target, drafts)
        if settings := unapplied_settings(target.model.generation_config):
            text = f"the generation config has {', '.join(settings)}, which no command applies"
            yield Finding("warning", "own settings", text, "give them as fields, such as repetition_penalty")


def _fits(setup: Setup, of_models: bool) -> Iterator[Finding]:
    """Yield the kinds' comparisons of drafters with the target: of models with a tokenizer, or of all others."""
    kinds = [kind for kind, _ in setup.drafters]
    for kind, part in setup.drafters:
        if setup.target is not None and isinstance(part, Side) == of_models:
            for finding in kind.compare(setup.target, part):
                alone = kinds.count(kind) == 1
                yield finding if alone else replace(finding, name=f"{finding.name}, {part.role}")


def bfloat16_is_native(device: torch.device) -> bool:
    """Return whether a device has bfloat16 arithmetic; others convert to float32 and back."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return True  # other processors cannot be asked


def _dtype(setup: Setup, dtype: str, device: torch.device) -> Finding:
    run_dtype, troubles, remedies = DTYPES[dtype], list[str](), list[str]()
    stored = {part.role: part.stored.most_common(1)[0][0] for part in setup.parts if part.stored}
    kinds = {role: STORED[name] for role, name in stored.items() if name in STORED}
    text = ", ".join(f"{role} in {name}" for role, name in stored.items())
    text = f"stored: {text}" if text else "what is stored was not looked at"
    if run_dtype == torch.bfloat16 and not bfloat16_is_native(device):
        troubles.append(f"this {device.type} computes bfloat16 by way of float32")
        remedies.append("compare --dtype float32 by --costs true")
    rounded = [role for role, kind in kinds.items() if torch.promote_types(kind, run_dtype) != run_dtype]
    if rounded:
        widest = reduce(torch.promote_types, kinds.values())
        name = next(name for name, value in DTYPES.items() if value == widest)
        troubles.append(f"{dtype} rounds {' and '.join(rounded)}")
        remedies.append(f"fine where it is served so; --dtype {name} keeps every number")
    models = [side.role for side in setup.sides if side.role in stored]
    if len({stored[role] for role in models}) > 1:
        troubles.append(f"{' and '.join(models)} differ")
        remedies.append(f"here both run in {dtype}; for a server, save the draft in the target's dtype")
    if troubles:
        return Finding("warning", "dtype", "; ".join([text, *troubles]), "; ".join(remedies))
    wider = any(kind.itemsize < run_dtype.itemsize for kind in kinds.values())
    return Finding("ok", "dtype", f"{text}; to run in {dtype}" + (", exactly but in more memory" if wider else ""))


def _vocabulary(sides: list[Side]) -> Finding:
    tokenizer = sides[0].tokenizer
    text = ", ".join(f"{side.role} {side.head} logits" for side in sides)
    alike = sides[0].tokenizer.get_vocab() == sides[-1].tokenizer.get_vocab()
    for side in sides:
        target_config = None if side is sides[0] or not alike else sides[0].config
        try:
            check_head(side.config, side.tokenizer, side.role, target_config)
        except InputError as error:
            return Finding("error", "vocabulary", str(error), "resize_token_embeddings(len(tokenizer)), and train them")
    tokens = token_count(tokenizer, sides[0].config)
    if any(side.head > token_count(side.tokenizer, side.config) for side in sides):
        text += f" for {tokens} tokens: prepare writes no padding, and a draft without a row for it reads another token"
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
            return Finding("error", "rollback", str(error), "take another draft, or attn_implementation sdpa")
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


def _positions(setup: Setup, context: int | None) -> Finding:
    name, text = "positions", ", ".join(f"{side.role} {side.positions or 'without limit'}" for side in setup.sides)
    limits = {side.role: side.positions for side in setup.sides if side.positions is not None}
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


def _chat_template(target: Side, drafts: Sequence[Side]) -> Finding:
    name, template = "chat template", target.tokenizer.chat_template
    if template is None:
        remedy = "right for a base model; for a chat model copy its chat_template.jinja there, because your users' "
        remedy += "prompts go through it"
        return Finding("warning", name, "none in the target's tokenizer: prompts are plain text", remedy)
    text = "turns are found by rendering each in its own context"
    others = [draft for draft in drafts if draft.tokenizer.chat_template != template]
    for draft in others:
        text += f"; {'none' if draft.tokenizer.chat_template is None else 'another one'} in the {draft.role}"
    if others:
        text += ", which does not matter: the target's is used"
    elif drafts:
        text += ", the same in both" if len(drafts) == 1 else ", the same in all"
    return Finding("ok", name, text)


def _special_tokens(target: Side, drafts: Sequence[Side]) -> Finding:
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
    for draft in drafts:
        if draft.ends and set(draft.ends) != set(target.ends):
            text += f"; the {draft.role}'s would end with {list(draft.ends)}, which does not matter: the target decides"
    if by_tokenizer or not ends:
        return Finding("warning", name, text, "put eos_token_id into generation_config.json, or `generate` runs on")
    return Finding("ok", name, text)
