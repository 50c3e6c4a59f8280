"""Replay of all drafters on the target's texts, groups of these and of their tokens, and pictures of drafted trees.

A report splits acceptance by groups. A token is in a part of its text (thinking, answer, tool call), and follows a
context of some length, prompt included. Replay sums over the tokens that have both in common.
"""

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from draftsmith.decode import Proposer, Replay, Tree
from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.measurement.tree_search import acceptance_estimate, node_shares
from draftsmith.decode.progress import track
from draftsmith.decode.proposers.draft_tree import TreeProposer
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.measure.state import GREEDY, PROBABILISTIC, Measured, turns_of
from draftsmith.scripts.report.entries import Grouping
from draftsmith.scripts.report.tree_chart import draw_tree
from draftsmith.scripts.report.types import TreePicture, Verifier
from draftsmith.train.data.chat.parts import PARTS, TextParts
from draftsmith.train.kinds.drafter import Pair

SHORTEST = 1024
"""Contexts of fewer tokens are one group; each further group ends at twice the length."""


def replay_all(
    measured: Measured, temperature: float, draft_lengths: Sequence[int]
) -> tuple[dict[tuple[str, Verifier], Replay], dict[str, Replay]]:
    """Replay the drafters on the target's texts; under sampling draft models with both verifiers.

    Return the replays by drafter and verifier, and by drafter the first token's replay of trees that cannot be
    replayed.
    """
    pair, sampler = measured.pair, measured.sampler(temperature)
    proposers: dict[tuple[str, Verifier | None], Proposer] = dict(replayed_proposers(pair, sampler).items())
    for drafter in pair.drafters:
        if isinstance(drafter.proposer, TreeProposer) and (drafter.name, PROBABILISTIC) not in proposers:
            proposers[drafter.name, None] = drafter.proposer.with_tree(Tree.chain(1))
    texts = measured.sequences(temperature), measured.prompt_lengths
    most = measured.config.max_new_tokens
    stretches = number_stretches(measured, temperature)
    replays = replay_drafters(pair.target, proposers, *texts, draft_lengths, sampler, most, stretches=stretches)
    return (
        {(name, verifier): replay for (name, verifier), replay in replays.items() if verifier is not None},
        {name: replay for (name, verifier), replay in replays.items() if verifier is None},
    )


def replayed_proposers(pair: Pair, sampler: Sampler) -> dict[tuple[str, Verifier], Proposer]:
    """Return the proposers that can be replayed by drafter and verifier: sampled draft models with both."""
    proposers: dict[tuple[str, Verifier], Proposer] = {}
    for drafter in pair.drafters:
        may_refuse = isinstance(drafter.proposer, TreeProposer) or drafter.sources
        if may_refuse and drafter.proposer.replay_refusal(sampler.do_sample):
            continue
        proposers[drafter.name, PROBABILISTIC] = drafter.proposer
        if drafter.greedy is not None and sampler.do_sample:
            proposers[drafter.name, GREEDY] = drafter.greedy
    return proposers


def tree_pictures(measured: Measured) -> list[TreePicture]:
    """Return pictures of the searched trees, with each node's share of rounds that accept it at T=0."""
    pictures, sequences = [], measured.sequences(0.0)
    for drafter in measured.pair.drafters:
        tree = drafter.tree
        if isinstance(drafter.proposer, TreeProposer) and tree is not None and not tree.is_chain:
            texts = track(list(zip(sequences, measured.prompt_lengths, strict=True)), "pictures of trees", "texts")
            ranks = [drafter.proposer.ranks(measured.pair.target, *text) for text in texts]
            length = format_estimate(acceptance_estimate(ranks, tree), spread="none")
            title = f"{len(tree)} nodes, mean acceptance length {length}"
            subtitle = f"T=0, replayed on {len(sequences)} texts"
            svg = draw_tree(tree, node_shares(ranks, tree).tolist(), title, subtitle)
            pictures.append(TreePicture(drafter.name, svg))
    return pictures


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
