"""`draftsmith tree`: the tree that a drafter of several tokens should draft, searched on target text."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from scipy.optimize import nnls
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import follows_one_path
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import tree_search
from draftsmith.decode.measurement.intervals import format_estimate, ratio_difference
from draftsmith.decode.measurement.turns import Parts, loop_turns, measure_until_agreement
from draftsmith.decode.planning.costs import RoundCosts, verification_costs
from draftsmith.decode.progress import phase, track
from draftsmith.decode.proposers.draft_tree import TreeProposer
from draftsmith.decode.replay.ranks import TextRanks
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.decode.validation import read
from draftsmith.scripts.configs import TreeConfig
from draftsmith.scripts.kinds import KINDS, drafter_specs, kind_named
from draftsmith.scripts.pair import load_decoding
from draftsmith.scripts.summary import figures_table, print_doubts
from draftsmith.train.cli import parse_config
from draftsmith.train.data.generate import load_completions
from draftsmith.train.files import require_writable
from draftsmith.train.losses.output_head import head_of, require_split, text_states
from draftsmith.train.models import load_config, load_tokenizer
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.tree/1"
LADDER = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)
REPEATS, MOST_TIMED = 2, 5
"""Turns of whole rounds, and the most trees, evenly spaced by size, whose rounds are timed."""
MOST_DISAGREEMENT = 0.03
"""The share of tokens that may differ: half precision breaks near-ties otherwise in other shapes."""
TOP = (1, 2, 3, 5)
NAMES = {"chain": "chain of full depth", "independence": "accuracies multiplied", "searched": "searched"}


def search(config: TreeConfig) -> dict[str, Any]:
    """Search as the config says, write the tree, and return the content of tree.json.

    Raises:
        InputError: no drafter of trees, another target's, or completions that are too few or not the target's at T=0.
    """
    (spec,) = drafter_specs(config.drafter, [1])
    kind, path = kind_named(spec.kind), str(spec.path)
    if kind.tree_key is None:
        searched = ", ".join(kind.title for kind in KINDS if kind.tree_key is not None)
        raise InputError(f"drafter: expected one whose tree can be searched for ({searched}), found a {kind.title}")
    if config.output is None and not (Path(path) / "config.json").is_file():
        raise InputError(f"drafter: expected a directory with a config.json, to write the tree to, found {path}")
    require_writable(config.output or path, "tree.json", field="drafter" if config.output is None else "output")
    target_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    if follows_one_path(target_config):
        raise InputError(
            f"target: expected one that verifies trees, found {target_config.model_type}, which cannot follow a "
            "tree: drafters draft chains for it"
        )
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    # With given nodes nothing is timed.
    threads, compiled = torch.get_num_threads(), config.compiled if config.nodes is None else False
    pair, compiles = load_decoding(
        config.target, tokenizer, [spec], config.dtype, threads, compiled, config.trust_remote_code
    )
    target, drafter = pair.target, cast(TreeProposer, pair.drafter.proposer)
    require_split(target, "target")
    texts, median = replayed_texts(config, target, drafter, token_count(tokenizer, target.config))
    parts = _dealt_out(texts)
    budgets, doubts = list[tree_search.Budget](), list[str]()
    if config.nodes is None:
        text = calibration_text(config)
        costs = partial(round_costs, target, drafter, text, median, compiles, doubts=doubts)
        with phase("trees of each size, and what they cost"):
            budgets = tree_search.search_budgets(parts["search"], LADDER, costs, parts["selection"])
        tree = max(budgets, key=lambda budget: budget.speedup).tree
    else:
        with phase("search"):
            tree = tree_search.search_tree(parts["search"], config.nodes, parts["selection"])
    depth, check = drafter.depth, parts["check"]
    trees = {
        "chain": Tree.chain(depth),
        "independence": tree_search.independence_tree(parts["search"], len(tree)),
        "searched": tree,
    }
    report = {
        "schema": SCHEMA,
        "environment": environment(target.device, pair.dtype),
        "choices": tree_search.tree_choices(tree),
        "target": config.target,
        "drafter": {"kind": kind.name, "path": path, "depth": depth},
        "calibration": {
            "completions": config.completions,
            "texts": {name: len(part) for name, part in parts.items()},
            "tokens": {name: sum(map(len, part)) for name, part in parts.items()},
        },
        "rank_accuracies": tree_search.rank_accuracies(check).tolist(),
        "trees": {name: _figures(check, other, tree) for name, other in trees.items()},
        "costs": None,
    }
    if budgets:
        rows = [
            {
                "nodes": len(budget.tree),
                "mean_acceptance_length": budget.acceptance_length,
                "verification_seconds": budget.verification,
                "rest_seconds": budget.costs.overhead,
                "predicted_speedup": budget.speedup,
            }
            for budget in budgets
        ]
        report["costs"] = {"context": median, "compiled": compiles, "budgets": rows, "doubts": doubts}
    write_json(Path(config.output or path) / "tree.json", report)
    if config.output is None:
        file = Path(path) / "config.json"
        write_json(file, read(dict[str, Any], file) | {kind.tree_key: report["choices"]})
    return report


def _dealt_out(texts: Sequence[TextRanks]) -> dict[str, list[TextRanks]]:
    """Split texts at random: half to search on, a fifth to select on, the rest to check the result."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    half, most = -(-len(texts) // 2), -(-7 * len(texts) // 10)
    indices = {"search": order[:half], "selection": order[half:most], "check": order[most:]}
    return {name: [texts[index] for index in part] for name, part in indices.items()}


def replayed_texts(
    config: TreeConfig, target: PreTrainedModel, drafter: TreeProposer, size: int
) -> tuple[list[TextRanks], int]:
    """Return the ranks of every different text's tokens, and the median length up to a text's middle.

    The first `size` logits are tokens; completions that are not the target's at temperature 0 are refused.
    """
    known_ids: set[tuple[int, ...]] = set()
    texts: list[TextRanks] = []
    middles: list[int] = []
    for path in config.completions:
        samples = load_completions(path, size)
        num_wrong = tokens = 0
        first = ""
        for sample in track(samples, f"ranks in {path}", "texts"):
            ids, prompt_length = tuple(sample["input_ids"]), sample["prompt_length"]
            if ids in known_ids or prompt_length == len(ids):
                continue
            known_ids.add(ids)
            sequence = torch.tensor(ids, device=target.device)
            hidden = text_states(target, sequence, prompt_length)
            differing = _disagreements(target, hidden, sequence[prompt_length:], size)
            if differing and not num_wrong:
                first = f"the first in sample {sample['id']!r}, token {differing[0]} of its text"
            num_wrong, tokens = num_wrong + len(differing), tokens + len(hidden)
            texts.append(drafter.ranks(target, sequence, prompt_length, hidden))
            middles.append((prompt_length + len(ids)) // 2)
        if num_wrong > MOST_DISAGREEMENT * tokens:
            raise InputError(
                f"completions: expected in {path} what {config.target} wrote at temperature 0, found {num_wrong} of "
                f"{tokens} tokens that are not its most likely, {first}"
            )
    if len(texts) < 4:
        raise InputError(f"completions: expected at least 4 different texts, found {len(texts)}")
    return texts, sorted(middles)[len(middles) // 2]


@torch.inference_mode()
def _disagreements(target: PreTrainedModel, hidden: Tensor, tokens: Tensor, size: int, chunk: int = 512) -> list[int]:
    """Return the indices of tokens that are not the target's argmax, without the vocabulary's padding."""
    head = head_of(target).cut(size)
    choices = torch.cat([head(hidden[i : i + chunk]).argmax(-1) for i in range(0, len(hidden), chunk)])
    return (choices != tokens).nonzero()[:, 0].tolist()


def calibration_text(config: TreeConfig) -> Tensor:
    """Return text of the target, prompts included, (T,): rounds are timed after parts of it."""
    samples = load_completions(config.completions[0])
    first = samples.select(range(min(16, len(samples))))
    return torch.tensor([token for sample in first for token in sample["input_ids"]])


def round_costs(
    target: PreTrainedModel,
    drafter: TreeProposer,
    text: Tensor,
    context: int,
    compiled: bool,
    trees: Sequence[Tree],
    doubts: list[str],
) -> list[RoundCosts]:
    """Measure the cost of rounds with these trees: whole rounds of the loop, in turns with plain decoding.

    A compiled tree is a program of its own, which takes much longer to make than to time. So only the smallest of the
    deepest trees is timed, and a round's time without its forward is taken as proportional to depth. Eagerly a few are
    timed, and all have a price by depth and nodes. Timings that do not repeat are added to `doubts`.
    """
    timed = [max(trees, key=lambda tree: (tree.depth, -len(tree)))]
    if not compiled:
        places = np.linspace(0, len(trees) - 1, min(MOST_TIMED, len(trees)))
        timed = [trees[round(place)] for place in places]
    named = {f"{len(tree)} nodes": tree for tree in timed}
    proposers = {name: drafter.with_tree(tree) for name, tree in named.items()}
    depths = {name: tree.depth for name, tree in named.items()}

    blocks = [1, *(len(tree) + 1 for tree in trees)]

    def parts() -> Parts:
        forwards = verification_costs(target, 1, context, blocks, repeats=9, compiled=compiled)
        # More tokens never cost less: where they seem to, the smaller block was disturbed.
        seconds = {k: min(t for tokens, t in forwards.items() if tokens >= k) for k in forwards}
        return Parts(seconds, {0.0: dict.fromkeys(named, (0.0, 0.0, 0.0))})

    samplers, text = {0.0: Sampler.of(0)}, text.to(target.device)
    loops = partial(loop_turns, target, proposers, depths, text, 1, context, samplers, REPEATS, compiled)
    timing = measure_until_agreement(loops, parts, depths)
    doubts += timing.doubts()[0.0]
    rest = [timing.rest(0.0, name) for name in named]
    by_depth = [max(0.0, rest[0]) * tree.depth / timed[0].depth for tree in trees]
    overheads = by_depth if compiled else fit_rest_seconds(timed, rest, trees)
    plain = timing.plain_overhead(0.0)
    return [RoundCosts(timing.parts.target, 0.0, overhead=seconds, plain_overhead=plain) for seconds in overheads]


def fit_rest_seconds(timed: Sequence[Tree], seconds: Sequence[float], trees: Sequence[Tree]) -> list[float]:
    """Return each tree's seconds of a round without its forward, by a plane over depth and nodes through those timed.

    Each level is another head, each node another token to compare, so neither coefficient is negative. Residuals are
    noise, a difference of two larger times, which would choose a tree for a lucky moment.
    """
    levels, all_levels = (np.array([[1.0, tree.depth, len(tree)] for tree in group]) for group in (timed, trees))
    return [float(rest) for rest in all_levels @ nnls(levels, np.maximum(seconds, 0.0))[0]]


def _figures(check: list[TextRanks], tree: Tree, searched: Tree) -> dict[str, Any]:
    tokens = [len(text) for text in check]
    rounds, others = ([text.rounds(other) for text in check] for other in (searched, tree))
    return {
        "nodes": len(tree),
        "depth": tree.depth,
        "mean_acceptance_length": tree_search.acceptance_estimate(check, tree),
        "gain_of_searched": None if tree == searched else ratio_difference(tokens, rounds, tokens, others),
    }


def print_tree(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the accuracies by depth, τ of each tree, and the predicted speed-ups; it fits 80 columns."""
    console = console or Console()
    texts = report["calibration"]["texts"]
    columns = ("", *(f"top {k}" for k in TOP))
    table = figures_table(columns, "", f"accuracy by depth, on {texts['check']} texts")
    for depth, shares in enumerate(report["rank_accuracies"], 1):
        table.add_row(f"depth {depth}", *(f"{sum(shares[:k]):.1%}" for k in TOP))
    console.print(table)
    if report["costs"]:
        costs = report["costs"]
        title = f"measured after {costs['context']} tokens{', compiled' if costs['compiled'] else ''}"
        table = figures_table(("nodes", "τ", "verify", "rest", "speed-up"), "", title)
        for row in costs["budgets"]:
            chosen = row["nodes"] == report["trees"]["searched"]["nodes"]
            table.add_row(
                str(row["nodes"]),
                f"{row['mean_acceptance_length']:.2f}",
                f"{1e3 * row['verification_seconds']:.1f} ms",
                f"{1e3 * row['rest_seconds']:.1f} ms",
                f"{row['predicted_speedup']:.2f}×",
                style="bold" if chosen else "",
            )
        console.print(table)
        print_doubts(console, costs["doubts"])
    title = "τ at T=0, replayed on the same texts; ±: half of the 95 % interval over texts"
    table = figures_table(("tree", "nodes", "τ", "searched over it"), "tree", title)
    for name, row in report["trees"].items():
        estimate, gain = row["mean_acceptance_length"], row["gain_of_searched"]
        table.add_row(
            NAMES[name],
            str(row["nodes"]),
            format_estimate(estimate, ".3f"),
            "" if gain is None else format_estimate(gain, "+.3f"),
            style="bold" if name == "searched" else "",
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print the tables, and print the tree's path."""
    config = parse_config(TreeConfig, argv, prog="draftsmith tree")
    report = search(config)
    print_tree(report)
    if config.nodes is not None and (num_nodes := report["trees"]["searched"]["nodes"]) < config.nodes:
        print(f"{num_nodes} nodes, not {config.nodes}: in these texts no more would be accepted")
    print(f"tree: {Path(config.output or report['drafter']['path']) / 'tree.json'}")
    return 0
