"""Every command with a tiny Gemma 3: many added tokens, and one behind all logits, as multimodal tokenizers have it."""

import json
from typing import Any

import pytest
from transformers import GemmaTokenizer

from draftsmith.scripts.doctor import loss_masks
from draftsmith.scripts.doctor.config import DoctorConfig
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.models import load_tokenizer, vocabulary_size

TALK = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "return x"}]


def conversations(path, count: int, **more: str) -> str:
    """Write conversations, and one more with what is given as an answer."""
    records = [{"id": f"c{i}", "messages": TALK} for i in range(count)]
    records += [{"id": name, "messages": [TALK[0], TALK[1] | {"content": text}]} for name, text in more.items()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prepare_given(target: str, prompts: str, output: str) -> None:
    prepare(PrepareConfig(target, prompts, output, answers="given", batch_size=2, shard_size=2))


def prepare_here(target: str, prompts: str, output: str) -> None:
    prepare(PrepareConfig(target, prompts, output, max_new_tokens=1, batch_size=2, shard_size=2))


def read_by_doctor(target: str, prompts: str, output: str) -> None:
    config = DoctorConfig(target=target, prompts=prompts)
    samples = loss_masks.read(config, load_tokenizer(target), vocabulary_size(target))
    assert samples.all and not samples.refused


@pytest.mark.parametrize("work", [prepare_given, prepare_here, read_by_doctor])
def test_what_a_tokenizer_makes_anew_each_time_is_asked_for_once_a_run(work, gemma_pipeline, tmp_path, monkeypatch):
    """Not once a conversation, batch or token: thousands of added tokens take milliseconds, a vocabulary a third of a
    second."""
    asked: list[str] = []
    added, vocabulary = GemmaTokenizer.added_tokens_decoder, GemmaTokenizer.get_vocab

    def get_vocab(self: Any) -> Any:
        asked.append("vocabulary")
        return vocabulary(self)

    def added_tokens(self: Any) -> Any:
        asked.append("added tokens")
        return added.fget(self)

    monkeypatch.setattr(GemmaTokenizer, "added_tokens_decoder", property(added_tokens))
    monkeypatch.setattr(GemmaTokenizer, "get_vocab", get_vocab)
    counts = []
    for count in (3, 12):
        prompts = conversations(tmp_path / f"{count}.jsonl", count)
        asked.clear()
        work(str(gemma_pipeline / "target"), prompts, str(tmp_path / f"out-{count}"))
        counts.append(sorted(asked))
    assert counts[0] == counts[1]
    assert counts[0].count("vocabulary") <= 4
