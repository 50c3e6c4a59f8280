"""Read exported heads only from their format's documentation, and compute their logits.

Run as a file, in another process, it imports nothing of this package, so that other readers of the documentation can
read all that it reads.

    python readers.py FORMAT DIRECTORY INPUTS.safetensors OUTPUT.safetensors

Shape suffixes: N positions, H hidden, V the target's vocabulary, K heads.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu


def own(directory: Path, hidden_NH: Tensor, embeddings_NKH: Tensor) -> Iterator[Tensor]:
    """Read a directory of `MedusaHeads.save_pretrained`."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tensors = {k: v for path in directory.glob("model*.safetensors") for k, v in load_file(path).items()}
    for k in range(config["num_heads"]):
        x = hidden_NH
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{k}.layers.{layer}"
            wide = torch.cat([x, *embeddings_NKH[:, : k + 1].unbind(1)], -1) if config["hydra"] and layer == 0 else x
            bias = tensors[f"{name}.bias"].float() if config["medusa_fc_bias"] else None
            x = x + silu(linear(wide, tensors[f"{name}.weight"].float(), bias))
        name = "lm_head" if config["original_lm_head"] else f"lm_heads.{k}"
        bias = tensors[f"{name}.bias"].float() if config["lm_head_bias"] else None
        logits = linear(x, tensors[f"{name}.weight"].float(), bias) * config["logit_scale"]
        cap = config["final_logit_softcapping"]
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        yield widened(logits, tensors.get("token_map"), config["vocab_size"])


def vllm(directory: Path, hidden_NH: Tensor, _: Tensor) -> Iterator[Tensor]:
    """Read as vLLM 0.32 does: `transformers_utils/configs/medusa.py`, `model_executor/models/medusa.py`.

    It renames the config's keys and the tensors. It skips unknown tensors, and missing ones are an error. So is every
    `token_map`: own heads have the whole vocabulary there, and the map of a shared one counts as a weight that was not
    loaded.
    """
    config = {"hidden_size": 4096, "num_heads": 5, "num_hidden_layers": 1}
    config |= json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for key in list(config):
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    heads, layers, hidden, wide = (
        config[name] for name in ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size")
    )
    shared, bias = config.get("original_lm_head", False), config.get("medusa_fc_bias", False)
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {f"blocks.{k}.layers.{i}.weight": (hidden, hidden) for k in range(heads) for i in range(layers)}
    shapes |= {f"blocks.{k}.layers.{i}.bias": (hidden,) for k in range(heads) for i in range(layers) if bias}
    shapes |= {name: (wide, hidden) for name in (["lm_head.weight"] if shared else _own_heads(heads))}
    tensors = {}
    for name, tensor in _vllm_files(directory).items():
        ours = _vllm_name(name.replace("medusa_heads.", ""))
        ours = "lm_head.weight" if shared and ours == "lm_heads.0.weight" else ours
        assert ours != "token_map" or config.get("truncated_vocab_size", wide) == wide, "not initialized: token_map"
        if ours in shapes:
            assert tensor.shape == shapes[ours], f"{name}: expected {shapes[ours]}, found {tuple(tensor.shape)}"
            tensors[ours] = tensor.float()
    assert not shapes.keys() - tensors, f"not initialized: {sorted(shapes.keys() - tensors)}"
    for k in range(heads):
        x = hidden_NH
        for layer in range(layers):
            name = f"blocks.{k}.layers.{layer}"
            x = x + silu(linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
        yield linear(x, tensors["lm_head.weight" if shared else f"lm_heads.{k}.weight"]) * config.get("logit_scale", 1)


def _own_heads(heads: int) -> list[str]:
    return [f"lm_heads.{k}.weight" for k in range(heads)]


def _vllm_files(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of the safetensors, or of FasterDecoding's file if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return torch.load(directory / "medusa_lm_head.pt", map_location="cpu", weights_only=True)
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def _vllm_name(name: str) -> str:
    """Return vLLM's name for one of FasterDecoding's: {head}.{layer}.linear.weight, and {head}.{layers}.weight."""
    head, layer, *rest = [*name.split("."), ""]
    if not (head.isdigit() and layer.isdigit()):
        return name
    if rest[0] == "linear":
        return f"blocks.{head}.layers.{layer}.{rest[1]}"
    return f"lm_heads.{head}.{rest[0]}"


def fasterdecoding(directory: Path, hidden_NH: Tensor, _: Tensor) -> Iterator[Tensor]:
    """Read as FasterDecoding's `MedusaModel` does, whose heads share one block over all of their layers."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    assert config["base_model_name_or_path"]
    tensors = torch.load(directory / "medusa_lm_head.pt", map_location="cpu", weights_only=True)
    for k in range(heads):
        x, last = hidden_NH, f"{k}.{layers - 1}.linear"  # loaded last into the one block there is
        for _layer in range(layers):
            x = x + silu(linear(x, tensors[f"{last}.weight"].float(), tensors[f"{last}.bias"].float()))
        yield linear(x, tensors[f"{k}.{layers}.weight"].float())


def widened(logits: Tensor, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits over the target's vocabulary, −∞ for tokens outside of a cut one."""
    if token_map is None:
        return logits
    wide = torch.full((len(logits), vocab_size), float("-inf"))
    wide[:, token_map] = logits
    return wide


READERS = {"own": own, "vllm": vllm, "fasterdecoding": fasterdecoding}


@torch.no_grad()
def logits(name: str, directory: Path, hidden_NH: Tensor, embeddings_NKH: Tensor) -> Tensor:
    """Return a directory's float32 logits, (N, K, V); the embeddings are the next tokens', for Hydra heads."""
    return torch.stack(list(READERS[name](directory, hidden_NH, embeddings_NKH)), dim=1)


if __name__ == "__main__":
    inputs = load_file(sys.argv[3])
    save_file({"logits": logits(sys.argv[1], Path(sys.argv[2]), inputs["hidden"], inputs["embeddings"])}, sys.argv[4])
