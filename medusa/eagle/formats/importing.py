"""EAGLE-3 heads from checkpoints of the EAGLE authors, SpecForge, speculators and ours; no tensor is ignored silently.

| written by        | config.json                                     | the layer  | depths                  |
|-------------------|-------------------------------------------------|------------|-------------------------|
| the EAGLE authors | flat                                            | `midlayer` | the default ones        |
| SpecForge         | flat; may have an `eagle_config`                | `midlayer` | in it, or the default   |
| speculators       | the layer's in a `transformer_layer_config`     | `layers.0` | at the top, or default  |
| draftsmith        | flat                                            | `midlayer` | at the top              |

At the top, n means after n layers. In `eagle_config` n means after n + 1 layers for SpecForge and SGLang, and after n
layers for vLLM 0.32.
"""

import re
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_layers, default_layers
from draftsmith.decode.errors import InputError
from draftsmith.medusa.base import check_distances, drop_whole_maps
from draftsmith.medusa.checkpoint_files import CONFIG, field, read_config, read_pickled, read_safetensors, shards
from draftsmith.medusa.eagle.config import SHAPE
from draftsmith.medusa.eagle.heads import EagleConfig, EagleHeads
from draftsmith.medusa.eagle.kind import Eagle
from draftsmith.medusa.formats import EMBEDDINGS, checked_config, read_heads
from draftsmith.train.kinds.export import check_format

PICKLED = "pytorch_model.bin"
DEPTHS = "eagle_aux_hidden_state_layer_ids"
DROPPED = ("architectures", "model_type", "auto_map", "eagle_config", "num_aux_hidden_states", "torch_dtype", "dtype")
"""Fields of other tools, or fields that we write anew."""


def import_eagle(directory: str | Path, format: str | None = None, target: PreTrainedModel | None = None) -> EagleHeads:
    """Read heads that any of these tools wrote, on the CPU, in the widest dtype of their tensors, in eval mode.

    With the format `vllm` an `eagle_config` counts layers as vLLM does, else as SGLang does. The target, which they
    must fit, is needed if the config names no depths, or the file holds embeddings.

    Raises:
        InputError: a file, config, tensor or embedding that is missing, damaged, not supported or does not match.
    """
    directory = Path(directory)
    if format is not None:
        check_format(format, Eagle.formats)
    unsaid = None if target is None else default_layers(len(decoder_layers(target)))
    config = read_eagle_config(directory, format, unsaid)
    tensors = _tensors(directory)
    complete_maps(directory, config, tensors)
    # Our heads see the target's embeddings: heads that were trained with others would draft badly.
    heads: EagleHeads = read_heads(EagleHeads, directory, config, tensors, target, dropped=(EMBEDDINGS,))
    return heads


def read_eagle_config(directory: Path, format: str | None = None, unsaid: list[int] | None = None) -> EagleConfig:
    """Return any of these tools' configs as ours, or raise an InputError; `unsaid` are the default depths."""
    raw, path = read_config(directory, "EAGLE-3 heads"), directory / CONFIG
    if named := field(raw, path, "speculators_model_type", str, ""):
        if named != "eagle3":
            raise InputError(f"{path}: expected a speculators_model_type of eagle3, found {named!r}")
        layer = field(raw, path, "transformer_layer_config", dict)
        # vLLM 0.32 (`transformers_utils/configs/speculators`, `update_eagle3`) takes the normed residual path.
        flat = {"norm_before_residual": True, **layer}
        verifier = field(field(raw, path, "speculators_config", dict, {}), path, "verifier", dict, {})
        flat["base_model_name_or_path"] = verifier.get("name_or_path")
        names = ("draft_vocab_size", "target_hidden_size", *SHAPE, DEPTHS)
        flat |= {name: raw[name] for name in names if raw.get(name) is not None}
    else:
        flat = dict(raw)  # the EAGLE authors', SpecForge's or ours
    kind = flat.get("model_type", "llama")
    if kind not in ("llama", "eagle"):
        raise InputError(f"{path}: expected the layer of model_type llama, found {kind!r}")
    nested = field(raw, path, "eagle_config", dict, {})
    if not field(nested, path, "use_aux_hidden_state", bool, True):
        raise InputError(f"{path}: expected heads that see features of some depths, found use_aux_hidden_state false")
    flat.setdefault("norm_before_fc", nested.get("norm_before_fc", False))
    # At the top all tools mean the same; in `eagle_config` they do not.
    depths = field(flat, path, DEPTHS, list, None)
    if depths is None:
        depths = field(nested, path, DEPTHS, list, None)
        offset = 0 if format == "vllm" else 1
        depths = depths and [depth + offset if isinstance(depth, int) else depth for depth in depths]
    if not depths:
        if unsaid is None:
            raise InputError(f"target: expected it for heads that name no depths, as in {directory}, found none")
        depths = unsaid
    fields = {name: value for name, value in flat.items() if name not in DROPPED} | {DEPTHS: depths}
    fields["tie_word_embeddings"] = False
    return checked_config(EagleConfig, fields, path, EagleHeads.title)  # type: ignore[no-any-return]


def our_name(name: str) -> str:
    """Return our name of any of these tools' tensors."""
    return re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))


def _tensors(directory: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors under the authors' names."""
    pickled, files = directory / PICKLED, shards(directory)
    stored = read_pickled(pickled) if pickled.is_file() and not files[0].is_file() else read_safetensors(files)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        ours = our_name(name)
        if ours in tensors:
            raise InputError(f"{directory}: expected one tensor {ours}, found another by the name of {name}")
        tensors[ours] = tensor
    return tensors


def complete_maps(directory: Path, config: EagleConfig, tensors: dict[str, Tensor]) -> None:
    """Add the `t2d` that a file lacks, as vLLM reads none, and drop maps of a whole vocabulary."""
    drop_whole_maps(directory, config, tensors)
    d2t = tensors.get("d2t")
    if d2t is not None and "t2d" not in tensors and not d2t.is_floating_point():
        check_distances(d2t, f"{directory}: d2t")
        ids = d2t.long() + torch.arange(len(d2t))
        if len(ids) and 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
