"""Replay of all drafters on the target's texts, and pictures of the drafted trees."""

from collections.abc import Sequence

from draftsmith.decode import Proposer, Replay, Tree
from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.measurement.tree_search import acceptance_estimate, node_shares
from draftsmith.decode.progress import track
from draftsmith.decode.proposers.draft_tree import TreeProposer
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.measure.groups import number_stretches
from draftsmith.scripts.measure.state import GREEDY, PROBABILISTIC, Measured
from draftsmith.scripts.report.tree_chart import draw_tree
from draftsmith.scripts.report.types import TreePicture, Verifier
from draftsmith.train.kinds.drafter import Pair


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
