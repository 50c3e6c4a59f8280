"""`python -m draftsmith.scripts.check_lossless`: does this pair decode losslessly, on these prompts, by every drafter?

At T=0 each text must be plain decoding's, token for token or up to a tie that rounding broke; under sampling the texts
must have the target's law (`draftsmith.scripts.measure.certificate`). Exit code 0 if all hold, 3 if one does not.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from draftsmith.decode import (
    DraftModelProposer,
    DynamicTree,
    InputError,
    LookaheadProposer,
    PromptLookupProposer,
    Proposer,
    Tree,
)
from draftsmith.decode.measurement.distribution_test import compare_greedy, plain_texts
from draftsmith.scripts.measure.certificate import FALSE_ALARM, LEAST_TOKENS, certify_greedy, sample_and_test
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.corpus import code_prompts, stdlib_modules
from draftsmith.train.data.prompts import encode_prompt, read_prompts
from draftsmith.train.models import check_same_tokenizer, load_model, load_tokenizer
from draftsmith.train.provenance import environment, write_json

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])
PROPOSERS = ("draft", "tree", "dynamic", "lookup", "lookahead")


@dataclass
class LosslessConfig:
    """Decode prompts by every drafter, and compare: token for token at T=0, in law under sampling."""

    target: str = str(ASSETS / "tiny-target")
    """The target: a model directory or hub id."""
    draft: str = str(ASSETS / "tiny-draft")
    """A draft model with the target's tokenizer."""
    prompts: str | None = None
    """A file of prompts; held-out modules of the standard library if None."""
    limit: int | None = None
    """Use the first so many prompts; all if None (128 of the standard library)."""
    proposers: list[str] = field(default_factory=lambda: list(PROPOSERS))
    """Any of draft (a chain), tree (a static one of nine nodes), dynamic (grown by probability), lookup, lookahead."""
    draft_length: int = 4
    """γ."""
    max_new_tokens: int = 64
    """Tokens of a text at most."""
    max_prompt_tokens: int = 128
    """Keep the last so many tokens of a longer prompt."""
    batch_size: int = 8
    """Rows decoded together; the plain texts are decoded one at a time."""
    greedy: bool = True
    """Compare texts at T=0."""
    sampled_tokens: int = 0
    """Tokens to test the law on, for each drafter; at least 2000, or 0 for none. Prompts are gone through as often as
    it takes, each time with other seeds."""
    temperature: float = 1.0
    """Of the sampled texts, as all settings down to `no_repeat_ngram_size` are."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Divide (or where negative multiply) the logits of tokens that occurred; 1 for none."""
    no_repeat_ngram_size: int = 0
    """Let no n-gram of this size occur twice; 0 for none."""
    dtype: str = "float32"
    """Weights and arithmetic of both models. In half precision near-ties may break differently at T=0; they are
    counted, and do not fail the check."""
    false_alarm: float = FALSE_ALARM
    """A lossless drafter fails the test of the law with this probability."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    output: str | None = None
    """A JSON file for the figures."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.proposers if name not in PROPOSERS]
        if unknown or not self.proposers:
            raise InputError(
                f"proposers: expected some of {', '.join(PROPOSERS)}, found {', '.join(unknown) or 'none'}"
            )
        for name in ("draft_length", "max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.sampled_tokens and self.sampled_tokens < LEAST_TOKENS:
            raise InputError(f"sampled_tokens: expected 0 or at least {LEAST_TOKENS}, found {self.sampled_tokens}")
        if self.sampled_tokens and not self.temperature > 0:
            raise InputError(f"temperature: expected more than 0 for sampled texts, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: expected more than 0 and at most 1, found {self.top_p}")
        for name in ("top_k", "no_repeat_ngram_size"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}: expected at least 0, found {getattr(self, name)}")
        if not self.repetition_penalty > 0:
            raise InputError(f"repetition_penalty: expected more than 0, found {self.repetition_penalty}")
        if not 0 < self.false_alarm < 1:
            raise InputError(f"false_alarm: expected a value between 0 and 1, found {self.false_alarm}")


def check(config: LosslessConfig, console: Console) -> tuple[bool, dict[str, Any]]:
    """Run the checks, print a line for each as it ends, and return whether all hold, and the figures."""
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(config.target, field="target")
    check_same_tokenizer(tokenizer, load_tokenizer(config.draft, field="draft"), config.target, config.draft)
    target = load_model(config.target, field="target", dtype=config.dtype)
    draft = load_model(config.draft, field="draft", dtype=config.dtype)
    prompts = [torch.tensor(ids, device=target.device) for ids in _prompts(config, tokenizer)]
    if not prompts:
        raise InputError(f"prompts: expected at least one in {config.prompts}, found none")
    figures: dict[str, Any] = {"environment": environment(target.device, config.dtype), "config": vars(config)}
    figures |= {"prompts": len(prompts), "drafters": {}}
    table = Table(title=f"{len(prompts)} prompts, γ = {config.draft_length}, {config.dtype}")
    for column in ("drafter", "T=0: identical", "τ", f"T={config.temperature:g}: tokens", "τ", "p-value"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    plain = []
    if config.greedy:
        bar = tqdm(prompts, desc="plain decoding", disable=None)
        plain = plain_texts(target, bar, max_new_tokens=config.max_new_tokens)
    ok = True
    for name in config.proposers:
        entry: dict[str, Any] = {}
        row = [name, "", "", "", "", ""]
        if config.greedy:
            entry["greedy"] = greedy = _greedy(config, target, _proposer(name, draft), prompts, plain, name)
            ok &= greedy["passed"]
            row[1:3] = [f"{greedy['prompts_identical']} of {len(prompts)}", f"{greedy['mean_acceptance_length']:.2f}"]
            console.print(f"{name}, T=0: {row[1]} identical, τ = {row[2]}, {greedy['seconds']:.0f} s", highlight=False)
            if greedy["reason"]:
                console.print(f"  {greedy['reason']}", highlight=False, markup=False)
        if config.sampled_tokens:
            entry["sampled"] = sampled = _sampled(config, target, _proposer(name, draft), prompts, name)
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


def _prompts(config: LosslessConfig, tokenizer: Any) -> Iterator[list[int]]:
    if config.prompts:
        for prompt in read_prompts(config.prompts, limit=config.limit):
            yield encode_prompt(prompt, tokenizer, max_tokens=config.max_prompt_tokens)
        return
    for record in code_prompts([m for m in stdlib_modules() if m.heldout], config.limit or 128, seed=1):
        yield tokenizer(record["prompt"])["input_ids"][-config.max_prompt_tokens :]


def _proposer(name: str, draft: PreTrainedModel) -> Proposer:
    if name == "lookup":
        return PromptLookupProposer()
    if name == "lookahead":
        return LookaheadProposer()
    return DraftModelProposer(draft, tree={"draft": None, "tree": TREE, "dynamic": DynamicTree()}[name])


def _greedy(
    config: LosslessConfig,
    target: PreTrainedModel,
    proposer: Proposer,
    prompts: list[Tensor],
    plain: list[Tensor],
    name: str,
) -> dict[str, Any]:
    begun = time.perf_counter()
    with tqdm(total=len(prompts), desc=f"{name}, T=0", disable=None) as bar:
        found = compare_greedy(
            target,
            proposer,
            prompts,
            plain,
            draft_length=config.draft_length,
            batch_size=config.batch_size,
            max_new_tokens=config.max_new_tokens,
            observer=lambda round: bar.update(int(round.done)),
        )
    expected = [text[len(prompt) :].tolist() for text, prompt in zip(plain, prompts, strict=True)]
    texts = list(expected)
    for difference in found.differences:
        texts[difference.prompt] = list(difference.found[len(prompts[difference.prompt]) :])
    return {
        **certify_greedy(target, expected, texts, prompts),
        "mean_acceptance_length": found.counts.mean_acceptance_length(),
        "counts": found.counts.to_dict(),
        "seconds": time.perf_counter() - begun,
    }


def _sampled(
    config: LosslessConfig, target: PreTrainedModel, proposer: Proposer, prompts: list[Tensor], name: str
) -> dict[str, Any]:
    # All of them: what is left out would be the generation config's.
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size")
    begun = time.perf_counter()
    with tqdm(total=config.sampled_tokens, desc=f"{name}, sampled", disable=None) as bar:
        result, counts = sample_and_test(
            target,
            proposer,
            prompts,
            config.sampled_tokens,
            {setting: getattr(config, setting) for setting in names},
            batch_size=config.batch_size,
            draft_length=config.draft_length,
            max_new_tokens=config.max_new_tokens,
            observer=lambda round: bar.update(len(round.tokens)),
        )
    return {
        **result.to_dict(),
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
