"""`python -m draftsmith.scripts.bench.trees`: is the tree that `draftsmith tree` takes the fastest?

Trees of several sizes are searched on text that the target wrote, and priced as `tree` prices them. Then each
decodes the same other prompts, in turns with plain decoding, at temperature 0.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from transformers import GenerationConfig

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.measurement.intervals import rate_ratio
from draftsmith.decode.measurement.tree_search import mean_acceptance_length, search_tree
from draftsmith.decode.proposers.draft_tree import TreeProposer
from draftsmith.scripts.bench.common import (
    MAX_PROMPT_TOKENS,
    BenchmarkConfig,
    decode_in_turns,
    main,
    tokens_and_seconds,
)
from draftsmith.scripts.configs import TreeConfig
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.settings import load_fastest
from draftsmith.scripts.tree import calibration_text, replayed_texts, round_costs
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment


@dataclass(kw_only=True)
class BenchTreesConfig(BenchmarkConfig):
    """Compare the speed that is predicted of trees with the speed that they have."""

    target: str
    """The target: a model directory or hub id."""
    drafter: str
    """A drafter that drafts trees: `DIR_OR_KIND`."""
    completions: list[str]
    """Completions of the target at temperature 0: trees are searched on them, as by `draftsmith tree`."""
    prompts: str | None = None
    """A file of other prompts to decode; held-out modules of the standard library if None."""
    nodes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 24])
    """Sizes of the trees."""
    limit: int = 16
    """Prompts decoded, by every tree."""
    max_new_tokens: int = 48
    """Tokens of a completion."""
    dtype: str = "float32"
    """Weights and arithmetic of target and drafter."""
    compiled: bool = False
    """Compile the forwards, of plain decoding too."""


def bench(config: BenchTreesConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures of each tree."""
    tokenizer = load_tokenizer(config.target, field="target")
    specs = drafter_specs([config.drafter])
    pair, _ = load_fastest(
        config.target, tokenizer, specs, config.dtype, torch.get_num_threads(), config.compiled, False
    )
    target, drafter = pair.target, cast(TreeProposer, pair.drafter.proposer)
    planned = TreeConfig(target=config.target, drafter=[config.drafter], completions=config.completions)
    texts, median = replayed_texts(planned, target, drafter, token_count(tokenizer, target.config))
    trees = [search_tree(texts, nodes) for nodes in config.nodes]
    text, doubts = calibration_text(planned), list[str]()
    costs = round_costs(target, drafter, text, planned.rows, median, config.compiled, trees, doubts)

    target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": False, "compiled": config.compiled}
    methods: dict[str, Any] = {"plain": partial(autoregressive_generate, target, **options)}
    for tree in trees:
        drafted: dict[str, Any] = {"draft_length": tree.depth, **options}
        methods[f"{len(tree)} nodes"] = partial(speculative_generate, target, drafter.with_tree(tree), **drafted)
    encoded = encoded_prompts(config.prompts, tokenizer, config.limit, MAX_PROMPT_TOKENS)
    prompts = [torch.tensor([ids], device=target.device) for ids in encoded]
    results = decode_in_turns(methods, prompts)
    figures = {}
    for tree, cost in zip(trees, costs, strict=True):
        name = f"{len(tree)} nodes"
        decoded = results[name]
        rounds = sum(each.counts.num_drafts for each in decoded)
        there, here = mean_acceptance_length(texts, tree), sum(each.tokens for each in decoded) / rounds
        figures[name] = {
            "τ searched": there,
            "τ here": here,
            "predicted": cost.speedup(there, len(tree)),
            "predicted with τ of here": cost.speedup(here, len(tree)),
            "measured": rate_ratio(*tokens_and_seconds(decoded), *tokens_and_seconds(results["plain"])),
        }
    return {"environment": environment(target.device, pair.dtype), "trees": figures, "doubtful_costs": doubts}


if __name__ == "__main__":
    main(BenchTreesConfig, bench)
