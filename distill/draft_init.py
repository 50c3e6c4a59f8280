"""The initial draft: an existing model, some of the target's layers, or random weights; optionally with LoRA.

Carving keeps weights, so a short training has less to repair. Of the embedded target's 12 layers, 4 evenly spaced ones
begin with an acceptance rate of 0.48 on Python sources, the first 4 with 0.43, and random weights with 0.10.
`carving.py` chooses the layers.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache.features import decoder_of, last_norm
from draftsmith.decode.cache.states import layer_kinds
from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.decode.proposers.early_exit import early_exit
from draftsmith.distill.carving import Carving, alternating_layers, attention_layers, describe, scale_norm, ways_to_keep
from draftsmith.distill.config import DraftInit
from draftsmith.distill.vocabulary import fit_vocabulary, silence_padding
from draftsmith.train.checkpoint import check_rope, check_rope_keys
from draftsmith.train.data.first_look import print_once
from draftsmith.train.files import atomic_files
from draftsmith.train.lora import add_lora
from draftsmith.train.models import (
    check_head,
    check_same_tokenizer,
    empty_model,
    load_config,
    load_model,
    load_tokenizer,
    stored_dtype,
    whole_weights,
)
from draftsmith.train.quantization import float_state


@phase("making the draft")
def make_draft(
    draft: str | None,
    init: DraftInit,
    target: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase,
    choose: Callable[[Sequence[list[int]], Callable[[list[int]], PreTrainedModel]], Carving] | None = None,
    *,
    trained_padding: Sequence[int] = (),
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the initial draft, in eval mode on the CPU in float32, and the tokenizer to save with it.

    Only trainable parameters have `requires_grad`. The tokenizer is the draft's if both map all tokens alike, and the
    target's otherwise.

    `target` is the unsharded model, which shares no memory with the draft, or its path; weights are read only if the
    draft needs them. `choose` is like `carving.choose`, given candidate layers and a function that makes a draft of
    them; None takes evenly spaced layers. `trained_padding` is as in `silence_padding`, for an existing draft.

    Raises:
        InputError: no or two sources, another tokenizer, or a shape that the target cannot be cut to.
    """
    init.check_source(draft)
    draft_tokenizer = tokenizer
    with whole_weights(), torch.random.fork_rng(devices=[]):
        if not isinstance(target, PreTrainedModel) and (init.layers is not None or init.share == "embeddings"):
            dtype = stored_dtype(load_config(target, field="target", trust_remote_code=trust_remote_code))
            target = load_model(target, field="target", dtype=dtype, trust_remote_code=trust_remote_code, device="cpu")
        elif not isinstance(target, PreTrainedModel):
            target = empty_model(target, field="target", trust_remote_code=trust_remote_code)
        torch.manual_seed(init.seed)
        size = target.config.get_text_config().vocab_size
        if draft is not None:
            stored = load_tokenizer(draft, field="draft", trust_remote_code=trust_remote_code)
            check_same_tokenizer(
                tokenizer, stored, str(target.name_or_path), draft, vocab_size=size, ends_may_differ=True
            )
            draft_tokenizer = stored if stored.get_vocab() == tokenizer.get_vocab() else tokenizer
            model = load_model(draft, field="draft", trust_remote_code=trust_remote_code, device="cpu")
            if (tokens_D := kept_tokens(model.config)) is not None and init.draft_vocabulary is not None:
                sizes = f"{init.draft_vocabulary} and the draft's {len(tokens_D)}"
                raise InputError(f"init.draft_vocabulary: expected none for a draft that has one, found {sizes}")
        else:
            model = _carved(target, init, choose) if init.layers is not None else _random(target, init.config or {})
            model.generation_config = copy.deepcopy(target.generation_config)
        model.eval().requires_grad_(True)
        if init.share == "embeddings":
            _share_embeddings(model, target)
        fit_vocabulary(
            model, token_count(tokenizer, target.config), size if init.pad_vocabulary else None, trained_padding
        )
        check_head(model.config, tokenizer, "draft", target.config)
        if init.lora is not None:
            add_lora(model, init.lora)
    return model, draft_tokenizer


def layer_indices(layers: int | Sequence[int], kinds: Sequence[str]) -> list[int]:
    """Return the indices of the layers to keep, evenly spaced if `layers` is a number; `kinds` are the target's."""
    depth, attending = len(kinds), attention_layers(kinds)
    if isinstance(layers, int):
        if not 1 <= layers <= depth:
            raise InputError(f"init.layers: expected between 1 and the target's {depth}, found {layers}")
        if attending:
            return alternating_layers(kinds, layers)
        return [round(i * (depth - 1) / max(layers - 1, 1)) for i in range(layers)]
    indices = list(layers)
    if not indices or indices != sorted(set(indices)) or indices[0] < 0 or indices[-1] >= depth:
        raise InputError(f"init.layers: expected ascending indices between 0 and {depth - 1}, found {indices}")
    if attending and attending.isdisjoint(indices):
        raise InputError(
            f"init.layers: expected some of the layers with attention, {', '.join(map(str, sorted(attending)))}, found "
            f"{', '.join(map(str, indices))}, without any"
        )
    return indices


def _carved(target: PreTrainedModel, init: DraftInit, choose: Any) -> PreTrainedModel:
    target = text_model(target)
    kinds, _ = layer_kinds(target.config.get_text_config())
    carving = Carving(layer_indices(init.layers or 0, kinds))
    if choose is not None:
        ways = ways_to_keep(carving.layers, kinds) if isinstance(init.layers, int) else [carving.layers]
        carving = choose(ways, partial(_view, target))
    if attention_layers(kinds):
        print_once(f"init: of the target's layers {describe(carving.layers, kinds)}")
    # Build the model from its config and copy the view's weights: the view shares the target's tensors.
    view = _view(target, carving.layers)
    draft = _built(target, view.config.to_dict(), "init")
    try:
        draft.load_state_dict(float_state(view, view.dtype))
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise InputError(f"init: expected weights that fit the carved config, found: {reason}") from error
    norm = last_norm(draft)
    if carving.scale != 1 and norm is not None:
        scale_norm(norm, carving.scale)
    return draft


def _view(target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Return a model of some of the target's layers, which shares their tensors."""
    view = early_exit(target, layers)
    config = view.config
    if getattr(config, "scale_attn_by_inverse_layer_idx", False) and layers != list(range(len(layers))):
        raise InputError(
            f"init.layers: expected the first {len(layers)}, as the target scales by depth, found {layers}"
        )
    if getattr(config, "max_window_layers", None) is not None:  # Qwen 2: layers from this one on have windows
        config.max_window_layers = sum(index < config.max_window_layers for index in layers)
    return view


def _random(target: PreTrainedModel, overrides: dict[str, Any]) -> PreTrainedModel:
    target = text_model(target)
    config = target.config
    values = config.to_dict()
    changes = {config.attribute_map.get(name, name): value for name, value in overrides.items()}
    unknown = sorted(set(changes) - set(values) | changes.keys() & {"model_type", "architectures", "dtype"})
    if unknown:
        raise InputError(f"init.config: expected fields of {type(config).__name__}, found {unknown[0]!r}")
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    depth = values[name]
    if changes.get(name, depth) != depth:
        # Drop lists with an entry for each layer, such as layer_types: the config derives them in its family's pattern.
        values = {
            key: value
            for key, value in values.items()
            if not ("layer" in key and isinstance(value, list) and len(value) == depth)
        }
    check_rope_keys(changes, "init.config: ")
    check_rope(changes, "init.config: ")
    return _built(target, values | changes, "init.config")


def _built(target: PreTrainedModel, values: dict[str, Any], field: str) -> PreTrainedModel:
    """Return a model of the target's class with random weights in float32."""
    values.pop("quantization_config", None)  # a draft is not quantised as its target is
    try:
        # From a dict, as a reload reads it, so that the draft in memory and the saved one are equal.
        config = type(target.config).from_dict({**values, "dtype": "float32"})
        config._attn_implementation = target.config._attn_implementation
        return type(target)(config).float()
    except (StrictDataclassError, ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise InputError(f"{field}: expected a valid {type(target.config).__name__}, found: {reason}") from error


def text_model(target: PreTrainedModel) -> PreTrainedModel:
    """Return a target's text model, with its tensors: the target itself, or the part of one that sees images."""
    text, decoder = target.config.get_text_config(), decoder_of(target)
    if text is target.config:
        return target
    if type(text) in AutoModelForCausalLM._model_mapping:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(text)
        if type(model.base_model) is type(decoder):
            setattr(model, model.base_model_prefix, decoder)
            model.set_output_embeddings(target.get_output_embeddings())
            return model.eval()  # type: ignore[no-any-return]
    raise InputError(f"target: expected a family with a text model to make a draft from, found {type(target).__name__}")


@torch.no_grad()
def _share_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    for matrix, source in (
        (draft.get_input_embeddings(), target.get_input_embeddings()),
        (draft.get_output_embeddings(), target.get_output_embeddings()),
    ):
        try:
            matrix.load_state_dict(source.state_dict())  # type: ignore[union-attr]
        except RuntimeError as error:
            reason = str(error).splitlines()[1].strip()
            raise InputError(f"init.share: expected embeddings of the target's shape, found: {reason}") from error
        matrix.requires_grad_(False)  # type: ignore[union-attr]


def finish_draft(
    directory: Path, tokens: int, trained_padding: Sequence[int] = (), *, trust_remote_code: bool = False
) -> None:
    """Silence the padding of a saved draft's head, which training left as it was: see `silence_padding`.

    It works on disk, so that sharded drafts are treated alike, and must run in one process.
    """
    config = load_config(directory, field="draft", trust_remote_code=trust_remote_code)
    if config.get_text_config().vocab_size <= tokens:
        return
    dtype = stored_dtype(config)
    model = load_model(directory, field="draft", dtype=dtype, trust_remote_code=trust_remote_code, device="cpu")
    silence_padding(model, tokens, trained_padding)
    with atomic_files(directory) as aside:
        model.save_pretrained(aside)
