"""Read exported EAGLE-3 heads as servers do, and compute their logits.

Run as a file, in another process, it imports nothing of this package, so that servers can read all that it reads.

    python readers.py eagle3 DIRECTORY INPUTS.safetensors OUTPUT.safetensors

Shape suffixes: T positions, F features, K steps, H hidden, V the target's vocabulary.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu


def eagle3(directory: Path, features_TF: Tensor, embeddings_TKH: Tensor) -> Iterator[Tensor]:
    """Read as vLLM 0.32 does: `model_executor/models/llama_eagle3.py`. Nothing is cached between steps.

    A round begins at each of T positions: step 0 sees the features up to there, and step k also the layer's own k
    states. Embeddings are those of the next tokens; T takes the place of N.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if "speculators_model_type" in config:
        config = config["transformer_layer_config"] | {k: v for k, v in config.items() if k != "model_type"}
        config["target_hidden_size"] = config.get("target_hidden_size") or config["hidden_size"]
    tensors = {
        name: tensor for path in directory.glob("model*.safetensors") for name, tensor in load_file(path).items()
    }
    layer = {
        name.removeprefix("midlayer.").removeprefix("layers.0."): tensor.float() for name, tensor in tensors.items()
    }
    eps, size = config["rms_norm_eps"], config["hidden_size"]
    states_TH = features_TF
    if config["norm_before_fc"]:
        states_TH = rms_norm(states_TH, layer["input_norm.weight"], eps)
    if config["fc_norm"]:
        chunks = states_TH.split(config["target_hidden_size"], dim=-1)
        states_TH = torch.cat([rms_norm(c, layer[f"fc_norm.{i}.weight"], eps) for i, c in enumerate(chunks)], dim=-1)
    states_TH = linear(states_TH, layer["fc.weight"])
    assert states_TH.shape[-1] == size
    cut = config["draft_vocab_size"] < config["vocab_size"]
    token_map = tensors["d2t"] + torch.arange(config["draft_vocab_size"]) if cut else None
    steps: list[list[Tensor]] = [[] for _ in range(embeddings_TKH.shape[1])]
    for start in range(len(states_TH)):
        states, embeddings, output = states_TH[: start + 1], embeddings_TKH[: start + 1, 0], states_TH[:0]
        for k, logits_of_step in enumerate(steps):
            if k > 0:
                states = torch.cat([states, output[-1:]])  # from step 1 on the state is the layer's own output
                embeddings = torch.cat([embeddings, embeddings_TKH[start, k][None]])
            raw = eagle3_layer(config, layer, states, embeddings)
            normed = rms_norm(raw, layer["norm.weight"], eps)
            output = normed if config["norm_output"] else raw
            logits_of_step.append(linear(normed[-1], layer["lm_head.weight"]))
    for step_logits in steps:
        yield widened(torch.stack(step_logits), token_map, config["vocab_size"])


def eagle3_layer(config: dict[str, Any], layer: dict[str, Tensor], states_TH: Tensor, embeddings_TH: Tensor) -> Tensor:
    """Return the layer's outputs at all positions of a text, (T, H)."""
    eps, heads, key_heads = (config[name] for name in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads"))
    normed = rms_norm(states_TH, layer["hidden_norm.weight"], eps)
    inputs = torch.cat([rms_norm(embeddings_TH, layer["input_layernorm.weight"], eps), normed], dim=-1)
    positions, width = torch.arange(len(inputs)), config["head_dim"]

    def projected(name: str, count: int) -> Tensor:
        states = linear(inputs, layer[f"self_attn.{name}_proj.weight"], layer.get(f"self_attn.{name}_proj.bias"))
        return states.unflatten(-1, (count, width)).transpose(0, 1).repeat_interleave(heads // count, 0)

    # Each key head serves a group of query heads.
    queries, keys, values = projected("q", heads), projected("k", key_heads), projected("v", key_heads)
    angles, scale = rotation(config, positions)
    queries, keys = (
        (x * angles.cos() + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], dim=-1) * angles.sin()) * scale
        for x in (queries, keys)
    )
    distance = positions[:, None] - positions
    unseen = distance < 0
    if (config.get("layer_types") or [None])[0] == "sliding_attention":
        unseen |= distance >= config["sliding_window"]
    scores = (queries @ keys.transpose(1, 2) / width**0.5).masked_fill(unseen, float("-inf"))
    attended = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
    residual = normed if config["norm_before_residual"] else states_TH
    hidden = residual + linear(attended, layer["self_attn.o_proj.weight"])
    inner = rms_norm(hidden, layer["post_attention_layernorm.weight"], eps)
    gate, up = (
        linear(inner, layer[f"mlp.{name}_proj.weight"], layer.get(f"mlp.{name}_proj.bias")) for name in ("gate", "up")
    )
    return hidden + linear(silu(gate) * up, layer["mlp.down_proj.weight"], layer.get("mlp.down_proj.bias"))


def rotation(config: dict[str, Any], positions: Tensor) -> tuple[Tensor, float]:
    """Return the rotary angles of positions, (T, width), and the scale of rotated numbers."""
    width, scale = config["head_dim"], 1.0
    if config["rope_parameters"].get("rope_type", "default") == "default":
        turns = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    else:  # the formulas for long contexts are the library's
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rotary = LlamaRotaryEmbedding(LlamaConfig(**config))
        turns, scale = rotary.inv_freq, rotary.attention_scaling
    return torch.cat([positions[:, None] * turns] * 2, dim=-1), scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x over its root mean square, times a weight."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def widened(logits: Tensor, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits over the target's vocabulary, −∞ for tokens outside of the heads' own."""
    if token_map is None:
        return logits
    wide = torch.full((len(logits), vocab_size), float("-inf"))
    wide[:, token_map] = logits
    return wide


@torch.no_grad()
def logits(reader: str, directory: Path, features_TF: Tensor, embeddings_TKH: Tensor) -> Tensor:
    """Return float32 logits, (T, K, V), from the only reader, eagle3."""
    assert reader == "eagle3"
    return torch.stack(list(eagle3(directory, features_TF, embeddings_TKH)), dim=1)


if __name__ == "__main__":
    inputs = load_file(sys.argv[3])
    save_file({"logits": logits(sys.argv[1], Path(sys.argv[2]), inputs["hidden"], inputs["embeddings"])}, sys.argv[4])
