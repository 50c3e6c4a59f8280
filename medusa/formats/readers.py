"""Read exported heads by what their format documents alone, and compute logits with them.

Run as a file, in another process, it imports nothing of this package: whatever it reads, another reader of the
format's documentation reads too.

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
    config = json.loads((directory / "config.json").read_text())
    tensors = {k: v for path in directory.glob("model*.safetensors") for k, v in load_file(path).items()}
    for k in range(config["num_heads"]):
        x = hidden_NH
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{k}.layers.{layer}"
            seen = torch.cat([x, *embeddings_NKH[:, : k + 1].unbind(1)], -1) if config["hydra"] and layer == 0 else x
            bias = tensors[f"{name}.bias"].float() if config["medusa_fc_bias"] else None
            x = x + silu(linear(seen, tensors[f"{name}.weight"].float(), bias))
        name = "lm_head" if config["original_lm_head"] else f"lm_heads.{k}"
        bias = tensors[f"{name}.bias"].float() if config["lm_head_bias"] else None
        logits = linear(x, tensors[f"{name}.weight"].float(), bias) * config["logit_scale"]
        cap = config["final_logit_softcapping"]
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        yield widened(logits, tensors.get("token_map"), config["vocab_size"])


def vllm(directory: Path, hidden_NH: Tensor, _: Tensor) -> Iterator[Tensor]:
    """Read as vLLM's `MedusaConfig` and `Medusa` do, renamed keys and ignored tensors included."""
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    for key in list(config):
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    tensors = load_file(directory / "model.safetensors")
    narrow, wide = config["truncated_vocab_size"], config["vocab_size"]
    for k in range(config["num_heads"]):
        x = hidden_NH
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{k}.layers.{layer}"
            bias = tensors[f"{name}.bias"].float() if config.get("medusa_fc_bias", False) else None
            x = x + silu(linear(x, tensors[f"{name}.weight"].float(), bias))
        weight = tensors["lm_head.weight" if config.get("original_lm_head", False) else f"lm_heads.{k}.weight"]
        assert weight.shape == (narrow, config["hidden_size"])
        logits = linear(x, weight.float()) * config.get("logit_scale", 1.0)
        yield widened(logits, tensors["token_map"] if narrow < wide else None, wide)


def fasterdecoding(directory: Path, hidden_NH: Tensor, _: Tensor) -> Iterator[Tensor]:
    """Read as FasterDecoding's `MedusaModel` does, whose heads share one block over all of their layers."""
    config = json.loads((directory / "config.json").read_text())
    heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    assert config["base_model_name_or_path"]
    tensors = torch.load(directory / "medusa_lm_head.pt", map_location="cpu", weights_only=True)
    for k in range(heads):
        x, last = hidden_NH, f"{k}.{layers - 1}.linear"  # loaded last into the one block there is
        for _layer in range(layers):
            x = x + silu(linear(x, tensors[f"{last}.weight"].float(), tensors[f"{last}.bias"].float()))
        yield linear(x, tensors[f"{k}.{layers}.weight"].float())


def modelopt(directory: Path, hidden_NH: Tensor, _: Tensor) -> Iterator[Tensor]:
    """Read as the Medusa plugin of ModelOpt does."""
    config = json.loads((directory / "config.json").read_text())["medusa"]
    tensors = load_file(directory / "model.safetensors")
    layers = config["num_medusa_layers"]
    for k in range(config["num_medusa_heads"]):
        x = hidden_NH
        for layer in range(layers):
            name = f"medusa_heads.{k}.{layer}.linear"
            x = x + silu(linear(x, tensors[f"{name}.weight"].float(), tensors[f"{name}.bias"].float()))
        yield linear(x, tensors[f"medusa_heads.{k}.{layers}.weight"].float())


def widened(logits: Tensor, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits over the target's vocabulary, −∞ where a truncated one has none."""
    if token_map is None:
        return logits
    wide = torch.full((len(logits), vocab_size), float("-inf"))
    wide[:, token_map] = logits
    return wide


READERS = {"own": own, "vllm": vllm, "fasterdecoding": fasterdecoding, "modelopt": modelopt}


@torch.no_grad()
def logits(name: str, directory: Path, hidden_NH: Tensor, embeddings_NKH: Tensor) -> Tensor:
    """Return float32 logits, (N, K, V), of a directory in a format.

    Args:
        name: of the format.
        directory: holds its files.
        hidden_NH: float32 hidden states.
        embeddings_NKH: of the tokens behind them, for Hydra heads.
    """
    return torch.stack(list(READERS[name](directory, hidden_NH, embeddings_NKH)), dim=1)


if __name__ == "__main__":
    inputs = load_file(sys.argv[3])
    save_file({"logits": logits(sys.argv[1], Path(sys.argv[2]), inputs["hidden"], inputs["embeddings"])}, sys.argv[4])
