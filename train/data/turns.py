"""Prompts of several user turns, as benchmarks have them: each is asked behind the target's answers to those before.

A turn is a prompt of its own, whose id is that of the record and the turn's number: `81.2`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.train.data.prompts import Prompt

PROMPTS = "prompts.jsonl"
"""The file of all turns, each behind the answers before it: prompts for other commands."""


def turn_directory(output: Path, number: int) -> Path:
    """Return where the answers to turn `number` go, from 1."""
    return output / f"turn-{number}"


def turn_record(prompt: Prompt, number: int) -> dict[str, Any]:
    """Return a turn as a record of a file of prompts."""
    return {"id": f"{prompt.id}.{number}"} | prompt.record()


def answer_texts(
    samples: Sequence[Mapping[str, Any]], number: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Return what was answered to a turn, by the ids of records: text without the tokens that begin, end and pad it.

    Other special tokens stay, because chat templates look for those that enclose thinking and calls of tools.
    """
    end, answers = len(f".{number}"), dict[str, str]()
    around = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    for sample in samples:
        ids = sample["input_ids"][sample["prompt_length"] :]
        ended = ids[:-1] if sample["finish_reason"] == "stop" else ids
        written = [token for token in ended if token not in around]
        answers[sample["id"][:-end]] = str(tokenizer.decode(written, clean_up_tokenization_spaces=False))
    return answers


def next_turn(prompt: Prompt, answer: str, templated: bool) -> Prompt:
    """Return the next turn of a prompt that has one.

    Args:
        prompt: the turn before.
        answer: the target's.
        templated: whether there is a chat template; without one the turns and answers are plain text, with blank lines
            between them.
    """
    turn, *later = prompt.later
    if templated:
        said = [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return replace(prompt, messages=[*(prompt.messages or []), *said], later=tuple(later))
    before = prompt.text if prompt.text is not None else (prompt.messages or [])[-1]["content"]
    return replace(prompt, text=f"{before}\n\n{answer}\n\n{turn}", messages=None, later=tuple(later))
