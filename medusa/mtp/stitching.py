"""`draftsmith export --format target`: trained MTP layers back in the files of their target.

A checkpoint keeps its tensors in files of many gigabytes, so that nothing is written again that need not be. Files
without MTP layers become links to the target's own; the others are copied, and the bytes of the layers' tensors are
replaced where they lie: names, shapes and dtypes stay, and so do headers, index and config.json.

A target that ships without MTP layers gets a further file, and its index and config.json name it.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from draftsmith.decode.errors import InputError
from draftsmith.medusa.checkpoint_files import CONFIG
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.native import SHARED, check_mapping, check_names
from draftsmith.train.checkpoint import INDEX, MTP_COUNTS, WEIGHTS, mtp_layer, stored_tensors
from draftsmith.train.files import identity
from draftsmith.train.kinds.export import put_in_place
from draftsmith.train.models import empty_model

PARTS = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
STORED_AS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def stitch(source: str, target: str, output: Path, trust_remote_code: bool = False) -> int:
    """Write a target with the MTP layers of a directory, in place of its own if it has some; return their number.

    Raises:
        InputError: a target that is no directory, or changed after the layers were trained; layers of another target,
            or in another number; quantised layers.
    """
    directory = Path(target)
    if not directory.is_dir():
        raise InputError(f"target: expected a directory with the target's files, found {target}")
    stored = stored_tensors(target, "target")
    if not stored:
        raise InputError(f"target: expected safetensors in {target}, found none")
    model = empty_model(target, field="target", trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        heads = MtpHeads.as_stored(source, model)
    own = [name for name in stored if mtp_layer(name, model.config) is not None]
    count, trained = len(heads.layers), load_file(Path(source) / WEIGHTS)
    if own and count != (layers := check_names(own, model.config, target)):
        raise InputError(f"drafter: expected {layers} MTP layers as in {target}, found {count} in {source}")
    _check_unchanged(source, target)
    names = own or [new_name(name, count, model.config.get_text_config().num_hidden_layers) for name in trained]
    check_mapping(heads.native, model, names, target)
    tensors = native_tensors(heads, model, trained, names)
    for name, tensor in tensors.items() if own else ():
        if stored[name][0] not in STORED_AS or stored[name][1] != tensor.shape:
            found = f"{stored[name][0]} of {stored[name][1]}"
            raise InputError(f"target: expected {name} in floating point of {tuple(tensor.shape)}, found {found}")
    with put_in_place(output) as aside:
        for file in sorted(path for path in directory.iterdir() if path.is_file()):
            if file.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
                shutil.copy(file, aside)  # an editor may write into it, which must not change the target's
            elif file.suffix != ".safetensors" or not _patch(file, aside / file.name, tensors):
                _link(file, aside / file.name)
        if not own:
            _add(aside, {name: tensor.to(model.dtype).contiguous() for name, tensor in tensors.items()}, count)
    return count


def new_name(name: str, layers: int, own: int) -> str:
    """Return a tensor's name in a target that ships without MTP layers, after its `own` layers.

    One layer is named as in Qwen 3.5, and several as in DeepSeek V3.
    """
    _, index, rest = name.split(".", 2)
    part, _, last = rest.partition(".")
    if layers > 1:
        block = last if part == "mtp_block" else rest.replace("post_norm.", "shared_head.norm.")
        return f"model.layers.{own + int(index)}.{block}"
    return f"mtp.layers.0.{last}" if part == "mtp_block" else f"mtp.{PARTS[part]}.{last}"


def _add(directory: Path, tensors: Mapping[str, Tensor], layers: int) -> None:
    """Write tensors into a further file of a checkpoint, and name them in its index and config.json."""
    file, index = "model-mtp.safetensors", directory / INDEX
    save_file(dict(tensors), directory / file, {"format": "pt"})
    if index.is_file():
        content = json.loads(index.read_bytes())
    else:  # the library reads no index next to model.safetensors
        first = "model-00001.safetensors"
        (directory / WEIGHTS).rename(directory / first)
        with safe_open(directory / first, "pt") as weights:
            content = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), first)}
    content["weight_map"] |= dict.fromkeys(tensors, file)
    index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    config = json.loads((directory / CONFIG).read_bytes())
    fields = config.get("text_config", config)
    fields[next((name for name in MTP_COUNTS if name in fields), MTP_COUNTS[0])] = layers
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def native_tensors(
    heads: MtpHeads, target: PreTrainedModel, trained: Mapping[str, Tensor], names: list[str]
) -> dict[str, Tensor]:
    """Return the trained tensors by `names`, those of MTP layers in the target's files."""
    conversions = heads.native.get_weight_conversions(target)
    renamings = [part for part in conversions if isinstance(part, WeightRenaming)]
    # A file may have the tensors of each expert alone, or joined as the library has them.
    joined: Any = SimpleNamespace(config=heads.config)
    joined._weight_conversions = [part for part in conversions if isinstance(part, WeightConverter)]
    known = {**trained, **revert_weight_conversion(joined, dict(trained))}
    return {name: known[rename_source_key(name, renamings, [])[0]] for name in names if not SHARED.search(name)}


def _check_unchanged(source: str, target: str) -> None:
    """Raise an InputError if the target's files are others than those that the layers were trained on."""
    recorded = PretrainedConfig.get_config_dict(source)[0].get("target_files") or {}
    found = identity(target)
    for name in sorted(recorded.keys() - {"generation_config.json"}):
        if recorded[name] != found.get(name):
            raise InputError(f"target: expected the {name} that {source} was trained on in {target}, found another")


def _patch(file: Path, copy: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Copy a safetensors file with other values of some tensors; return False, and copy nothing, if it has none."""
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(size))
    inside = [name for name in header if name in tensors]
    if not inside:
        return False
    shutil.copyfile(file, copy)
    with copy.open("r+b") as content:
        for name in inside:
            begin, end = header[name]["data_offsets"]
            values = tensors[name].to(STORED_AS[header[name]["dtype"]]).contiguous().flatten().view(torch.uint8)
            assert len(values) == end - begin
            content.seek(8 + size + begin)
            content.write(values.numpy().data)
        content.flush()
        os.fsync(content.fileno())
    return True


def _link(file: Path, link: Path) -> None:
    whole = file.resolve()  # files of a hub's cache are links themselves
    try:
        os.link(whole, link)
    except OSError:  # another file system
        shutil.copyfile(whole, link)
