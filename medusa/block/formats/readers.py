"""Read exported block drafters as servers do, and compute the outputs of their blocks.

Run as a file, in another process, it imports nothing of this package, so that servers can read all that it reads.

    python readers.py block DIRECTORY INPUTS.safetensors OUTPUT.safetensors

Shape suffixes: T positions, F features, S slots, K guesses, H hidden, D tokens that are drafted.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

BOOKS = "predecessor_codebook", "successor_codebook"


def block(directory: Path, features_TF: Tensor, embeddings_TSH: Tensor) -> Tensor:
    """Read as vLLM 0.32 does: `model_executor/models/qwen3_dflash.py` and `qwen3_dspark.py`.

    A block begins at each of T positions, and sees the features before it; `before` gives the tokens before its
    guesses. For each guess the result, (T, K, H + D + 1), holds its state after the last norm, the logits that the
    Markov head, DFlash 2's selector or Domino's GRU adds, and the confidence head's logit; zeros without them. Domino
    is read as SGLang does: `models/dflash.py`, `speculative/domino_utils.py`.
    """
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = flatten_fields(raw)
    tensors = {
        name.removeprefix("domino_head."): tensor.float() if tensor.is_floating_point() else tensor
        for path in directory.glob("model*.safetensors")
        for name, tensor in load_file(path).items()
    }
    size, drafted = config["hidden_size"], config.get("draft_vocab_size") or config["vocab_size"]
    if drafted < config["vocab_size"] and config["for_servers"]:
        assert tensors["lm_head.weight"].shape == (drafted, size) and tensors["d2t"].shape == (drafted,)
    seen_TH = rms_norm(linear(features_TF, tensors["fc.weight"]), tensors["hidden_norm.weight"], config)
    outputs = []
    for index, embeddings_SH in enumerate(embeddings_TSH):
        states_SH = embeddings_SH
        for layer in range(config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            states_SH = block_layer(config, layer, weights, states_SH, seen_TH[:index])
        # DFlash's anchor guesses nothing: leave out its slot.
        states_KH = rms_norm(states_SH, tensors["norm.weight"], config)[1 - config["sample_from_anchor"] :]
        tokens_K = torch.tensor([before(index, guess, config["vocab_size"]) for guess in range(len(states_KH))])
        added_KD, sure_K1 = torch.zeros(len(states_KH), drafted), torch.zeros(len(states_KH), 1)
        markov_KR = None
        if config.get("markov_rank"):
            assert config["markov_head_type"] == "vanilla"
            markov_KR = tensors["markov_head.markov_w1.weight"][tokens_K]
            added_KD = linear(markov_KR, tensors["markov_head.markov_w2.weight"])
        if config.get("selector_rank"):
            of = {name.removeprefix("candidate_selector."): tensor for name, tensor in tensors.items()}
            # Our own files call the two tables by other names.
            books = [of[name if name in of else f"{name}.weight"] for name in BOOKS]
            markov_KR = books[0][tokens_K] * linear(states_KH, of["hidden_projection.weight"])
            added_KD = linear(markov_KR, books[1])
        if config.get("emb_dim"):
            markov_KR = corrections(config, tensors, states_KH, embedding(embeddings_TSH, tokens_K))
            added_KD = linear(markov_KR, tensors["embed_proj.2.weight"])
        if config.get("enable_confidence_head"):
            wide = [states_KH]
            if config.get("confidence_head_with_markov") and markov_KR is not None:
                wide.append(markov_KR)
            projection = tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"]
            sure_K1 = linear(torch.cat(wide, dim=-1), *projection)
        outputs.append(torch.cat([states_KH, added_KD, sure_K1], dim=-1))
    return torch.stack(outputs)


def corrections(config: dict[str, Any], tensors: dict[str, Tensor], states_KH: Tensor, seen_KH: Tensor) -> Tensor:
    """Return the inputs of Domino's map to added logits, (K, R), from the embeddings of the tokens before guesses."""
    size, width, uncorrected = config["hidden_size"], config["gru_hidden_dim"], config["pure_draft_prefix_len"]
    gru = torch.nn.GRU(size, width, bias=False)
    gru.load_state_dict({name: tensors[f"prefix_gru.{name}"] for name in gru.state_dict()})
    inner_KR = silu(linear(torch.cat([states_KH, gru(seen_KH)[0]], dim=-1), tensors["embed_proj.0.weight"]))
    return inner_KR * (torch.arange(len(states_KH))[:, None] >= uncorrected)


def flatten_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return all fields at the top, with DeepSpec's names; target layers are counted from 0."""
    if "speculators_model_type" in raw:
        fields = raw["transformer_layer_config"] | {name: value for name, value in raw.items() if name != "model_type"}
        fields["target_layer_ids"] = [layer - 1 for layer in raw["aux_hidden_state_layer_ids"]]
        fields["is_causal"] = False if raw["sliding_window_non_causal"] else None
        return fields | {"for_servers": True}
    if "dflash_config" in raw:
        fields = raw | raw["dflash_config"] | {"for_servers": True}
        fields["sample_from_anchor"] = fields.get("shift_label", False)
        return fields | {"is_causal": fields.get("causal")}
    own = "sample_from_anchor" not in raw  # only the configs for servers have sample_from_anchor
    anchored = raw["anchor_guesses"] if own else not raw["dspark_bonus_anchor"]
    return raw | {"sample_from_anchor": anchored, "markov_head_type": "vanilla", "for_servers": not own}


def embedding(embeddings_TSH: Tensor, tokens: Tensor) -> Tensor:
    """Return arbitrary embeddings of tokens, (…, H)."""
    rows = embeddings_TSH.flatten(0, 1)
    return rows[tokens % len(rows)]


def before(index: int, guess: int, vocab_size: int) -> int:
    """Return an arbitrary token before a guess of the block at a position."""
    return (7 * index + 3 * guess + 1) % vocab_size


def block_layer(
    config: dict[str, Any], layer: int, weights: dict[str, Tensor], states_SH: Tensor, seen_TH: Tensor
) -> Tensor:
    """Return a layer's outputs for a block's slots, (S, H); they begin at the position after those in `seen_TH`."""
    heads, key_heads, width = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    normed = rms_norm(states_SH, weights["input_layernorm.weight"], config)
    positions = torch.arange(len(seen_TH) + len(states_SH))

    def projected(name: str, states: Tensor) -> Tensor:
        return linear(states, weights[f"self_attn.{name}_proj.weight"], weights.get(f"self_attn.{name}_proj.bias"))

    def turned(name: str, states: Tensor, count: int, at: Tensor) -> Tensor:
        by_head = projected(name, states).unflatten(-1, (count, width))
        by_head = rms_norm(by_head, weights[f"self_attn.{name}_norm.weight"], config)
        angles, scale = rotation(config, at)
        half = torch.cat([-by_head[..., width // 2 :], by_head[..., : width // 2]], dim=-1)
        return ((by_head * angles.cos() + half * angles.sin()) * scale).transpose(0, 1)

    normed, kernels = convolved(config, weights, "attention_conv", normed)
    everything = torch.cat([seen_TH, normed])
    queries = turned("q", normed, heads, positions[len(seen_TH) :])
    keys = turned("k", everything, key_heads, positions).repeat_interleave(heads // key_heads, 0)
    values = projected("v", everything).unflatten(-1, (key_heads, width)).transpose(0, 1)
    values = values.repeat_interleave(heads // key_heads, 0)
    windowed, causal = config["layer_types"][layer] == "sliding_attention", config.get("is_causal")
    distance = positions[len(seen_TH) :, None] - positions
    unseen = (distance < 0) & (windowed if causal is None else causal)
    if windowed:
        unseen |= distance >= config["sliding_window"]
    scores = (queries @ keys.transpose(1, 2) / width**0.5).masked_fill(unseen, float("-inf"))
    attended = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
    output = linear(attended, weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
    hidden = states_SH + convolved(config, weights, "attention_conv", output, kernels)[0]
    inner = rms_norm(hidden, weights["post_attention_layernorm.weight"], config)
    inner, kernels = convolved(config, weights, "mlp_conv", inner)
    gate, up = (linear(inner, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    output = linear(silu(gate) * up, weights["mlp.down_proj.weight"])
    return hidden + convolved(config, weights, "mlp_conv", output, kernels)[0]


def convolved(
    config: dict[str, Any], weights: dict[str, Tensor], name: str, states_SH: Tensor, kernels: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return a block's slots after DFlash 2's convolution, and the kernels of the one after the sublayer.

    Without `kernels`, (S, taps, H), it is the one before the sublayer, from whose inputs both have their kernels.
    """
    taps = config.get("conv_kernel_size")
    if not taps:
        return states_SH, None
    base = weights[f"{name}.base_kernel"]
    after = kernels
    if kernels is None:
        maps = linear(states_SH, weights[f"{name}.kernel_projection.weight"]).unflatten(-1, (2, taps, -1))
        kernels, after = (base + maps.repeat_interleave(config["conv_group_size"], -1)).unbind(1)
    mixed = []
    for slot in range(len(states_SH)):
        parts = [kernels[slot, tap] * states_SH[slot - tap] for tap in range(min(taps, slot + 1))]
        mixed.append(torch.stack(parts).sum(0))
    return torch.stack(mixed), after


def rotation(config: dict[str, Any], positions: Tensor) -> tuple[Tensor, float]:
    """Return the rotary angles of positions, (T, 1, width), and the scale of rotated numbers."""
    width = config["head_dim"]
    if config["rope_parameters"].get("rope_type", "default") == "default":
        turns, scale = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, width, 2) / width), 1.0
    else:  # the formulas for long contexts are the library's
        from transformers import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        rotary = Qwen3RotaryEmbedding(Qwen3Config(**config))
        turns, scale = rotary.inv_freq, rotary.attention_scaling
    return torch.cat([positions[:, None] * turns] * 2, dim=-1)[:, None], scale


def rms_norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    """Return x over its root mean square, times a weight."""
    return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight


@torch.no_grad()
def logits(reader: str, directory: Path, features_TF: Tensor, embeddings_TSH: Tensor) -> Tensor:
    """Return the float32 outputs, (T, K, H + D + 1), from the only reader, block."""
    assert reader == "block"
    return block(directory, features_TF, embeddings_TSH)


if __name__ == "__main__":
    inputs = load_file(sys.argv[3])
    save_file({"logits": logits(sys.argv[1], Path(sys.argv[2]), inputs["hidden"], inputs["embeddings"])}, sys.argv[4])
