"""`python -m draftsmith.scripts.check_lossless`: does this pair decode losslessly, on these prompts, by every drafter?

At T=0 each text must be plain decoding's, token for token or up to a tie that rounding broke; under sampling the texts
must have the target's distribution (`draftsmith.decode.measurement.certificate`). Exit code 0 if all hold, 3 if one
does not.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from draftsmith.decode import Counts, DynamicTree, InputError, Tree
from draftsmith.decode.measurement.certificate import certify_greedy, sample_and_test
from draftsmith.decode.measurement.distribution_test import compare_greedy, plain_texts
from draftsmith.scripts.configs import LosslessConfig
from draftsmith.scripts.pair import Drafter, DrafterSpec, load_pair
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment, write_json

TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])
TREES = {"draft": None, "tree": TREE, "dynamic": DynamicTree()}


def check(config: LosslessConfig, console: Console) -> tuple[bool, dict[str, Any]]:
    """Run the checks, print a line for each as it ends, and return whether all hold, and the figures."""
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    specs = [
        DrafterSpec("draft", config.draft, name, tree=TREES[name]) if name in TREES else DrafterSpec(name)
        for name in config.proposers
    ]
    pair = load_pair(config.target, tokenizer, specs, config.dtype, config.trust_remote_code)
    target, dtype = pair.target, pair.dtype
    encoded = encoded_prompts(config.prompts, tokenizer, config.limit, config.max_prompt_tokens)
    prompts = [torch.tensor(ids, device=target.device) for ids in encoded]
    if not prompts:
        raise InputError(f"prompts: expected at least one in {config.prompts}, found none")
    figures: dict[str, Any] = {"environment": environment(target.device, dtype), "config": vars(config)}
    figures |= {"prompts": len(prompts), "drafters": {}}
    table = Table(title=f"{len(prompts)} prompts, γ = {config.draft_length}, {dtype}")
    for column in ("drafter", "T=0: identical", "τ", f"T={config.temperature:g}: tokens", "τ", "p-value"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    plain = []
    if config.greedy:
        bar = tqdm(prompts, desc="plain decoding", disable=None)
        plain = plain_texts(target, bar, max_new_tokens=config.max_new_tokens)
    ok = True
    for drafter in pair.drafters:
        name = drafter.name
        entry: dict[str, Any] = {}
        row = [name, "", "", "", "", ""]
        if config.greedy:
            entry["greedy"] = greedy = _greedy(config, target, drafter, prompts, plain)
            ok &= greedy["passed"]
            row[1:3] = [f"{greedy['prompts_identical']} of {len(prompts)}", f"{greedy['mean_acceptance_length']:.2f}"]
            console.print(f"{name}, T=0: {row[1]} identical, τ = {row[2]}, {greedy['seconds']:.0f} s", highlight=False)
            if greedy["reason"]:
                console.print(f"  {greedy['reason']}", highlight=False, markup=False)
        if config.sampled_tokens:
            entry["sampled"] = sampled = _sampled(config, target, drafter, prompts)
            ok &= sampled["p_value"] > config.false_alarm
            row[3:] = [
                str(sampled["num_tokens"]),
                f"{sampled['mean_acceptance_length']:.2f}",
                f"{sampled['p_value']:.2g}",
            ]
            console.print(
                f"{name}, sampled: {row[3]} tokens, τ = {row[4]}, p-value {row[5]}, {sampled['seconds']:.0f} s",
                highlight=False,
            )
        table.add_row(*row)
        figures["drafters"][name] = entry
        if config.output:
            write_json(Path(config.output), figures)
    console.print(table)
    console.print("lossless" if ok else "not lossless")
    return ok, figures


def _greedy(
    config: LosslessConfig, target: PreTrainedModel, drafter: Drafter, prompts: list[Tensor], plain: list[Tensor]
) -> dict[str, Any]:
    """Decode at T=0, and compare with the plain texts."""
    begun = time.perf_counter()
    with tqdm(total=len(prompts), desc=f"{drafter.name}, T=0", disable=None) as bar:
        comparison = compare_greedy(
            target,
            drafter.proposer,
            prompts,
            plain,
            draft_length=config.draft_length,
            batch_size=config.batch_size,
            max_new_tokens=config.max_new_tokens,
            observer=lambda round: bar.update(int(round.done)),
        )
    expected = [text[len(prompt) :].tolist() for text, prompt in zip(plain, prompts, strict=True)]
    texts = list(expected)
    for difference in comparison.differences:
        texts[difference.prompt] = list(difference.found[len(prompts[difference.prompt]) :])
    return vars(certify_greedy(target, expected, texts, prompts)) | _figures(comparison.counts, begun)


def _sampled(
    config: LosslessConfig, target: PreTrainedModel, drafter: Drafter, prompts: list[Tensor]
) -> dict[str, Any]:
    """Sample texts, and test their distribution."""
    begun = time.perf_counter()
    with tqdm(total=config.sampled_tokens, desc=f"{drafter.name}, sampled", disable=None) as bar:
        result, counts = sample_and_test(
            target,
            drafter.proposer,
            prompts,
            config.sampled_tokens,
            config.generate_kwargs(),
            batch_size=config.batch_size,
            draft_length=config.draft_length,
            max_new_tokens=config.max_new_tokens,
            observer=lambda round: bar.update(len(round.tokens)),
        )
    return result.to_dict() | _figures(counts, begun)


def _figures(counts: Counts, begun: float) -> dict[str, Any]:
    return {
        "mean_acceptance_length": counts.mean_acceptance_length(),
        "counts": counts.to_dict(),
        "seconds": time.perf_counter() - begun,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks."""
    config = parse_config(LosslessConfig, argv, prog="python -m draftsmith.scripts.check_lossless")
    return 0 if check(config, Console())[0] else 3


if __name__ == "__main__":
    sys.exit(run(main))
