"""`python -m benchmarks.targets`: every causal LM of the library, tiny and random, as a target and as its own draft.

A family is identical if the text at T = 0 is that of `generate` alone, one prompt at a time and in a batch of three
lengths: without drafts, with drafts that are rejected, accepted in part or as a whole, and with a noisy copy of the
model as the draft model, whose counts replay must predict. Weights are random, so that acceptance means nothing here.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from draftsmith.decode import (
    DraftModelProposer,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.cache import check_rollback
from draftsmith.decode.proposers.base import Proposal, StatelessProposer
from draftsmith.decode.tree import Tree

VOCAB, HIDDEN, LAYERS, NEW, GAMMA = 64, 32, 4, 20, 3
LENGTHS = (11, 3, 6)
# Sizes by the name of a config's field, in every family and at every depth of nested configs.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), HIDDEN),
    **dict.fromkeys(("lru_width", "embed_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("dense_ffn_hidden_size", "intermediate_size_mlp", "mamba_d_ssm"), 2 * HIDDEN),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    "encoder_attention_heads": 4,
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim", "qk_head_dim", "d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "time_step_rank"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    "max_source_positions": 128,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_window_size", "window_size", "index_topk"), 8),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    "shared_intermediate_size": HIDDEN,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "zero_expert_num", "n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    "index_n_heads": 32,  # fewer tie at 0 after the ReLU, and top-k then takes any
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("ssm_state_size", "state_size", "mamba_headdim"), 8),
    **dict.fromkeys(("n_mamba_heads", "expand"), 2),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
}
DERIVED = ("layer_types", "mlp_layer_types", "layers_block_type", "hybrid_override_pattern", "per_layer_config")
# Further fields that a family's config needs.
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "xlnet": {"d_head": 8},
    "reformer": {"is_decoder": True},
    "gemma3n_text": {"intermediate_size": 64, "num_kv_shared_layers": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mamba"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"]},
    "zamba2": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"]},
}


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config, as a dictionary, with the sizes of a tiny model."""
    small = {}
    for name, value in config.items():
        if name in DERIVED:
            continue
        if isinstance(value, dict):
            value = shrink(value)
        elif name in SIZES and not isinstance(value, bool | list) and (value is not None or SIZES[name] is None):
            value = SIZES[name]
        small[name] = value
    return small


def tiny_model(model_type: str) -> PreTrainedModel:
    """Return a family's model with `LAYERS` layers of its own pattern, random weights, and no end of texts."""
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**shrink(config_class().to_dict()) | OWN.get(model_type, {}))
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


class ScriptedProposer(StatelessProposer):
    """A proposer of what follows in known texts; all but the first `right` tokens of a draft are changed."""

    def __init__(self, texts: Sequence[Tensor], right: int):
        self._texts, self._right = texts, right

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain for each row, and nothing after a text that is none of the known ones."""
        drafts = []
        for context, length in zip(contexts, draft_lengths, strict=True):
            text = next((t for t in self._texts if torch.equal(t[: len(context)], context)), context)
            tokens = text[len(context) :][:length].clone()
            tokens[self._right :] = (tokens[self._right :] + 1) % VOCAB
            drafts.append(Proposal(tokens, None, Tree.chain(len(tokens))))
        return drafts


def left_padded(prompts: Sequence[Tensor]) -> dict[str, Any]:
    """Stack prompts as the inputs of `generate`."""
    width = max(map(len, prompts))
    rows = [torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts]
    mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()
    return {"input_ids": torch.stack(rows), "attention_mask": mask}


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with noise on all matrices."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in draft.parameters():
        if parameter.ndim > 1 and parameter.is_floating_point():
            parameter.data += torch.randn_like(parameter) * 0.03 * parameter.std()
    return draft


def check(model: PreTrainedModel, new: int = NEW) -> str | None:
    """Return what differs from the library's text; None if nothing does. An `InputError` if the model is refused."""
    check_rollback(model, "target")
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]
    generate: Any = model.generate
    texts = [generate(prompt[None], **options)[0] for prompt in prompts]
    draft = noisy(model)
    proposers = {
        "plain decoding": None,
        **{f"{n} accepted": ScriptedProposer(texts, n) for n in (0, 1, GAMMA)},
        "a draft model": DraftModelProposer(draft),
    }
    for (name, proposer), rows in itertools.product(proposers.items(), ([0], [1], [0, 1, 2])):
        inputs = left_padded([prompts[row] for row in rows])
        if proposer is None:
            output = autoregressive_generate(model, **inputs, **options)
        else:
            output = speculative_generate(model, proposer, **inputs, draft_length=GAMMA, **options)
        padding = (inputs["attention_mask"] == 0).sum(1).tolist()
        for row, written, pad in zip(rows, output.sequences, padding, strict=True):
            if not torch.equal(written[pad:], texts[row]):
                return f"{name}, {len(rows)} rows: another text"
    predicted = replay_acceptance(model, DraftModelProposer(draft), texts, LENGTHS, [GAMMA], 0.0, max_new_tokens=new)
    for text, counts in zip(predicted.texts, output.row_counts, strict=True):
        if abs(text.counts[GAMMA].num_accepted_tokens - counts.num_accepted_tokens) > 1e-6:
            return "replay: other counts than the decoder's"
    return None
