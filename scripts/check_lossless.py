"""`python -m draftsmith.scripts.check_lossless`: does this pair decode losslessly, on these prompts, by every drafter?

At T=0 each text must be plain decoding's, token for token or up to a tie that rounding broke; under sampling the texts
must have the target's distribution (`draftsmith.decode.measurement.certificate`, as `measure` certifies its runs). Exit
code 0 if all hold, 3 if one does not.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode import Counts, DynamicTree, InputError, Proposer, Tree
from draftsmith.decode.measurement.certificate import Certificate, certify_greedy, certify_sampled
from draftsmith.decode.measurement.distribution_test import compare_greedy, plain_texts
from draftsmith.scripts.configs import EAGLE_CHECKED, PARALLEL_CHECKED, LosslessConfig
from draftsmith.scripts.pair import EAGLE, PARALLEL, DrafterSpec, load_pair
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment, write_json

TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])
TREES = {"draft": None, "tree": TREE, "dynamic": DynamicTree(), "parallel_draft": None, "parallel_tree": TREE}
TREES |= {"eagle": None, "eagle_tree": TREE, "eagle_dynamic": DynamicTree()}


def check(config: LosslessConfig, console: Console) -> bool:
    """Run the checks, print a line for each as it ends, and return whether all hold."""
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    specs = [_spec(config, name) for name in config.proposers]
    pair = load_pair(config.target, tokenizer, specs, config.dtype, config.trust_remote_code)
    target = pair.target
    size = target.config.get_text_config().vocab_size
    encoded = encoded_prompts(config.prompts, tokenizer, config.limit, config.max_prompt_tokens, size)
    prompts = [torch.tensor(ids, device=target.device) for ids in encoded]
    if not prompts:
        raise InputError(f"prompts: expected at least one in {config.prompts}, found none")
    options = {"draft_length": config.draft_length, "max_new_tokens": config.max_new_tokens}
    options["batch_size"] = config.batch_size
    figures: dict[str, Any] = {"environment": environment(target.device, pair.dtype), "config": vars(config)}
    figures |= {"prompts": len(prompts), "drafters": {}}
    plain = plain_texts(target, prompts, config.batch_size, max_new_tokens=config.max_new_tokens)
    passed = True
    for drafter in pair.drafters:
        found, counts = _greedy(target, drafter.proposer, prompts, plain, options)
        length = f"τ {counts.mean_acceptance_length() or 1.0:.2f}"
        _print(console, f"{drafter.name}, T=0: {found.prompts_identical} of {len(prompts)} identical, {length}", found)
        certificates = {"greedy": found}
        if config.sampled_tokens:
            certificates["sampled"] = found = certify_sampled(
                target, drafter.proposer, prompts, config.sampled_tokens, config, **options
            )
            words = f"{drafter.name}, T={config.temperature:g}: {found.tokens} tokens, p-value {found.p_value:.2g}"
            _print(console, words, found)
        figures["drafters"][drafter.name] = {**certificates, "counts": counts}
        passed &= all(certificate.passed for certificate in certificates.values())
        if config.output:
            write_json(Path(config.output), figures)
    console.print("lossless" if passed else "not lossless")
    return passed


def _spec(config: LosslessConfig, name: str) -> DrafterSpec:
    """Return what to load for one of the proposers; trees no deeper than γ."""
    if name not in TREES:
        return DrafterSpec(name)
    tree, lengths = TREES[name], [config.draft_length]
    tree = tree.pruned(config.draft_length)[0] if isinstance(tree, Tree) else tree
    if name in PARALLEL_CHECKED:
        return DrafterSpec(PARALLEL, config.parallel_draft, name, lengths, tree)
    if name in EAGLE_CHECKED:
        return DrafterSpec(EAGLE, config.eagle, name, lengths, tree)
    return DrafterSpec("draft", config.draft, name, lengths, tree)


def _greedy(
    target: PreTrainedModel, proposer: Proposer, prompts: list[Tensor], plain: list[Tensor], options: dict[str, int]
) -> tuple[Certificate, Counts]:
    """Decode at T=0, and compare with the plain texts."""
    expected = [text[len(prompt) :].tolist() for text, prompt in zip(plain, prompts, strict=True)]
    texts, comparison = list(expected), compare_greedy(target, proposer, prompts, plain, **options)
    for difference in comparison.differences:
        texts[difference.prompt] = list(difference.found[len(prompts[difference.prompt]) :])
    return certify_greedy(target, expected, texts, prompts), comparison.counts


def _print(console: Console, words: str, certificate: Certificate) -> None:
    console.print(words, highlight=False)
    if certificate.reason:
        console.print(f"  {certificate.reason}", highlight=False, markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks."""
    config = parse_config(LosslessConfig, argv, prog="python -m draftsmith.scripts.check_lossless")
    return 0 if check(config, Console()) else 3


if __name__ == "__main__":
    sys.exit(run(main))
