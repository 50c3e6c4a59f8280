"""Groups of the target's texts and of their tokens, by which a report splits acceptance.

A token is in a part of its text (thinking, answer, tool call), and after a context of some length, prompt included.
Replay sums over the tokens that have both in common.
"""

import json
from collections.abc import Callable, Mapping

import numpy as np

from draftsmith.decode import Replay
from draftsmith.scripts.measure.state import Measured, turns_of
from draftsmith.scripts.report.entries import Grouping
from draftsmith.train.data.chat.parts import PARTS, TextParts

SHORTEST = 1024
"""Contexts of fewer tokens are one group; each further group ends at twice the length."""


def number_stretches(measured: Measured, temperature: float) -> list[np.ndarray]:
    """Return for each text the number of each token's stretch, (N,): doublings of the context, then the part."""
    known, stretches = dict[str, TextParts](), []
    tokenizer = measured.pair.tokenizer
    texts = zip(measured.prompts, measured.prompt_ids, measured.texts[temperature], strict=True)
    for prompt, ids, text in texts:
        part_N = np.zeros(len(text), int)
        if prompt.messages is not None:  # plain text does not go through the template
            variables = {**measured.config.chat_template_kwargs, **prompt.read_variables(tokenizer)}
            name = json.dumps(variables, sort_keys=True, default=str)
            part_N = known.setdefault(name, TextParts(tokenizer, variables)).label(ids, text)
        context_N = len(ids) + np.arange(len(text))
        doublings_N = np.ceil(np.log2(np.maximum(context_N + 1, SHORTEST) / SHORTEST)).astype(int)
        stretches.append(doublings_N * len(PARTS) + part_N)
    return stretches


def groups_of_tokens(replay: Replay) -> dict[Grouping, dict[str, Replay]]:
    """Return the replays of the groups of tokens, by part and by length of context, where there are several."""
    stretches = [text.stretches for text in replay.texts if text.stretches is not None]
    numbers = sorted({int(label) for of_text in stretches for label in of_text.labels})
    names: dict[Grouping, Callable[[int], str]] = {
        "part": lambda number: PARTS[number % len(PARTS)],
        "context": lambda number: str(SHORTEST << number // len(PARTS)),
    }
    found: dict[Grouping, dict[str, Replay]] = {}
    for grouping, name_of in names.items():
        groups: dict[str, list[int]] = {}
        for number in numbers:
            groups.setdefault(name_of(number), []).append(number)
        if len(groups) > 1:
            found[grouping] = {name: replay.within(members) for name, members in groups.items()}
    return found


def groups_of_texts(measured: Measured, replay: Replay) -> dict[Grouping, dict[str, Replay]]:
    """Return the replays of the texts of each category, and of each turn, where there are several."""
    groups: Mapping[Grouping, dict[str, list[int]]] = {
        "category": measured.categories(),
        "turn": turns_of(measured.prompts),
    }
    return {
        grouping: {name: Replay([replay.texts[i] for i in indices]) for name, indices in of_grouping.items()}
        for grouping, of_grouping in groups.items()
        if of_grouping
    }


def contexts_of(group: str) -> range:
    """Return the lengths of context of a group of this name."""
    end = int(group)
    return range(end // 2 if end > SHORTEST else 0, end)
