"""Models of real sizes with random weights: what a forward or a step costs does not depend on them."""

import gc
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from draftsmith.train.data.shards import COLUMNS, MANIFEST, SCHEMA, write_shard
from draftsmith.train.files import remove

if TYPE_CHECKING:
    from benchmarks.gpu.cases import Place

SHARED = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960, "vocab_size": 151_936}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Qwen3's."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
TINY |= {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": 2048}
TOKENS, TINY_TOKENS = 151_669, 2000
"""Vocabulary sizes of Qwen3's tokenizer and of the tiny models'."""


def config_of(size: str, place: "Place") -> Qwen3Config:
    """Return the config of a model of this size; on a CPU of a tiny one."""
    sizes = SHARED | (SIZES[size] if place.full else TINY)
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    tied = size != "8B" or not place.full  # tiny ones share their programs
    return Qwen3Config(
        **sizes, **ids, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )


def tokens_of(place: "Place") -> int:
    """Return the number of tokens of the tokenizer."""
    return TOKENS if place.full else TINY_TOKENS


@cache
def random_model(size: str, place: "Place") -> PreTrainedModel:
    """Return a frozen model of this size in bfloat16 on the device."""
    torch.manual_seed(0)
    with place.device:
        model = AutoModelForCausalLM.from_config(config_of(size, place), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def lone_model(size: str, place: "Place") -> PreTrainedModel:
    """Return `random_model` alone in memory: other models and their programs are freed."""
    if random_model.cache_info().currsize > 1:
        random_model.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    return random_model(size, place)


@cache
def directory(size: str, place: "Place") -> Path:
    """Return a directory with the config of a model of this size, and a tokenizer of as many tokens as Qwen3's."""
    path = place.folder / size
    vocabulary = {"<|end|>": 0, "<|pad|>": 1} | {f"t{token}": token for token in range(2, tokens_of(place))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.save_pretrained(path)
    config = config_of(size, place)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(path)
    return path


@cache
def completions(length: int, place: "Place", rows: int = 16) -> Path:
    """Return a directory of completions of random tokens, each of `length` with its prompt of an eighth."""
    path, prompt = place.folder / f"random-{length}", length // 8
    remove(path)
    path.mkdir(parents=True)
    ids = np.random.default_rng(0).integers(2, tokens_of(place), (rows, length))
    mask = [int(at >= prompt) for at in range(length)]
    samples = [
        {"id": str(row), "prompt_length": prompt, "input_ids": of_row.tolist(), "loss_mask": mask}
        for row, of_row in enumerate(ids)
    ]
    write_shard(path / "shard-00000.parquet", pa.Table.from_pylist(samples, schema=COLUMNS))
    manifest = {"schema": SCHEMA, "settings": {}, "target": {}, "versions": {}, "shards": 1}
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return path
