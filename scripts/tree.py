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

from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import format_estimate, ratio_difference
from draftsmith.decode.measurement.tree_search import (
    Budget,
    acceptance_estimate,
    choices_of,
    independence_tree,
    node_shares,
    rank_accuracies,
    reference_tree,
    search_budgets,
    search_tree,
)
from draftsmith.decode.measurement.turns import Parts, agreeing, loop_turns
from draftsmith.decode.planner import RoundCosts, verification_costs
from draftsmith.decode.progress import each, phase
from draftsmith.decode.proposers.draft_tree import TreeProposer
from draftsmith.decode.replay.ranks import TextRanks
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.decode.validation import read
from draftsmith.scripts.configs import TreeConfig
from draftsmith.scripts.kinds import KINDS, drafter_specs, kind_named
from draftsmith.scripts.report.tree_chart import draw_tree
from draftsmith.scripts.settings import load_fastest
from draftsmith.scripts.summary import figures_table, print_doubts
from draftsmith.train.cli import parse_config
from draftsmith.train.data.generate import load_completions
from draftsmith.train.files import require_writable
from draftsmith.train.losses.output_head import head_of, require_split, text_states
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.tree/1"
LADDER = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)
REPEATS = 3
MOST_DISAGREEMENT = 0.03
"""The share of tokens that half precision may turn: forwards over other shapes break near-ties otherwise."""
FILES = ("tree.json", "tree.svg", "tree.png")
TOP = (1, 2, 3, 5)
NAMES = {
    "chain": "chain of full depth",
    "reference": "reference of Cai et al.",
    "reference_cut": "its first nodes",
    "independence": "accuracies multiplied",
    "searched": "searched",
}


def search(config: TreeConfig) -> dict[str, Any]:
    """Search as the config says, write the tree and its picture, and return what tree.json holds.

    Raises:
        InputError: no drafter of trees or another target's, or completions that are not the target's at temperature 0
            or too few.
    """
    (spec,) = drafter_specs(config.drafter, [1])
    kind, path = kind_named(spec.kind), str(spec.path)
    if kind.tree_key is None:
        searched = ", ".join(kind.title for kind in KINDS if kind.tree_key is not None)
        raise InputError(f"drafter: expected one whose tree can be searched for ({searched}), found a {kind.title}")
    if config.output is None and not (Path(path) / "config.json").is_file():
        raise InputError(f"drafter: expected a directory with a config.json, to write the tree to, found {path}")
    require_writable(config.output or path, *FILES, field="drafter" if config.output is None else "output")
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    pair, settings = load_fastest(
        config.target,
        tokenizer,
        [spec],
        config.dtype,
        torch.get_num_threads(),
        config.compiled if config.nodes is None else False,  # without a choice of nodes nothing is timed
        config.trust_remote_code,
    )
    target, drafter = pair.target, cast(TreeProposer, pair.drafter.proposer)
    require_split(target, "target")
    texts, median = replayed_texts(config, target, drafter, token_count(tokenizer, target.config))
    parts = _dealt_out(texts, config.seed)
    budgets, doubts = list[Budget](), list[str]()
    if config.nodes is None:
        text = calibration_text(config)
        costs = partial(round_costs, target, drafter, text, config.rows, median, settings.compiled, doubts=doubts)
        with phase("trees of each size, and what they cost"):
            budgets = search_budgets(parts["search"], LADDER, costs, parts["selection"])
        tree = max(budgets, key=lambda budget: budget.speedup).tree
    else:
        with phase("search"):
            tree = search_tree(parts["search"], config.nodes, parts["selection"])
    depth, check = drafter.depth, parts["check"]
    trees = {
        "chain": Tree.chain(depth),
        "reference": reference_tree(depth),
        "reference_cut": reference_tree(depth, len(tree)),
        "independence": independence_tree(parts["search"], len(tree)),
        "searched": tree,
    }
    report = {
        "schema": SCHEMA,
        "environment": environment(target.device, pair.dtype),
        "choices": choices_of(tree),
        "target": config.target,
        "drafter": {"kind": kind.name, "path": path, "depth": depth},
        "calibration": {
            "completions": config.completions,
            "texts": {name: len(part) for name, part in parts.items()},
            "tokens": {name: sum(map(len, part)) for name, part in parts.items()},
            "seed": config.seed,
        },
        "rank_accuracies": rank_accuracies(check).tolist(),
        "trees": {name: _figures(check, other, tree) for name, other in trees.items()},
        "node_shares": node_shares(check, tree).tolist(),
        "costs": None,
    }
    if budgets:
        rows = [_budget_row(budget) for budget in budgets]
        report["costs"] = {"rows": config.rows, "context": median, "compiled": settings.compiled, "budgets": rows}
        report["costs"]["doubts"] = doubts
    _write(Path(config.output or path), report, tree)
    if config.output is None:
        file = Path(path) / "config.json"
        write_json(file, read(dict[str, Any], file) | {kind.tree_key: report["choices"]})
    return report


def _dealt_out(texts: Sequence[TextRanks], seed: int) -> dict[str, list[TextRanks]]:
    """Deal texts out at random: half to search on, a fifth to select on, the rest to check what was found."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    half, most = -(-len(texts) // 2), -(-7 * len(texts) // 10)
    places = {"search": order[:half], "selection": order[half:most], "check": order[most:]}
    return {name: [texts[place] for place in part] for name, part in places.items()}


def _budget_row(budget: Budget) -> dict[str, Any]:
    return {
        "nodes": len(budget.tree),
        "mean_acceptance_length": budget.acceptance_length,
        "verification_seconds": budget.verification,
        "rest_seconds": budget.costs.overhead,
        "predicted_speedup": budget.speedup,
    }


def replayed_texts(
    config: TreeConfig, target: PreTrainedModel, drafter: TreeProposer, size: int
) -> tuple[list[TextRanks], int]:
    """Return the ranks of every different text's tokens, and the median length to a text's middle.

    The first `size` logits are tokens; completions that are not the target's at temperature 0 are refused.
    """
    seen: set[tuple[int, ...]] = set()
    texts: list[TextRanks] = []
    middles: list[int] = []
    for path in config.completions:
        samples = load_completions(path, size)
        wrong = tokens = 0
        first = ""
        for sample in each(samples, f"ranks in {path}", "texts"):
            ids, prompt_length = tuple(sample["input_ids"]), sample["prompt_length"]
            if ids in seen or prompt_length == len(ids) or len(texts) == config.limit:
                continue
            seen.add(ids)
            sequence = torch.tensor(ids, device=target.device)
            hidden = text_states(target, sequence, prompt_length)
            turned = _disagreements(target, hidden, sequence[prompt_length:], size)
            if turned and not wrong:
                first = f"the first in sample {sample['id']!r}, token {turned[0]} of its text"
            wrong, tokens = wrong + len(turned), tokens + len(hidden)
            texts.append(drafter.ranks(target, sequence, prompt_length, hidden))
            middles.append((prompt_length + len(ids)) // 2)
        if wrong > MOST_DISAGREEMENT * tokens:
            raise InputError(
                f"completions: expected in {path} what {config.target} wrote at temperature 0, found {wrong} of "
                f"{tokens} tokens that are not its most likely, {first}"
            )
    if len(texts) < 4:
        raise InputError(f"completions: expected at least 4 different texts, found {len(texts)}")
    return texts, sorted(middles)[len(middles) // 2]


@torch.inference_mode()
def _disagreements(target: PreTrainedModel, hidden: Tensor, tokens: Tensor, size: int, chunk: int = 512) -> list[int]:
    """Return the places of the tokens that are not the target's argmax; padding of the vocabulary is no token."""
    head = head_of(target).cut(size)
    choices = torch.cat([head(hidden[i : i + chunk]).argmax(-1) for i in range(0, len(hidden), chunk)])
    return (choices != tokens).nonzero()[:, 0].tolist()


def calibration_text(config: TreeConfig) -> Tensor:
    """Return what the target wrote, prompts too, (T,): rounds are timed behind parts of it."""
    samples = load_completions(config.completions[0])
    return torch.tensor(
        [token for sample in samples.select(range(min(16, len(samples)))) for token in sample["input_ids"]]
    )


def round_costs(
    target: PreTrainedModel,
    drafter: TreeProposer,
    text: Tensor,
    rows: int,
    context: int,
    compiled: bool,
    trees: Sequence[Tree],
    doubts: list[str],
) -> list[RoundCosts]:
    """Measure what rounds with these trees cost: the loop's whole rounds, in turns with plain decoding.

    Compiled, each tree is a program of its own, which takes much longer to make than to time: the smallest of the
    deepest ones is timed, and of the others a round takes beside its forward what their depth is of its depth.
    What was timed twice and does not agree is added to `doubts`.
    """
    timed = [max(trees, key=lambda tree: (tree.depth, -len(tree)))] if compiled else trees
    named = {f"{len(tree)} nodes": tree for tree in timed}
    proposers = {name: drafter.with_tree(tree) for name, tree in named.items()}
    depths = {name: tree.depth for name, tree in named.items()}

    def parts() -> Parts:
        forwards = verification_costs(
            target, rows, context, [1, *(len(tree) + 1 for tree in trees)], repeats=9, compiled=compiled
        )
        # More tokens never cost less: where they seem to, the smaller block was disturbed.
        seconds = {k: min(t for tokens, t in forwards.items() if tokens >= k) for k in forwards}
        return Parts(seconds, {0.0: dict.fromkeys(named, (0.0, 0.0, 0.0))})

    loops = partial(
        loop_turns, target, proposers, depths, text.to(target.device), rows, context, {0.0: Sampler.of(0)}, REPEATS,
        compiled,
    )  # fmt: skip
    timing = agreeing(loops, parts, depths)
    doubts += timing.doubts()[0.0]
    beside = [timing.rest(0.0, name) for name in named]
    if compiled:
        rest = [max(0.0, beside[0]) * tree.depth / timed[0].depth for tree in trees]
    else:
        rest = levelled(trees, beside)
    plain = timing.plain_overhead(0.0)
    return [RoundCosts(timing.parts.target, 0.0, overhead=each, plain_overhead=plain) for each in rest]


def levelled(trees: Sequence[Tree], seconds: Sequence[float]) -> list[float]:
    """Return what a round takes beside its forward, by the plane through the measured seconds over depth and nodes.

    Each level is another head, each node another token to compare: neither takes less than no time. What differs from
    the plane is noise, a difference of two larger times, and by it a tree would be chosen for a lucky moment.
    """
    levels = np.array([[1.0, tree.depth, len(tree)] for tree in trees])
    return [float(each) for each in levels @ nnls(levels, np.maximum(seconds, 0.0))[0]]


def _figures(check: list[TextRanks], tree: Tree, searched: Tree) -> dict[str, Any]:
    tokens = [len(text) for text in check]
    rounds, others = ([text.rounds(each) for text in check] for each in (searched, tree))
    return {
        "nodes": len(tree),
        "depth": tree.depth,
        "mean_acceptance_length": acceptance_estimate(check, tree),
        "gain_of_searched": None if tree == searched else ratio_difference(tokens, rounds, tokens, others),
    }


def _write(directory: Path, report: dict[str, Any], tree: Tree) -> None:
    write_json(directory / "tree.json", report)
    estimate, texts = report["trees"]["searched"]["mean_acceptance_length"], report["calibration"]["texts"]["check"]
    title = f"{len(tree)} nodes, τ {format_estimate(estimate, spread='interval')}"
    subtitle = f"tokens per forward of the target at T=0, replayed on {texts} texts that were not searched on"
    svg = draw_tree(tree, report["node_shares"], title, subtitle, png=directory / "tree.png")
    (directory / "tree.svg").write_text(svg, encoding="utf-8")


def print_tree(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the accuracies at each depth, τ of each tree, and what the measured costs say; it fits 80 columns."""
    console = console or Console()
    texts = report["calibration"]["texts"]
    columns = ("", *(f"top {k}" for k in TOP))
    table = figures_table(columns, "", f"accuracy by depth, on {texts['check']} texts")
    for depth, shares in enumerate(report["rank_accuracies"], 1):
        table.add_row(f"depth {depth}", *(f"{sum(shares[:k]):.1%}" for k in TOP))
    console.print(table)
    if report["costs"]:
        costs = report["costs"]
        table = figures_table(
            ("nodes", "τ", "verify", "rest", "speed-up"),
            "",
            f"measured behind {costs['context']} tokens, {costs['rows']} at a time"
            + (", compiled" if costs["compiled"] else ""),
        )
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
    """Search, print the tables, and say where the tree is."""
    config = parse_config(TreeConfig, argv, prog="draftsmith tree")
    report = search(config)
    print_tree(report)
    if config.nodes is not None and (found := report["trees"]["searched"]["nodes"]) < config.nodes:
        print(f"{found} nodes, not {config.nodes}: in these texts no more would be accepted")
    print(f"tree: {Path(config.output or report['drafter']['path']) / 'tree.json'}")
    return 0
