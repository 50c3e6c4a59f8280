"""`draftsmith profile`: where a round's time goes, as a table and a trace for chrome://tracing or ui.perfetto.dev."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import Counts, DraftModelProposer, PromptLookupProposer, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.profiler import Profile, chrome_trace, profile_table
from draftsmith.decode.proposers.base import Proposer
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.prompts import encode_prompt, read_prompts
from draftsmith.train.models import check_head, check_same_tokenizer, default_device, load_model, load_tokenizer
from draftsmith.train.provenance import environment, write_json


@dataclass
class ProfileConfig:
    """Profile the rounds of one drafter with a target: how much of their time is drafting, verifying and the rest."""

    target: str
    """The target: a model directory or hub id."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    output: str
    """The directory that receives `trace.json` and `profile.json`."""
    draft: str | None = None
    """The draft model that drafts."""
    medusa: str | None = None
    """Medusa or Hydra heads, which draft the tree of their config, in place of a draft model."""
    prompt_lookup: bool = False
    """Draft by prompt lookup, in place of a draft model."""
    draft_length: int = 4
    """γ, drafted tokens a round; Medusa heads draft their tree."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this much probability; 1 for all."""
    batch_size: str | int | list[int] = "1"
    """Prompts decoded together, several sizes with commas; prompts that fill no whole batch are left out."""
    max_new_tokens: int = 128
    """Tokens of a completion at most."""
    max_prompt_tokens: int | None = None
    """Keep the last so many tokens of a longer prompt."""
    limit: int | None = None
    """Decode the first so many prompts only."""
    compiled: bool = False
    """Run the models through `torch.compile`."""
    seed: int = 0
    """Seeds the sampling: prompt i draws with seed + i."""
    dtype: str = "bfloat16"
    """Weights and arithmetic of all models."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""
    batch_sizes: list[int] = field(init=False)
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        given = [name for name in ("draft", "medusa", "prompt_lookup") if getattr(self, name)]
        if len(given) != 1:
            raise InputError(
                "draft: expected one drafter out of draft, medusa and prompt_lookup, found "
                + (" and ".join(given) or "none")
            )
        self.kind = given[0]
        sizes = self.batch_size if isinstance(self.batch_size, list) else str(self.batch_size).split(",")
        try:
            self.batch_sizes = [int(size) for size in sizes]
        except ValueError as error:
            raise InputError(
                f"batch_size: expected whole numbers separated by commas, found {self.batch_size!r}"
            ) from error
        for name, found, least in (
            ("batch_size", min(self.batch_sizes), 1),
            ("draft_length", self.draft_length, 1),
            ("max_new_tokens", self.max_new_tokens, 1),
            ("max_prompt_tokens", self.max_prompt_tokens, 1),
            ("limit", self.limit, 1),
            ("threads", self.threads, 1),
            ("top_k", self.top_k, 0),
        ):
            if found is not None and found < least:
                raise InputError(f"{name}: expected at least {least}, found {found}")
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature: expected a finite number, 0 or more, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: expected more than 0 and at most 1, found {self.top_p}")


def profile(config: ProfileConfig, progress: bool = True) -> tuple[dict[str, Any], list[Profile]]:
    """Profile as the config says, write `trace.json` and `profile.json`; return the latter and a profile a batch size.

    Raises:
        InputError: models, tokenizers or prompts that do not fit, or fewer prompts than a batch holds.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    prompts = read_prompts(config.prompts, limit=config.limit)
    encoded = [encode_prompt(prompt, tokenizer, max_tokens=config.max_prompt_tokens) for prompt in prompts]
    if max(config.batch_sizes) > len(encoded):
        raise InputError(f"batch_size: expected at most the {len(encoded)} prompts, found {max(config.batch_sizes)}")
    target = load_model(config.target, field="target", dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    check_head(target, tokenizer, "target")
    proposer, draft_length = _drafter(config, target, tokenizer)
    # `generate` fills what is left open from here: only where a text ends may come from the target, not how it samples.
    ends = target.generation_config.eos_token_id
    target.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    options: dict[str, Any] = {
        "draft_length": draft_length,
        "max_new_tokens": config.max_new_tokens,
        "do_sample": config.temperature > 0,
        "compiled": config.compiled,
    }
    if config.temperature > 0:
        options |= {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    profiles, batches = [], []
    for size in config.batch_sizes:
        own, counts = Profile(), Counts()
        starts = range(0, len(encoded) - size + 1, size)
        for i in tqdm(starts, desc=f"batch size {size}", unit="batch", disable=not progress):
            input_ids, mask = _padded(encoded[i : i + size], int(tokenizer.pad_token_id))
            if i == 0:  # warm-up: the first calls allocate, and compile
                speculative_generate(target, proposer, input_ids, mask, seed=config.seed, **options)
            counts += own.generate(target, proposer, input_ids, mask, seed=config.seed + i, **options).counts
        profiles.append(own)
        batches.append(own.breakdown() | {"prompts": len(starts) * size, "counts": counts.to_dict()})
    report = {
        "schema": "draftsmith.profile/1",
        "environment": environment(default_device(), config.dtype),
        "target": config.target,
        "proposer": {"kind": config.kind, "path": config.draft or config.medusa},
        "draft_length": draft_length,
        "temperature": config.temperature,
        "compiled": config.compiled,
        "batches": batches,
    }
    write_json(Path(config.output) / "trace.json", chrome_trace(profiles))
    write_json(Path(config.output) / "profile.json", report)
    return report, profiles


def _drafter(
    config: ProfileConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Proposer, int]:
    """Return the proposer and how deep it drafts."""
    if config.draft is not None:
        remote = config.trust_remote_code
        own = load_tokenizer(config.draft, field="draft", trust_remote_code=remote)
        check_same_tokenizer(tokenizer, own, config.target, config.draft)
        draft = load_model(config.draft, field="draft", dtype=config.dtype, trust_remote_code=remote)
        check_head(draft, tokenizer, "draft")
        return DraftModelProposer(draft), config.draft_length
    if config.medusa is not None:
        heads: Any = MedusaHeads.from_pretrained(config.medusa, dtype=target.dtype)
        heads.check_fits(target)
        drafter = MedusaProposer(heads.to(target.device))
        return drafter, drafter.tree.depth
    return PromptLookupProposer(), config.draft_length


def _padded(encoded: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return prompts padded on the left and their mask, (B, T) each."""
    width = max(map(len, encoded))
    ids = [[pad] * (width - len(own)) + own for own in encoded]
    mask = [[0] * (width - len(own)) + [1] * len(own) for own in encoded]
    return torch.tensor(ids, device=default_device()), torch.tensor(mask, device=default_device())


def main(argv: Sequence[str] | None = None) -> int:
    """Profile, print the table, and say where the trace is."""
    config = parse_config(ProfileConfig, argv, prog="draftsmith profile")
    report, profiles = profile(config)
    where, kind = report["environment"], config.kind.replace("_", " ")
    console = Console()
    console.print(
        f"{kind}, γ = {report['draft_length']}, T = {config.temperature:g}, {where['dtype']}, {where['device']}, "
        f"{where['threads']} threads",
        highlight=False,
        soft_wrap=True,
    )
    console.print(profile_table(profiles))
    print(f"trace, for ui.perfetto.dev: {Path(config.output) / 'trace.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
