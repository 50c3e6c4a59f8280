"""Tiny random models of the families that drafts and targets come from, by name."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertGenerationConfig,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    InklingTextConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NemotronHConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RobertaConfig,
)

from draftsmith.decode import DraftModelProposer, Tree, autoregressive_generate, replay_acceptance, speculative_generate
from draftsmith.decode.proposers.base import Proposal, StatelessProposer

VOCAB, HIDDEN, WINDOW = 64, 32, 8
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 2 * HIDDEN}
GEMMA = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}}
FULL = "full_attention"

# Windows stay where a family has them, in one of two layers if it has both kinds.
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, GROUPED),
    "qwen2": (Qwen2Config, GROUPED),
    "qwen2-window": (
        Qwen2Config,
        {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {**GROUPED, "head_dim": 8}),
    "mistral": (MistralConfig, {**GROUPED, "sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0}),
    "gemma3": (Gemma3TextConfig, {**GEMMA, "layer_types": ["sliding_attention", FULL]}),
    "gemma3n": (
        Gemma3nTextConfig,
        {name: value for name, value in GEMMA.items() if name != "query_pre_attn_scalar"}
        | {"num_hidden_layers": 3, "num_kv_shared_layers": 1, "layer_types": ["sliding_attention", FULL, FULL]}
        | {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    ),
    "gemma4": (
        Gemma4TextConfig,
        {name: value for name, value in GEMMA.items() if name != "query_pre_attn_scalar"}
        | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", FULL] * 2}
        | {"global_head_dim": 16, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8},
    ),
    "gpt2": (GPT2Config, {}),
    "gpt-neox": (GPTNeoXConfig, {"intermediate_size": 2 * HIDDEN}),
    "gpt-oss": (GptOssConfig, {**GEMMA, **EXPERTS}),
    "opt": (OPTConfig, {"ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN}),
    "phi": (PhiConfig, GROUPED),
    "phi3": (Phi3Config, {**GROUPED, "sliding_window": WINDOW}),
    "falcon": (FalconConfig, {"alibi": False}),
    "llama4": (
        Llama4TextConfig,
        {
            **GROUPED,
            "head_dim": 8,
            "intermediate_size_mlp": 2 * HIDDEN,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
        },
    ),
}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "intermediate_size": 2 * HIDDEN, "moe_intermediate_size": 16, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
LINEAR = {
    **GROUPED,
    **{"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", FULL]},
}
FAMILIES["deepseek-v32"] = (DeepseekV32Config, {**LATENT, "index_n_heads": 32, "index_head_dim": 8, "index_topk": 8})
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
# Mixtures of experts that decode as others do.
MIXTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {**GROUPED, "num_local_experts": 4}),
    "qwen3-moe": (Qwen3MoeConfig, {**GROUPED, **SPARSE, "head_dim": 8}),
    "deepseek-v3": (DeepseekV3Config, LATENT),
    "gemma4-moe": (
        Gemma4TextConfig,
        FAMILIES["gemma4"][1]
        | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 16},
    ),
}
# Those with a recurrent or convolution state, in layers of their own or beside an attention.
STATEFUL: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mamba": (MambaConfig, {}),
    "jamba": (JambaConfig, {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "qwen3-next": (
        Qwen3NextConfig,
        {**GROUPED, "head_dim": 8, "layer_types": ["linear_attention", FULL], "mlp_only_layers": [0, 1]},
    ),
    "qwen3-5": (Qwen3_5TextConfig, LINEAR),
    "granite-hybrid": (
        GraniteMoeHybridConfig,
        {**GROUPED, **MAMBA, "shared_intermediate_size": 16, **EXPERTS, "layer_types": ["mamba", "attention"]},
    ),
    "nemotron-h": (
        NemotronHConfig,
        {**GROUPED, "head_dim": 8, "layers_block_type": ["mamba", "moe", "attention"], "mamba_num_heads": 8}
        | {"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    ),
    "lfm2": (Lfm2Config, {**GROUPED, "layer_types": ["conv", FULL]}),
    "mamba2": (Mamba2Config, {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}),
    "kimi-linear": (
        KimiLinearConfig,
        {name: value for name, value in LATENT.items() if name not in ("q_lora_rank", "n_routed_experts")}
        | {"num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4}
        | {"layer_types": ["linear_attention", FULL]},
    ),
    "falcon-h1": (FalconH1Config, {**GROUPED, **MAMBA, "mamba_d_ssm": 64}),
}
# Those that keep their state elsewhere, whose layers mask on their own, or that take no positions.
UNFIT: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "recurrent-gemma": (RecurrentGemmaConfig, {**GROUPED, "lru_width": HIDDEN}),
    "inkling": (
        InklingTextConfig,
        {**GROUPED, **SPARSE, "layer_types": ["hybrid_sliding", "hybrid"], "head_dim": 8, "swa_head_dim": 8}
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "n_routed_experts": 4, "pad_token_id": 0},
    ),
    "gpt-neo": (GPTNeoConfig, {"attention_types": [[["global", "local"], 1]]}),
    "falcon-alibi": (FalconConfig, {"alibi": True}),
    "bloom": (BloomConfig, {}),
    "mpt": (MptConfig, {"max_seq_len": 128}),
    "roberta": (RobertaConfig, {"is_decoder": True, "intermediate_size": 2 * HIDDEN, "pad_token_id": 0}),
    "bert-generation": (BertGenerationConfig, {"intermediate_size": 2 * HIDDEN}),
}


def tiny_model(name: str, **options: Any) -> PreTrainedModel:
    """A family's model, with fields of its config as given; the same weights every time."""
    config, own = (FAMILIES | STATEFUL | MIXTURES | UNFIT)[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**{**BASE, **own, **options})).eval().requires_grad_(False)
    model.generation_config.pad_token_id = 0
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


def check(model: PreTrainedModel, new: int = 14) -> str | None:
    """Return what differs from the library's text, alone and in a batch, for any draft; None if nothing does."""
    lengths, gamma = (11, 3, 6), 3
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]
    generate: Any = model.generate
    texts = [generate(prompt[None], **options)[0] for prompt in prompts]
    draft = noisy(model)
    proposers = {
        "plain decoding": None,
        **{f"{n} accepted": ScriptedProposer(texts, n) for n in (0, 1, gamma)},
        "a draft model": DraftModelProposer(draft),
    }
    for (name, proposer), rows in itertools.product(proposers.items(), ([1], [0, 1, 2])):
        inputs = left_padded([prompts[row] for row in rows])
        if proposer is None:
            output = autoregressive_generate(model, **inputs, **options)
        else:
            output = speculative_generate(model, proposer, **inputs, draft_length=gamma, **options)
        padding = (inputs["attention_mask"] == 0).sum(1).tolist()
        for row, written, pad in zip(rows, output.sequences, padding, strict=True):
            if not torch.equal(written[pad:], texts[row]):
                return f"{name}, {len(rows)} rows: another text"
    predicted = replay_acceptance(model, DraftModelProposer(draft), texts, lengths, [gamma], 0.0, max_new_tokens=new)
    for text, counts in zip(predicted.texts, output.row_counts, strict=True):
        if abs(text.counts[gamma].num_accepted_tokens - counts.num_accepted_tokens) > 1e-6:
            return "replay: other counts than the decoder's"
    return None
