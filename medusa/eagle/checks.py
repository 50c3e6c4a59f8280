"""Checks of `draftsmith doctor` for EAGLE-3 heads: their files, their target, and runs that train them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from draftsmith.decode.cache.features import decoder_layers, default_layers
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError, at_most
from draftsmith.medusa.base import drop_whole_maps, rope_of
from draftsmith.medusa.checkpoint_files import CONFIG, read_config, read_safetensors, shards
from draftsmith.medusa.checks import feature_heads, learning_rate, rotation, whole_files
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.formats.importing import (
    TRAINING_ALONE,
    complete_maps,
    import_eagle,
    our_name,
    read_eagle_config,
)
from draftsmith.medusa.eagle.formats.writing import DEPTHS, EMBEDDINGS
from draftsmith.medusa.eagle.heads import TREE, EagleHeads
from draftsmith.medusa.eagle.initial import choose_init, new_heads
from draftsmith.train.checkpoint import files_of
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import Part, Side, load_part
from draftsmith.train.kinds.quantities import count

WHAT = "EAGLE-3 heads"
UNSAID = [1, 2, 3]
"""Depths for heads whose config names none, until their target is known."""


def inspect(spec: DrafterSpec) -> tuple[Part | None, Finding]:
    """Load heads without their weights, and describe them; None if they do not load."""
    remedy = "give heads of ours, the EAGLE authors', SpecForge's or speculators', whole"

    def described(model: EagleHeads) -> str:
        return f"EAGLE-3 heads, features after layers {', '.join(map(str, model.layer_ids))}{model.config.windows}"

    def ours(name: str) -> str | None:
        return None if our_name(name) == EMBEDDINGS or TRAINING_ALONE.search(name) else our_name(name)

    optional = () if _foreign(files_of(str(spec.path))) is None else ("t2d",)
    return load_part(spec, _empty, described, remedy, lambda model: model.cached_numbers, ours, optional)


def _foreign(directory: Path) -> dict[str, Any] | None:
    """Return the config of another tool's heads; None for ours, or without a config."""
    if not (directory / CONFIG).is_file():
        return None
    raw = read_config(directory, WHAT)
    return raw if "speculators_model_type" in raw or raw.get(DEPTHS) is None else None


def _empty(path: str) -> EagleHeads:
    """Return heads without data, except for the tokens that they may draft."""
    directory = files_of(path)
    if _foreign(directory) is None:
        model = EagleHeads.without_weights(path)
        if model.d2t is None:
            return model
    else:
        with torch.device("meta"):
            model = EagleHeads(read_eagle_config(directory, unsaid=UNSAID))
    config: Any = model.config
    try:
        stored = read_safetensors(shards(directory), {"d2t", "t2d"}.__contains__)
    except InputError:
        return model  # the finding about its checkpoint reports this
    if "d2t" not in stored:
        return model
    if model.d2t is None or model.t2d is None:
        drop_whole_maps(directory, config, dict(stored))
        model.d2t, model.t2d = stored["d2t"], stored.get("t2d")  # the import drops them, so that they are not too many
    elif stored["d2t"].shape == model.d2t.shape:
        complete_maps(directory, config, stored)
        t2d = stored.get("t2d", torch.zeros(model.t2d.shape))
        if t2d.shape == model.t2d.shape:
            # These two are data, not weights: which tokens the heads may draft is checked.
            model.d2t, model.t2d = stored["d2t"].long(), t2d.bool()
            model.check_tokens("d2t")
    return model


def compare(target: Side, heads: Part) -> Iterator[Finding]:
    """Check whether EAGLE-3 heads fit the target, the tree fits them, and servers read other tools' files the same."""
    directory = files_of(heads.path)
    raw = _foreign(directory)
    if raw is not None:
        layers, finding = layers_seen(raw, directory, len(decoder_layers(target.model)))
        # Until now the depths were placeholders: the config may name none.
        heads.model.config.eagle_aux_hidden_state_layer_ids = layers
    remedy = "take heads of this target, or train them: draftsmith eagle --target TARGET"
    fits = feature_heads("eagle heads", target, heads, TREE, "they read", remedy)
    yield fits
    if raw is not None:
        yield finding
        yield rotation("eagle rotation", raw)
    if fits.state != "error":
        yield from whole_files(
            "eagle files", target, heads, import_eagle, "train heads that see the target's embedding"
        )


def layers_seen(raw: Mapping[str, Any], directory: Path, layers: int) -> tuple[list[int], Finding]:
    """Return the depths of features that the trainer meant, and whether servers take the same.

    In `eagle_config` SpecForge and SGLang count layers by their outputs, from 0; vLLM 0.32 counts the layers before.
    `raw` is another tool's config.json in `directory`, and `layers` the target's number of layers.
    """
    name, default = "eagle layers", default_layers(layers)
    trained, served = (
        read_eagle_config(directory, format, unsaid=default).eagle_aux_hidden_state_layer_ids
        for format in ("sglang", "vllm")
    )
    text = f"features after layers {', '.join(map(str, trained))}"
    if raw.get(DEPTHS) is None and (raw.get("eagle_config") or {}).get(DEPTHS) is None:
        text += f" of {layers}, the authors' default, for the config names none"
        return trained, Finding("ok", name, f"{text}; vLLM and SGLang take the same")
    if trained != served:
        text += f", as SGLang takes them; vLLM takes those after layers {', '.join(map(str, served))}"
        return trained, Finding("warning", name, text, f"put {DEPTHS} {trained} at the top for vLLM")
    return trained, Finding("ok", name, text)


def check_run(target: Side, config: EagleTrainingConfig) -> tuple[str, list[Finding]]:
    """Return a description of a training run and further findings, or raise an InputError if it cannot begin."""
    findings = []
    if config.heads is not None:
        heads = EagleHeads.without_weights(config.heads)
        heads.check_fits(target.model)
        clause, ours = "", heads.config.rope_parameters
        theirs = rope_of(target.model.config.get_text_config())
        for name in ("rope_theta", "rope_type", "factor"):
            if ours.get(name) != theirs.get(name):
                own, last = (format(rope[name], "" if name == "rope_type" else "g") for rope in (ours, theirs))
                text = f"earlier heads rotate by a {name} of {own}, the target's last layer by {last}"
                findings.append(Finding("warning", name.replace("_", " "), text, "begin new ones: leave out heads"))
                break
    else:
        tokens = config.draft_vocabulary
        at_most(token_count(target.tokenizer, target.config)).check("draft_vocabulary", tokens or 0)
        token_map = None if tokens is None else torch.arange(tokens)
        with torch.device("meta"):
            heads = new_heads(config, target.model, token_map)
        clause = f", {choose_init(config, heads, target.model)[1]}"
    if config.training.learning_rate is not None:
        findings.append(learning_rate(config.training.learning_rate, heads.config.hidden_size))
    text = f"heads of {count(heads.num_parameters())} parameters, features after layers "
    return text + f"{', '.join(map(str, heads.layer_ids))}, {config.num_steps} steps{clause}", findings
