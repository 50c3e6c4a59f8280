"""Logged traffic: the part to learn from, whether the target wrote it, and a comparison of drafters on the newest."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratio_difference
from draftsmith.decode.progress import track
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.pair import load_chains, replay_completions
from draftsmith.train.data.generate import load_completions
from draftsmith.train.data.prompt_files import AnswersMode, read_prompts
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.losses.output_head import head_of, last_hidden, require_split
from draftsmith.train.models import load_model

FOREIGN_NATS = 1.0
"""The surprise, in nats a token, above which an answer is foreign.

SmolLM2-135M: at most 0.4 for its own text at T=1, median 0.3 for people's solutions, 1.5 for random words.
"""
LOGITS_AT_ONCE = 256  # tokens
FOREIGN_SAMPLES = 64  # answers
MOST_LEARNED = 10_000  # requests


@dataclass(frozen=True)
class Traffic:
    """The new requests of a log."""

    learned: list[Prompt]
    newest: list[Prompt]  # without answers, which the target writes again
    requests: int  # in the whole log


def read_traffic(config: AdaptConfig, old_requests: int) -> Traffic | None:
    """Read the log; return None if too few requests are new, and raise InputError if it is too short."""
    mode: AnswersMode = "required" if config.answers == "given" else "dropped"
    logs = [read_prompts(path, answers=mode, invalid=config.text.invalid_prompts) for path in config.log]
    requests = [prompt for log in logs for prompt in log]
    if len(requests) < old_requests:
        old_requests = 0  # files were rotated away: treat all that is left as new
    if len(requests) - old_requests < config.least:
        return None
    if len(requests) < 2 * config.newest:
        raise InputError(f"log: expected at least {2 * config.newest} requests with answers, found {len(requests)}")
    learned, newest = requests[: -config.newest], requests[-config.newest :]
    if mode == "required":  # the target answers them again
        newest = [replace(p, messages=p.messages and p.messages[:-1], answer=None, served=None) for p in newest]
    return Traffic(learned[-MOST_LEARNED:], newest, len(requests))


@torch.inference_mode()
def foreign_share(config: AdaptConfig, directory: str) -> float:
    """Return the share of `FOREIGN_SAMPLES` random logged answers that the target would hardly have written.

    An answer's surprise a token is −log p(x) − H(p). Its mean is zero for text drawn from the target at T=1, and
    negative at a lower temperature.
    """
    samples = list(load_completions(directory))
    random.Random(config.seed).shuffle(samples)
    model = load_model(config.target, field="target", trust_remote_code=config.trust_remote_code)
    require_split(model, "target")
    head = head_of(model)
    foreign, checked = 0, samples[:FOREIGN_SAMPLES]
    for sample in track(checked, "whether the target wrote the answers", "texts"):
        ids_1T = torch.tensor(sample["input_ids"], device=model.device)[None]
        mask_T = torch.tensor(sample["loss_mask"], device=model.device)[1:].bool()
        hidden_TH = last_hidden(model, input_ids=ids_1T[:, :-1])[0, mask_T]
        surprise = 0.0
        # Logits of a whole text would be 20 GB at 32k tokens and a vocabulary of 152k.
        chunks = zip(hidden_TH.split(LOGITS_AT_ONCE), ids_1T[0, 1:][mask_T].split(LOGITS_AT_ONCE), strict=True)
        for chunk_TH, chunk_T in chunks:
            log_p_TV = head(chunk_TH).float().log_softmax(-1)
            surprise -= float(log_p_TV.gather(1, chunk_T[:, None]).sum() - (log_p_TV.exp() * log_p_TV).sum())
        foreign += surprise / max(1, len(hidden_TH)) > FOREIGN_NATS
    return foreign / len(checked)


@dataclass(frozen=True)
class Comparison:
    """A comparison of two drafters on the newest traffic, paired over requests, all temperatures together.

    `old`, `new` and the gains are values of τ.
    """

    old: Estimate
    new: Estimate
    gain: Estimate
    by_temperature: dict[str, Estimate]  # gains
    by_category: dict[str, Estimate]  # gains


def compare(config: AdaptConfig, old: str, new: str, texts: Mapping[float, str]) -> Comparison:
    """Replay both drafters on the target's answers to the newest requests, given as directories by temperature."""
    code, both = config.trust_remote_code, {"old": old, "new": new}
    pair, chains = load_chains(config.target, both, config.draft_length, trust_remote_code=code)
    draft_length = min(most for _, most in chains.values())
    proposers = {name: chain for name, (chain, _) in chains.items()}
    columns: dict[str, dict[str, list[list[float]]]] = {}  # by temperature and drafter: tokens and rounds of each text
    categories: list[str | None] = []
    for temperature, directory in texts.items():
        samples = list(load_completions(directory).sort("id"))
        categories = [sample["category"] for sample in samples]
        sampler = config.text.at(temperature).sampler()
        replays = replay_completions(pair, proposers, samples, [draft_length], sampler, config.max_new_tokens)
        columns[f"{temperature:g}"] = {
            name: [list(map(float, column)) for column in replay.tokens_and_rounds(draft_length)]
            for name, replay in replays.items()
        }
    # One sample is a request, with its texts at all temperatures.
    pooled = {
        name: [
            [sum(values) for values in zip(*(column[name][part] for column in columns.values()), strict=True)]
            for part in (0, 1)
        ]
        for name in ("old", "new")
    }
    indices: dict[str, list[int]] = {}
    for index, category in enumerate(categories):
        if category is not None:
            indices.setdefault(category, []).append(index)
    return Comparison(
        ratio(*pooled["old"]),
        ratio(*pooled["new"]),
        _gain(pooled, range(len(categories))),
        {temperature: _gain(column, range(len(categories))) for temperature, column in columns.items()},
        {category: _gain(pooled, members) for category, members in sorted(indices.items())},
    )


def _gain(columns: Mapping[str, Sequence[Sequence[float]]], indices: Sequence[int]) -> Estimate:
    """Return the gain in τ of the new drafter over the old one on some requests."""
    selected: list[Any] = [[column[i] for i in indices] for name in ("new", "old") for column in columns[name]]
    return ratio_difference(*selected)
