"""Block drafters from checkpoints of z-lab, SpecForge, DeepSpec, speculators and ours; no tensor is ignored silently.

| written by        | config.json                                              | the anchor's slot            |
|-------------------|----------------------------------------------------------|------------------------------|
| z-lab, SpecForge  | `DFlash(2)DraftModel`, a `dflash_config`                  | guesses nothing              |
| SpecForge         | the same for Domino, with `projector_type`                | as in `shift_label`          |
| DeepSpec          | `Qwen3DSparkModel`, all at the top                        | guesses the next token       |
| speculators       | the layers' in a `transformer_layer_config`               | as in `sample_from_anchor`   |
| draftsmith        | as one of these, or with `anchor_guesses`                 | as in `anchor_guesses`       |

Target layers are counted from 0, by their outputs; speculators counts the layers before. Embedding and output head are
the target's in all of these, and files may have copies of them.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Qwen3Config

from draftsmith.decode.cache.features import decoder_layers
from draftsmith.decode.errors import InputError
from draftsmith.medusa.base import SLIDING, WINDOWS, drop_whole_maps
from draftsmith.medusa.block.config import FAMILIES, SPECULATORS
from draftsmith.medusa.block.heads import HEADS, foreign_fields, foreign_names
from draftsmith.medusa.block.kind import Block
from draftsmith.medusa.block.model import BlockConfig, BlockDrafter, default_target_layers
from draftsmith.medusa.checkpoint_files import CONFIG, field, read_config, read_safetensors, shards
from draftsmith.medusa.formats import EMBEDDINGS, HEAD, SIZES, checked_config, read_heads
from draftsmith.train.kinds.export import check_format

WHAT = BlockDrafter.title
FOREIGN = (
    *("speculators_model_type", "speculators_config", "transformer_layer_config", "aux_hidden_state_layer_ids"),
    *("dflash_config", "causal", "sample_from_anchor", "sliding_window_non_causal", "dspark_bonus_anchor"),
    *("eagle_aux_hidden_state_layer_ids", "speculators_version", "num_anchors", "confidence_head_alpha"),
    *("shift_label", "mlp_bias", "pretraining_tp"),
)
"""Other tools' fields that are read into ours, or that no number depends on."""
TURNS = ("rope_parameters", "rope_theta", "rope_scaling")


def import_block(
    directory: str | Path, format: str | None = None, target: PreTrainedModel | None = None
) -> BlockDrafter:
    """Read a drafter that any of these tools wrote, on the CPU, in the widest dtype of its tensors, in eval mode.

    Files are recognised without their `format`. The target, which it must fit, is needed if the config names no layers,
    or the file holds copies of its embedding or head.

    Raises:
        InputError: a file, config, tensor or copy that is missing, damaged, not supported or does not match.
    """
    directory = Path(directory)
    if format is not None:
        check_format(format, Block.formats)
    config = read_block_config(directory, target)
    if (directory / "mask_embedding.pt").is_file():
        raise InputError(
            f"{directory}: expected masks that stand for a row of the target's embedding, found mask_embedding.pt"
        )
    # Some tools store the whole model under one prefix.
    stored = {name.removeprefix("model."): tensor for name, tensor in read_safetensors(shards(directory)).items()}
    drop_whole_maps(directory, config, stored)
    names = {ours: name for ours, name in foreign_names().items() if name in stored}
    drafter: BlockDrafter = read_heads(
        BlockDrafter, directory, config, stored, target, names=names, dropped=(EMBEDDINGS, HEAD)
    )
    return drafter


def read_block_config(directory: Path, target: PreTrainedModel | None = None) -> BlockConfig:
    """Return any of these tools' configs as ours, or raise an InputError; the target needs no weights."""
    raw, path = read_config(directory, WHAT), directory / CONFIG
    named = field(raw, path, "speculators_model_type", str, "")
    if named:
        if named not in (known := [family.lower() for family in SPECULATORS]):
            *first, last = known
            raise InputError(
                f"{path}: expected a speculators_model_type of {', '.join(first)} or {last}, found {named!r}"
            )
        # speculators nests the layers' fields, and names the kind of model at the top.
        flat = field(raw, path, "transformer_layer_config", dict) | {k: v for k, v in raw.items() if k != "model_type"}
        depths = field(raw, path, "aux_hidden_state_layer_ids", list)
        flat["target_layer_ids"] = [depth - 1 if type(depth) is int else depth for depth in depths]
        flat["anchor_guesses"] = field(raw, path, "sample_from_anchor", bool, named == "dspark")
        non_causal = field(raw, path, "sliding_window_non_causal", bool, named == "dflash2")
        flat["is_causal"] = False if non_causal else None
        verifier = field(field(raw, path, "speculators_config", dict, {}), path, "verifier", dict, {})
        flat["base_model_name_or_path"] = verifier.get("name_or_path") or None
    elif "anchor_guesses" in raw:
        flat = dict(raw)
    else:  # z-lab, SpecForge or DeepSpec
        # DeepSpec's anchors guess unless `dspark_bonus_anchor` is set; z-lab's never do.
        nested = field(raw, path, "dflash_config", dict, {})
        flat = raw | nested
        architectures = str(field(raw, path, "architectures", list, []))
        flat["anchor_guesses"] = "DSpark" in architectures and not field(raw, path, "dspark_bonus_anchor", bool, False)
        if "Domino" in architectures or nested.get("projector_type") == "domino":
            named = "domino"
            flat["anchor_guesses"] = field(nested, path, "shift_label", bool, False)
        flat["is_causal"] = nested.get("causal") if raw.get("is_causal") is None else raw["is_causal"]
    if "anchor_guesses" not in raw:
        families = [family for family in FAMILIES if family.lower() == named] or ["DSpark"]
        flat = foreign_fields(families[0]) | flat
    if flat.get("model_type", "qwen3") == "qwen3" and SLIDING in (flat.get("layer_types") or ()):
        flat.setdefault("sliding_window", Qwen3Config.sliding_window)  # speculators leaves out what is the default
    _check_known(flat, path)
    layers, count = flat.get("target_layer_ids"), field(flat, path, "num_hidden_layers", int)
    deep = field(flat, path, "num_target_layers", int, None if target is None else len(decoder_layers(target)))
    if layers is None:
        if deep is None:
            raise InputError(f"target: expected it for a drafter that names no layers, as in {directory}, found none")
        layers = default_target_layers(deep, count)
    names = (
        *SIZES,
        "draft_vocab_size",
        "block_size",
        "mask_token_id",
        "anchor_guesses",
        "base_model_name_or_path",
        "is_causal",
        "conv_kernel_size",
        "conv_group_size",
    )
    names += tuple(name for head in HEADS for name in head.fields)
    fields = {name: flat[name] for name in (*names, *TURNS, *WINDOWS) if name in flat}
    fields |= {"target_layer_ids": layers, "num_target_layers": deep, "tie_word_embeddings": False}
    return checked_config(BlockConfig, fields, path, WHAT)  # type: ignore[no-any-return]


def _check_known(flat: dict[str, Any], path: Path) -> None:
    """Raise an InputError if a config asks for something that our drafters do not support."""
    expected: dict[str, tuple[Any, ...]] = {
        "model_type": ("qwen3", "llama", None),
        **{
            name: (value, None)
            for head in HEADS
            for name, value in (head.foreign or {}).items()
            if name not in head.fields and name not in vars(BlockConfig)
        },
        "is_neox_style": (True, None),
        "use_swa": (False, None),
        "swa_window_size": (flat.get("sliding_window"), None),
        "projector_type": ("domino" if flat.get("emb_dim") else "dflash", None),
        "attention_mode": ("gqa", None),
        "use_aux_hidden_state": (True, None),
        "target_hidden_size": (flat.get("hidden_size"), None),
    }
    for name, known in expected.items():
        if flat.get(name) not in known:
            raise InputError(f"{path}: expected {name} {known[0]}, as our drafters are, found {flat[name]!r}")
    if odd := BlockConfig.unknown(flat, *expected, *FOREIGN):
        raise InputError(
            f"{path}: expected no {odd}, which our drafters do not have, found {flat[odd]!r}; leave it out if no "
            "number depends on it"
        )
