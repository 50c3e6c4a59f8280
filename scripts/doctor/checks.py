"""What `draftsmith doctor` checks without loading weights: whether target, draft and heads fit each other."""

import platform
from collections.abc import Iterator, Sequence
from functools import reduce

import torch

from draftsmith.decode.cache import check_model
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.renumbered import matching_ids
from draftsmith.distill.parallel.layout import is_parallel, is_unused, length_of, mask_token_of, tree_of
from draftsmith.scripts.doctor.heads import check_eagle, check_medusa
from draftsmith.train.data.chat.masks import has_generation_markers, mask_conversation
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import STORED, Pair, Part, Side, counted
from draftsmith.train.models import DTYPES, check_head, check_same_tokenizer

CHEAP = 0.5  # a draft of more than this share of the target's parameters hardly pays


def check_pair(pair: Pair, context: int | None, dtype: str, device: torch.device) -> Iterator[Finding]:
    """Check each of them, and whether they fit each other.

    Args:
        pair: what was given.
        context: tokens of a text, prompt included; None for as many as the models have positions.
        dtype: that the models are to run in, by its name.
        device: where.
    """
    target, draft, heads, sides = pair.target, pair.draft, pair.heads, pair.sides
    if target is not None and draft is not None:
        yield _sizes(target, draft)
        yield _tokenizers(target, draft)
    if draft is not None and is_parallel(draft.model.config):
        yield _parallel(draft)
    if sides:
        yield _vocabulary(sides)
        yield _rollback(sides)
        yield _positions(pair, context)
    if target is not None and heads is not None:
        yield check_medusa(target, heads)
    if target is not None and pair.eagle is not None:
        yield check_eagle(target, pair.eagle)
    if pair.parts:
        yield _dtype(pair.parts, dtype, device)
    if target is not None:
        yield _chat_template(target, draft)
        yield _special_tokens(target, draft)


def bfloat16_is_native(device: torch.device) -> bool:
    """Say whether a device computes in bfloat16 itself; one that does not takes a detour over float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return True  # not to be asked of other processors


def _dtype(parts: Sequence[Part], dtype: str, device: torch.device) -> Finding:
    wanted, troubles, remedies = DTYPES[dtype], list[str](), list[str]()
    stored = {part.role: part.stored.most_common(1)[0][0] for part in parts if part.stored}
    kept = {role: STORED[name] for role, name in stored.items() if name in STORED}
    text = ", ".join(f"{role} in {name}" for role, name in stored.items())
    text = f"stored: {text}" if text else "what is stored was not looked at"
    if wanted == torch.bfloat16 and not bfloat16_is_native(device):
        troubles.append(f"this {device.type} computes bfloat16 by way of float32")
        remedies.append("compare --dtype float32 by --costs true")
    rounded = [role for role, kind in kept.items() if torch.promote_types(kind, wanted) != wanted]
    if rounded:
        widest = reduce(torch.promote_types, kept.values())
        name = next(name for name, value in DTYPES.items() if value == widest)
        troubles.append(f"{dtype} rounds {' and '.join(rounded)}")
        remedies.append(f"fine where it is served so; --dtype {name} keeps every number")
    models = {stored[role] for role in ("target", "draft") if role in stored}
    if len(models) > 1:
        troubles.append("target and draft differ")
        remedies.append(f"here both run in {dtype}; for a server, save the draft in the target's dtype")
    if troubles:
        return Finding("warning", "dtype", "; ".join([text, *troubles]), "; ".join(remedies))
    wider = any(kind.itemsize < wanted.itemsize for kind in kept.values())
    return Finding("ok", "dtype", f"{text}; to run in {dtype}" + (", exactly but in more memory" if wider else ""))


def _parallel(draft: Side) -> Finding:
    name = "parallel"
    try:
        mask, length = mask_token_of(draft.model), length_of(draft.model.config)
        tree = tree_of(draft.model.config)
    except InputError as error:
        text = str(error).removeprefix("parallel draft: ")
        return Finding("error", name, text, "write into its config.json what it was trained with")
    known = "tokens" if length is None else f"{length} tokens"
    text = f"drafts {known} in one forward (--parallel_draft), with token {mask} for a mask"
    if tree is not None:
        text += f", and a tree of {len(tree)}, {tree.depth} deep"
    if is_unused(draft.tokenizer, mask):
        return Finding("ok", name, text)
    remedy = "drafts stay lossless, but it can't tell a mask from text: train with an unused token"
    written = draft.tokenizer.convert_ids_to_tokens(mask)
    return Finding("warning", name, f"{text}, which texts may contain: {written!r}", remedy)


def _sizes(target: Side, draft: Side) -> Finding:
    p, q = target.model.num_parameters(), draft.model.num_parameters()
    text = f"the draft has {q / p:.1%} of the target's parameters"
    if q > CHEAP * p:
        return Finding("warning", "sizes", text, "a draft pays by being far cheaper: --costs true says from which α on")
    return Finding("ok", "sizes", text)


def _tokenizers(target: Side, draft: Side) -> Finding:
    name, alike = "tokenizers", matching_ids(draft.tokenizer, target.tokenizer) is not None
    try:
        check_same_tokenizer(target.tokenizer, draft.tokenizer, target.path, draft.path, vocab_size=target.head)
    except InputError as error:
        difference = str(error).rpartition("found ")[2]
        if alike:
            return Finding(
                "warning",
                name,
                f"the same pieces under other ids: {difference}",
                "generate and RetokenizedProposer renumber them at any temperature; distill and measure want one "
                "tokenizer for both",
            )
        return Finding(
            "warning",
            name,
            difference,
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


def _vocabulary(sides: list[Side]) -> Finding:
    tokenizer = sides[0].tokenizer
    text = ", ".join(f"{side.role} {side.head} logits" for side in sides)
    alike = sides[0].tokenizer.get_vocab() == sides[-1].tokenizer.get_vocab()
    for side in sides:
        try:
            check_head(
                side.config, side.tokenizer, side.role, None if side is sides[0] or not alike else sides[0].config
            )
        except InputError as error:
            return Finding("error", "vocabulary", str(error), "resize_token_embeddings(len(tokenizer)), and train them")
    tokens = token_count(tokenizer, sides[0].config)
    if any(side.head > token_count(side.tokenizer, side.config) for side in sides):
        text += f" for {tokens} tokens: padding is never drafted or written"
    beyond = sorted((number, piece) for piece, number in tokenizer.get_vocab().items() if number >= tokens)
    if beyond:
        text += (
            f"; {counted(len(beyond), 'added token')} without one, first {beyond[0][1]!r}: never written, and texts "
        )
        text += "that hold it are refused"
    if len({side.head for side in sides}) > 1 and alike:
        # SpeculativeConfig.verify_equal_vocab_size_if_draft_model, called for the method draft_model
        return Finding(
            "warning",
            "vocabulary",
            text,
            "fine here, but vLLM's draft_model refuses unequal vocab_size: "
            f"resize_token_embeddings({max(side.head for side in sides)}) before training",
        )
    return Finding("ok", "vocabulary", text)


def _rollback(sides: list[Side]) -> Finding:
    for side in sides:
        try:
            check_model(side.model, side.role)
        except InputError as error:
            return Finding("error", "rollback", str(error), "take another architecture, or attn_implementation sdpa")
    return Finding("ok", "rollback", "rejected tokens can be dropped from the cache")


def _positions(pair: Pair, context: int | None) -> Finding:
    name, text = "positions", ", ".join(f"{side.role} {side.positions or 'without limit'}" for side in pair.sides)
    limits = pair.positions
    if context is not None:
        text += f", for texts of {context}"
        if context > limits.get("target", context):
            return Finding("error", name, text, f"--context {limits['target']} at most, or a target that reads further")
    wanted = context or limits.get("target")
    if "draft" in limits and (wanted is None or limits["draft"] < wanted):
        return Finding(
            "warning", name, text, f"keep prompt and text within {limits['draft']} tokens, or take a longer draft"
        )
    return Finding("ok", name, text)


def _chat_template(target: Side, draft: Side | None) -> Finding:
    name, template = "chat template", target.tokenizer.chat_template
    if template is None:
        return Finding(
            "warning",
            name,
            "none in the target's tokenizer: prompts are plain text",
            "right for a base model; for a chat model copy its chat_template.jinja there, or acceptance is that of "
            "texts nobody asks for",
        )
    marked = has_generation_markers(target.tokenizer)
    text = "with generation markers" if marked else "without generation markers: turns are found by comparison"
    if draft is None or draft.tokenizer.chat_template == template:
        return Finding("ok", name, text + (", the same in both" if draft is not None else ""))
    other = "none in the draft" if draft.tokenizer.chat_template is None else "another one in the draft"
    return Finding("ok", name, f"{text}; {other}, which does not matter: the target's is used")


def _special_tokens(target: Side, draft: Side | None) -> Finding:
    name, tokenizer = "special tokens", target.tokenizer
    ends = {token: f"{tokenizer.decode([token])!r} ({token})" for token in target.ends}
    text = f"texts end with {', '.join(ends.values())}" if ends else "nothing ends a text in generation_config.json"
    text += f", padding is {tokenizer.pad_token!r}"
    wanted = {} if tokenizer.eos_token_id is None else {tokenizer.eos_token_id: "the tokenizer's end of sequence"}
    if tokenizer.chat_template is not None:
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        try:
            masked = mask_conversation(talk, tokenizer, "Hello")
        except InputError as error:
            return Finding("warning", name, f"{text}; {error}", "answers in your data cannot be masked as they are")
        last = next((token for token, bit in zip(masked.ids[::-1], masked.mask[::-1], strict=True) if bit), None)
        if last is not None and last in tokenizer.added_tokens_decoder:
            # What ends an answer matters; the tokenizer's own may end whole documents in pretraining alone.
            wanted = {last: "what ends an answer in the chat template"}
    for token, role in wanted.items():
        if token not in ends:
            return Finding(
                "warning",
                name,
                f"{text}, but not with {tokenizer.decode([token])!r} ({token}), {role}",
                f"put {sorted({*target.ends, token})} into generation_config.json as eos_token_id, or texts run on",
            )
    if draft is not None and draft.ends and set(draft.ends) != set(target.ends):
        text += f"; the draft's generation config says {list(draft.ends)}, which does not matter: the target decides"
    return Finding("ok" if ends else "warning", name, text, "" if ends else "put eos_token_id there, or texts run on")
