"""A target with trained MTP layers in its files, in a real vLLM: plain decoding's texts, and the counts of replay.

EXAONE's family: vLLM's build for CPUs runs it, and feeds each step the state after the layer's last norm, as we do.
"""

import shutil

import pytest
import torch
from engine import TARGET, verified
from native_layers import qwen_names, save_with_mtp
from pipelines import mtp_configured, write_completions
from transformers import AutoModelForCausalLM, ExaoneMoeConfig, GenerationConfig

from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.medusa.mtp.__main__ import train_heads
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# The window is longer than the texts; vLLM's kernel for CPUs takes heads of 32.
SHAPE = {"vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
SHAPE |= {"num_key_value_heads": 1, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 4}
SHAPE |= {"num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 256}
SHAPE |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window_pattern": "LG"}
SHAPE |= {"max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
COUNTS = {"num_nextn_predict_layers": 1, "mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a target that ships with MTP layers, and the same layers trained on what it writes."""
    root = tmp_path_factory.mktemp("exaone")
    torch.manual_seed(0)
    config = ExaoneMoeConfig(**SHAPE, initializer_range=0.1, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(pad_token_id=1)
    for name, value in COUNTS.items():
        setattr(model.config, name, value)
    save_with_mtp(model, MtpHeads.of_target(model), qwen_names, root / "target", **COUNTS)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / file, root / "target")
    prompts = [torch.tensor(ids) for ids in encoded_prompts(None, load_tokenizer(TARGET), 12, 48)]
    texts = plain_texts(model, prompts, 12, max_new_tokens=40)
    samples = [
        {"id": str(i), "input_ids": ids, "labels": [IGNORED] * len(prompt) + ids[len(prompt) :]}
        for i, (prompt, ids) in enumerate(zip(prompts, [text.tolist() for text in texts], strict=True))
    ]
    write_completions(root / "texts", samples)
    training = {"max_steps": 80, "per_device_train_batch_size": 12}
    options = {"target": str(root / "target"), "completions": [str(root / "texts")], "target_dtype": "float32"}
    train_heads(mtp_configured(root, root / "mtp", divergence="cross_entropy", training=training, **options))
    return root


def test_a_stitched_target_counts_what_replay_says(trained, tmp_path, capsys):
    capsys.readouterr()
    flags = ["--drafter", f"mtp:{trained / 'mtp'}", "--draft_length", "3", "--output", tmp_path / "out"]
    ((first, _, third),) = verified(capsys, ["the MTP layers"], 3, *flags, target=trained / "target", form="target")
    assert first >= third > 0, "layers that guess nothing prove nothing"
