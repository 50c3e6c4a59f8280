"""Trials of drafters: what they accept of texts that the target wrote."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from draftsmith.decode import Proposer, Replay
from draftsmith.decode.measurement.replay import Key, replay_drafters
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.kinds.drafter import DrafterSpec, Pair
from draftsmith.train.models import load_tokenizer


def named_specs(drafters: Mapping[str, str]) -> list[DrafterSpec]:
    """Return the specs of directories, or of kinds that need none, by name."""
    specs = drafter_specs([path if name == path else f"{name}={path}" for name, path in drafters.items()], [1])
    return [dataclasses.replace(spec, name=name) for name, spec in zip(drafters, specs, strict=True)]


def load_chains(
    target: str, drafters: Mapping[str, str], draft_length: int, dtype: str = "auto", trust_remote_code: bool = False
) -> tuple[Pair, dict[str, tuple[Proposer, int]]]:
    """Load a target and drafters; return them, and each one's proposer of chains with their length, at most γ.

    `drafters` is as for `named_specs`. Trials use chains because trees would need a search of their own.
    """
    tokenizer = load_tokenizer(target, field="target", trust_remote_code=trust_remote_code)
    pair = load_pair(target, tokenizer, named_specs(drafters), dtype, trust_remote_code, decodes=False)
    return pair, {drafter.name: drafter.family.chain(drafter, draft_length) for drafter in pair.drafters}


def replay_completions(
    pair: Pair, proposers: Mapping[Key, Proposer], samples: Sequence[Mapping[str, Any]], draft_lengths: Sequence[int],
    sampler: Sampler, max_new_tokens: int | None = None, with_sizes: bool = False,
) -> dict[Key, Replay]:  # fmt: skip
    """Replay proposers on samples of completions, `with_sizes` of rounds; warn of tokens past their positions."""
    texts = [torch.tensor(sample["input_ids"], device=pair.target.device) for sample in samples]
    lengths = [sample["prompt_length"] for sample in samples]
    pair.warn_undrafted(lengths, list(map(len, texts)))
    whole = [np.zeros(len(text) - n, int) for text, n in zip(texts, lengths, strict=True)] if with_sizes else []
    return replay_drafters(
        pair.target, proposers, texts, lengths, draft_lengths, sampler, max_new_tokens, stretches=whole
    )
