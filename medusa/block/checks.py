"""Checks of `draftsmith doctor` for block drafters: files of any tool, their target, and runs that train them.

Files that leave something out fail silently: a reader that counts layers differently, a mask token that texts hold, a
rotation by another angle. So these checks report what the trainer meant, and what vLLM does (0.32,
`models/qwen3_dflash.py`, `models/qwen3_dspark.py`, `worker/gpu/spec_decode/eagle/eagle3_utils.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from draftsmith.decode.cache.features import decoder_layers
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError, at_most
from draftsmith.medusa.base import drop_whole_maps
from draftsmith.medusa.block.blocks import SHARE
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.block.formats.importing import TARGET_TENSORS, TRAINING_ALONE, import_block, read_block_config
from draftsmith.medusa.block.heads import family, foreign_names, side_width
from draftsmith.medusa.block.heads.dspark import REMEDY
from draftsmith.medusa.block.initial import choose_init, mask_token, new_drafter, with_further_heads
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.checkpoint_files import read_config, read_safetensors, shards
from draftsmith.medusa.checks import feature_heads, learning_rate, rotation, whole_files
from draftsmith.train.checkpoint import files_of
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import Part, Side, load_part
from draftsmith.train.kinds.quantities import count
from draftsmith.train.losses.output_head import head_of

TREE = "block_tree"
OWN = "anchor_guesses"
"""A field that only our configs have."""


def inspect(spec: DrafterSpec) -> tuple[Part | None, Finding]:
    """Load a drafter without its weights, and describe it; None if it does not load."""
    remedy = "give a drafter of ours, z-lab's, SpecForge's, DeepSpec's or speculators', whole"

    def described(model: BlockDrafter) -> str:
        config = model.config
        layers = ", ".join(map(str, model.layer_ids))
        return f"{family(config)} drafter of {config.guesses} tokens, features after layers {layers}{config.windows}"

    names = {foreign: ours for ours, foreign in foreign_names().items()}

    def ours(name: str) -> str | None:
        name = name.removeprefix("model.")
        return None if name in TARGET_TENSORS or TRAINING_ALONE.match(name) else names.get(name, name)

    return load_part(spec, _empty, described, remedy, lambda model: model.cached_numbers, ours)


def _empty(path: str) -> BlockDrafter:
    """Return the drafter without data, except for the tokens that it may draft."""
    directory = files_of(path)
    config: Any = read_block_config(directory)
    with torch.device("meta"):
        model = BlockDrafter(config)
    if model.d2t is None and OWN in read_config(directory):
        return model
    try:
        stored = read_safetensors(shards(directory), {"d2t", "t2d", "lm_head.weight"}.__contains__)
    except InputError:
        return model  # the finding about its checkpoint reports this
    if "d2t" not in stored:
        return model
    if model.d2t is None:
        drop_whole_maps(directory, config, dict(stored))
        model.d2t = stored["d2t"]  # the import drops it, so that it is not one too many
    elif stored["d2t"].shape == model.d2t.shape:
        model.d2t = stored["d2t"].long()
        model.check_tokens("d2t", stored)
    return model


def compare(target: Side, part: Part) -> Iterator[Finding]:
    """Check whether a drafter fits the target, the tree fits it, and servers read its files as meant."""
    drafter = part.model
    remedy = "take a drafter of this target, or train one: draftsmith block --target TARGET"
    fits = feature_heads("block drafter", target, part, TREE, "it reads", remedy)
    yield fits
    if fits.state == "error":
        return
    raw = read_config(files_of(part.path), "a block drafter")
    yield layers_seen(raw, drafter, target)
    yield mask(target, drafter.config.mask_token_id)
    yield rotation("block rotation", raw)
    yield slots(raw, drafter)
    yield from whole_files("block files", target, part, import_block, "train a drafter on the target's own embedding")


def layers_seen(raw: Mapping[str, Any], drafter: BlockDrafter, target: Side) -> Finding:
    """Compare the trainer's layers with those that vLLM takes."""
    name, trained = "block layers", drafter.layer_ids
    text = f"features after layers {_listed(trained)}"
    if OWN in raw:
        return Finding("ok", name, text)
    named = raw.get("aux_hidden_state_layer_ids") or raw.get("target_layer_ids")
    if not (named or (raw.get("dflash_config") or {}).get("target_layer_ids")):
        text += ", those of DFlash's paper, for its config names none"
        return Finding("warning", name, text, "put target_layer_ids there, as it was trained")
    served = raw.get("eagle_aux_hidden_state_layer_ids")
    if served is not None and "speculators_model_type" not in raw and list(served) != trained:
        text += f", by target_layer_ids; vLLM takes those after layers {_listed(served)}"
        return Finding("error", name, text, f"let eagle_aux_hidden_state_layer_ids be {trained}, or leave it out")
    if trained[-1] == len(decoder_layers(target.model)):
        text += ", the last: the library's output_hidden_states are normed there, and what servers take is not"
        return Finding("warning", name, text, "make sure that it was trained on states before the last norm")
    counted = "after how many layers" if "speculators_model_type" in raw else "from 0, by their outputs"
    return Finding("ok", name, f"{text}; its config counts {counted}, and vLLM takes the same")


def mask(target: Side, token: int) -> Finding:
    """Report the token that stands for a mask, and whether texts hold it."""
    name, size = "block mask", len(target.tokenizer)
    if token >= size:
        return Finding("ok", name, f"row {token} of the target's embedding, after its {size} tokens")
    piece = f"{target.tokenizer.convert_ids_to_tokens(token)!r} ({token})"
    if token in target.ends:
        return Finding("warning", name, f"{piece}, which ends texts", "train with another mask_token")
    if token in target.tokenizer.all_special_ids or token in target.tokenizer.added_tokens_decoder:
        return Finding("ok", name, f"{piece}, a token that texts do not hold")
    return Finding(
        "warning", name, f"{piece}, which texts hold too", "check mask_token_id: is it what it was trained with?"
    )


def slots(raw: Mapping[str, Any], drafter: BlockDrafter) -> Finding:
    """Report how many tokens a block drafts, and what a server must be told."""
    name, config = "block slots", drafter.config
    guesses = "the anchor's guesses the next token" if config.anchor_guesses else "the anchor's guesses nothing"
    text = f"{config.block_size} slots, {guesses}: num_speculative_tokens is to be {config.guesses}, as trained"
    if not side_width(config) and config.anchor_guesses:
        return Finding("warning", name, f"{text}; no server decodes that", f"{REMEDY} for one")
    if raw.get("speculators_model_type") == "dspark" and "sample_from_anchor" not in raw:
        text += "; its config does not say sample_from_anchor, which the library takes for true, and vLLM for false"
        return Finding("error", name, text, "write sample_from_anchor there, as it was trained")
    if drafter.side_head is not None:
        text += f"; {drafter.side_head.served}"
    return Finding("ok", name, text)


def _listed(layers: Any) -> str:
    return ", ".join(map(str, layers))


def check_run(target: Side, config: BlockTrainingConfig) -> tuple[str, list[Finding]]:
    """Return a description of a training run and further findings, or raise an InputError if it cannot begin."""
    if config.heads is not None:
        drafter = BlockDrafter.without_weights(config.heads)
        drafter.check_fits(target.model)
        drafter, titles = with_further_heads(drafter, config)
        clause = f", and a new {' and '.join(titles)}" if titles else ""
    else:
        tokens, rows = config.draft_vocabulary, len(head_of(target.model).weight)
        at_most(token_count(target.tokenizer, target.config)).check("draft_vocabulary", tokens or 0)
        token_map = None if tokens is None else torch.arange(tokens)
        token = mask_token(target.tokenizer, rows) if config.mask_token is None else config.mask_token
        with torch.device("meta"):
            drafter = new_drafter(config, target.model, token, token_map)
        clause = f", {choose_init(config, drafter, target.model)[1]}"
    findings = []
    if config.training.learning_rate is not None:
        findings.append(learning_rate(config.training.learning_rate, drafter.config.hidden_size))
    findings.append(mask(target, drafter.config.mask_token_id))
    blocks = f"{config.anchors} blocks a row" if config.anchors else f"a block of every {SHARE} tokens"
    text = f"a drafter of {count(drafter.num_parameters())} parameters, features after layers "
    return (
        f"{text}{_listed(drafter.layer_ids)}, {drafter.config.guesses} tokens a block, {blocks} a step{clause}",
        findings,
    )
