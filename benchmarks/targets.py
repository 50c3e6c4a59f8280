"""`python -m benchmarks.targets`: every causal LM of the library, tiny and random, as a target and as its own draft.

A family is identical if the text at T = 0 is that of `generate` alone, one prompt at a time and in a batch of three
lengths: without drafts, with drafts that are rejected, accepted in part or as a whole, and with a noisy copy of the
model as the draft model, whose counts replay must predict. Weights are random, so that acceptance means nothing here.
"""

import copy
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from benchmarks.common import BenchmarkConfig, main
from draftsmith.decode import (
    DraftModelProposer,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.cache import check_rollback
from draftsmith.decode.cache.states import layer_kinds
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Proposal, StatelessProposer
from draftsmith.decode.tree import Tree
from draftsmith.train.provenance import environment

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
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    "linear_head_dim": 8,
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim", "qk_head_dim", "d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "time_step_rank"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    "max_source_positions": 128,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_window_size", "index_topk"), 8),
    **dict.fromkeys(("window_size", "sliding_window_size", "rel_extent"), 8),
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
NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
DERIVED = ("per_layer_config", "hybrid_override_pattern", "head_dim_per_layer")
# Further fields that a family's config needs, nested ones too.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_text": {
        **{"head_dim": 8, "swa_head_dim": 8, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 8},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8},
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "gemma4_text": {"num_global_key_value_heads": 2, "global_head_dim": 8},
    "gemma4_unified_text": {"num_global_key_value_heads": 2, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mamba"]},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": HIDDEN},
        **{"heads_per_ngram": 2, "ngram_vocab_size_base": VOCAB, "split_ngram_parts": 1, "eos_token_id": VOCAB - 1},
        "number_of_conv_states": 3,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "attention_head_size": 8},
    "zamba": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
        **{"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 16},
    },
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4, "n_mamba_heads": 8},
        **{"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 16, "hybrid_layer_ids": [1, 3]},
    },
    "zaya": {"num_experts_per_tok": 1},
}


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config, as a dictionary, with the sizes of a tiny model and every kind of layer."""
    small: dict[str, Any] = {}
    layers = next((config[name] for name in NUM_LAYERS if name in config), None)
    for name, value in config.items():
        if name in DERIVED:
            continue
        if isinstance(value, dict):
            value = shrink(value)
        elif name in SIZES and not isinstance(value, bool) and (value is not None or SIZES[name] is None):
            value = SIZES[name]
        elif isinstance(value, list | tuple) and len(value) == layers:
            kinds = list(dict.fromkeys(value))
            value = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
        small[name] = value
    if config.get("kv_lora_rank"):  # every head has latent keys of its own
        small["num_key_value_heads"] = small["num_attention_heads"]
        if "head_dim" in config:  # the rotary part's
            small["head_dim"] = SIZES["qk_rope_head_dim"]
    if "is_decoder" in config:  # families that are encoders by default
        small["is_decoder"] = True
    return small | OWN.get(config.get("model_type", ""), {})


def tiny_model(model_type: str) -> PreTrainedModel:
    """Return a family's model with `LAYERS` layers of its own pattern, random weights, and no end of texts."""
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**shrink(config_class().to_dict()))
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


@dataclass
class BenchTargetsConfig(BenchmarkConfig):
    """The library's causal LMs as targets."""

    families: list[str] = field(default_factory=list)
    """Model types; all of the library's causal LMs if empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := sorted({*self.families} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}):
            raise InputError(f"families: expected model types of causal LMs, found {', '.join(unknown)}")


def verdict(model_type: str) -> dict[str, str]:
    """Return a family's kinds of layers, what came of it, and why; an exception is an outcome too."""
    try:
        model = tiny_model(model_type)
    except Exception as error:
        return {"layers": "", "outcome": "not built", "reason": _first_line(error)}
    text = model.config.get_text_config()
    kinds = layer_kinds(text)[0] if hasattr(text, "num_hidden_layers") else []
    found = {"layers": ", ".join(dict.fromkeys(kinds))}
    try:
        difference = check(model)
    except InputError as error:
        return {**found, "outcome": "refused", "reason": str(error).removeprefix("target: ")}
    except Exception as error:
        return {**found, "outcome": "error", "reason": _first_line(error)}
    return {**found, "outcome": "different" if difference else "identical", "reason": difference or ""}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def bench(config: BenchTargetsConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    logging.set_verbosity_error()
    families, found = config.families or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), {}
    for model_type in tqdm(families, desc="families", unit="family"):
        began = time.perf_counter()
        found[model_type] = verdict(model_type) | {"seconds": round(time.perf_counter() - began, 1)}
    counts = Counter(each["outcome"] for each in found.values())
    return {"environment": environment(torch.device("cpu"), "float32"), "families": found, "outcomes": dict(counts)}


if __name__ == "__main__":
    main(BenchTargetsConfig, bench)
