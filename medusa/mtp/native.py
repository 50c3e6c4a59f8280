"""The MTP layers in a target's own files: how many its config promises, what the files hold, and loading them.

The library's `MtpModel` makes the layers and maps the names of tensors to its own. It knows some families' fields and
names; those of others are found here. All tensors must be there, and all must map: the library only warns of the rest.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig, _get_resolved_checkpoint_files
from transformers.utils.generic import ContextManagers

from draftsmith.decode.cache.features import check_apart
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.train.checkpoint import (
    MTP_COUNTS,
    Stored,
    check_finite,
    files_of,
    mtp_layer,
    mtp_layers,
    reading_errors,
    stored_tensors,
)
from draftsmith.train.files import is_gguf
from draftsmith.train.models import load_config, whole_weights

SHARED = re.compile(r"(^|\.)(embed_tokens|shared_head\.head)\.weight$")
"""Copies of the target's embeddings and head, which some checkpoints repeat in each MTP layer."""
WINDOWS = ("full_attention", "sliding_attention")


def check_names(names: Iterable[str], config: PretrainedConfig, path: str) -> int:
    """Return the number of MTP layers that names of tensors and config agree on, or raise an InputError.

    Raises:
        InputError: no MTP layers, or fewer or more of them than the config promises.
    """
    promised = mtp_layers(config)
    stored = sorted({index for name in names if (index := mtp_layer(name, config)) is not None})
    if not stored and not promised:
        raise InputError(f"drafter: expected a target that ships with MTP layers, found none in {path}")
    if not promised:
        raise InputError(
            f"drafter: expected the number of MTP layers in {path}/config.json ({', '.join(MTP_COUNTS)}), found none, "
            f"and tensors of {len(stored)}"
        )
    if stored != list(range(promised)):
        held = f"those of {len(stored)}" if stored in ([], list(range(len(stored)))) else f"layers {stored}"
        raise InputError(f"drafter: expected the tensors of {promised} MTP layers in {path}, found {held}")
    return promised


def check_files(path: str, trust_remote_code: bool = False) -> None:
    """Raise an InputError unless a target's directory has the MTP layers that its config promises.

    Hub ids whose weights are not yet here pass.
    """
    config = load_config(path, field="target", trust_remote_code=trust_remote_code)
    if files_of(path).is_dir() or is_gguf(path):
        check_names(stored_tensors(path, "target"), config, path)


@contextmanager
def promise(config: PretrainedConfig, layers: int, names: Iterable[str] = ()) -> Iterator[None]:
    """Give a target's config the fields that the library reads to make MTP layers, in this block.

    Families whose fields the library does not read (Qwen 3.5) have MTP layers with full attention, so that no state has
    to be taken back in a draft, or a window where the target's first layer has one (EXAONE, as vLLM takes it). They
    have experts as the target's last layer has, unless the `names` of their tensors show none.
    """
    text: Any = config.get_text_config()
    fields: dict[str, Any] = {"num_mtp_layers": layers}
    kinds, experts = (getattr(text, name, None) for name in ("layer_types", "mlp_layer_types"))
    if kinds is not None and getattr(text, "mtp_layer_types", None) is None:
        fields["mtp_layer_types"] = [kinds[0] if kinds[0] in WINDOWS else "full_attention"] * layers
    if experts is not None and getattr(text, "mtp_mlp_layer_types", None) is None:
        dense = any(".mlp." in name for name in names) and not any("expert" in name for name in names)
        fields["mtp_mlp_layer_types"] = ["dense" if dense else experts[-1]] * layers
    with ExitStack() as after:
        for name, value in fields.items():
            if isinstance(getattr(type(text), name, None), property):  # the family tells the library itself
                continue
            own = name in vars(text) or name in getattr(text, "attribute_map", {})
            after.callback(setattr, text, name, getattr(text, name)) if own else after.callback(delattr, text, name)
            setattr(text, name, value)
        yield


def make_layers(target: PreTrainedModel, layers: int, names: Iterable[str] = ()) -> MtpModel:
    """Return MTP layers of a target without weights of use, or raise an InputError if its family can't have them."""
    name = type(target).__name__
    check_apart(target, "drafter")
    with (
        promise(target.config, layers, names),
        reading_errors("drafter", f"MTP layers that the library makes for {name}"),
        no_init_weights(),  # or it would begin the target's embeddings and head anew, which it takes for its own
    ):
        model = MtpModel(target, layers)
    if getattr(model.config, "index_topk", None) is not None:
        raise InputError(f"drafter: expected MTP layers that attend without an index, found those of {name}")
    types: Sequence[str] = getattr(model.config, "layer_types", None) or ()
    if not types:
        model.config.sliding_window = None  # the library's masks of such layers have no window
    if other := next((kind for kind in types if kind not in WINDOWS), None):
        raise InputError(f"drafter: expected MTP layers of {' or '.join(WINDOWS)}, found {other} in {name}")
    return model


def check_mapping(model: MtpModel, target: PreTrainedModel, names: Iterable[str], path: str) -> set[str]:
    """Return the names of the layers' tensors, or raise an InputError if those in the files map to others.

    The library's renaming says what maps; it reads the others without a word, or begins their weights at random.
    """
    conversions = model.get_weight_conversions(target)
    renamings = [part for part in conversions if isinstance(part, WeightRenaming)]
    converters = [part for part in conversions if isinstance(part, WeightConverter)]
    mapped = {rename_source_key(name, renamings, converters)[0]: name for name in names if not SHARED.search(name)}
    expected = {name for name in model.state_dict() if name.startswith(("layers.", "shared_post_norm."))}
    missing, unmapped = sorted(expected - mapped.keys()), sorted(mapped[name] for name in mapped.keys() - expected)
    for odd, fault in ((unmapped, "that do not map"), (missing, "missing")):
        if odd:
            listed = ", ".join(odd[:3]) + (", …" if len(odd) > 3 else "")
            raise InputError(
                f"drafter: expected the tensors of MTP layers in {path}, found {len(odd)} {fault}: {listed}"
            )
    return expected


def check_shared(target: PreTrainedModel, tensors: Mapping[str, Any], path: str) -> None:
    """Raise an InputError if a head or embeddings next to the MTP layers are not the target's, which are read."""
    for name, tensor in tensors.items():
        if SHARED.search(name):
            head = name.endswith("head.weight")
            own: Any = (target.get_output_embeddings() if head else target.get_input_embeddings()).weight
            rows = slice(None, None, max(1, len(own) // 8))  # a few rows tell: a copy may be a gigabyte
            same = tuple(tensor.get_shape()) == own.shape and torch.equal(tensor[rows].to(own.dtype), own[rows].cpu())
            if not same:
                part = "head" if head else "embeddings"
                raise InputError(f"drafter: expected MTP layers with the target's {part} in {path}, found other {name}")


def stored_layers(path: str, config: PretrainedConfig) -> Stored:
    """Return the headers of the MTP layers' tensors in a target's files."""
    return {name: kind for name, kind in stored_tensors(path, "target").items() if mtp_layer(name, config) is not None}


@phase("loading the target's MTP layers")
def load_native(target: PreTrainedModel) -> MtpModel:
    """Return the MTP layers in the files of a target that was loaded from a directory or a hub id.

    Raises:
        InputError: no MTP layers, or others than the config promises; tensors that are missing, of another shape, not
            finite, or that no name of the library's fits; a damaged file.
    """
    path = str(target.config.name_or_path)
    with reading_errors("drafter", f"safetensors with MTP layers in {path}"):
        files, _ = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=path,
            variant=None,
            gguf_file=None,
            use_safetensors=True,
            user_agent=None,
            is_remote_code=False,
        )
    with ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for file in files or ():
            try:
                weights = opened.enter_context(safe_open(file, framework="pt", device="cpu"))
                names = [name for name in weights.keys() if mtp_layer(name, target.config) is not None]  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise InputError(f"drafter: expected whole weights, found a damaged {file}: {error}") from error
            tensors |= {name: weights.get_slice(name) for name in names}
        layers = check_names(tensors, target.config, path)
        contexts = MtpModel.get_init_context(target.dtype, False, False, None)
        with whole_weights(), promise(target.config, layers, tensors):
            with ContextManagers(contexts):
                model = make_layers(target, layers)
            device = next(iter(target.get_decoder().layers[-1].parameters())).device
            conversions: Any = model.get_weight_conversions(target)
            loading = LoadStateDictConfig(weight_mapping=conversions, device_map={"": device}, dtype=target.dtype)
            own = check_mapping(model, target, tensors, path)
            with reading_errors("drafter", f"MTP layers in {path}"):
                info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=tensors, load_config=loading)
            check_shared(target, tensors, path)
    # An expert that lacks a map shows only now, when the experts are joined.
    misshapen = {name for name, _, _ in info.mismatched_keys} | info.conversion_errors.keys()
    if odd := sorted(misshapen | (own & info.missing_keys)):
        raise InputError(f"drafter: expected whole tensors of MTP layers in {path}, found others for {odd[0]}")
    model.tie_with_main_model(target)
    check_finite(model.layers, path, "drafter")
    return model.eval().requires_grad_(False)
