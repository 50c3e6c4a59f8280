"""What `draftsmith prepare` is tried on: a tiny target that would betray its settings, and prompts."""

import json
from pathlib import Path

import torch
from bpe import train_bpe
from fake_server import OTHER_END
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from draftsmith.train.cli import flags_of
from draftsmith.train.data.generate import PrepareConfig

WORDS = ["def", "return", "self", "import os", "for i in range(10):", "print(x)", "class A:", "x = [1, 2]"]


def save_target(path: Path, *, ends: float, padding: float) -> Path:
    """Save a random Llama with a padded vocabulary and a generation config full of settings that must not leak.

    `OTHER_END` ends a text too. `ends` and `padding` are how loud the ends of a text and the rows of the padding are,
    beside the other tokens.
    """
    tokenizer = train_bpe(WORDS, 290)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=320, max_position_embeddings=128, initializer_range=0.3, num_key_value_heads=2, **shape)
    )
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.no_grad():
        model.lm_head.weight[[end, OTHER_END]] *= ends
        model.lm_head.weight[len(tokenizer) :] *= padding
    leaks = {"do_sample": True, "top_k": 1, "temperature": 0.01, "repetition_penalty": 5.0, "max_length": 3}
    model.generation_config = GenerationConfig(eos_token_id=[end, OTHER_END], pad_token_id=pad, **leaks)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_prompts(path: Path, count: int) -> Path:
    """Write prompts of one to eight words, every other one with a category."""
    texts = [" ".join(WORDS[: 1 + i % len(WORDS)]) for i in range(count)]
    records = [{"prompt": text, "id": f"p{i}", "category": [None, "code"][i % 2]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def flags(config: PrepareConfig) -> list[str]:
    names = ("target", "prompts", "output", "max_new_tokens", "batch_size", "shard_size")
    return flags_of({name: getattr(config, name) for name in names})


def contents(directory: Path | str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}
