"""Traffic in logs: which part of it is learned from, whether the target wrote it, and how drafters do on the newest."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratio_difference
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.progress import each
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.data.generate import load_completions
from draftsmith.train.data.prompts import AnswersMode, Prompt, read_prompts
from draftsmith.train.losses.output_head import head_of, last_hidden, require_split
from draftsmith.train.models import load_model, load_tokenizer

FOREIGN_NATS = 1.0
"""By how much an answer may be less likely than what the target would draw, a token and on the mean.

SmolLM2-135M: of its own at T=1 at most 0.4, of people's solutions 0.3 on the median, of random words 1.5.
"""
AT_ONCE = 256
"""Tokens whose logits are held at a time."""
LOOKED_AT = 64
"""Answers that are looked at for that."""


@dataclass(frozen=True)
class Traffic:
    """What a log holds that is new."""

    learned: list[Prompt]
    newest: list[Prompt]
    """Without their answers, which the target writes again."""
    requests: int
    """In the log, from its beginning."""


def read_traffic(config: AdaptConfig, seen: int, least: int) -> Traffic | None:
    """Read what the log has; None where fewer than `least` requests are new since the first `seen`.

    Raises:
        InputError: a log that cannot be read, or too short to compare anything on.
    """
    mode: AnswersMode = "required" if config.answers == "given" else "dropped"
    requests = [prompt for path in config.log for prompt in read_prompts(path, answers=mode)]
    if len(requests) < seen:
        seen = 0  # files were rotated away: all that is left is taken for new
    if len(requests) - seen < least:
        return None
    if len(requests) < 2 * config.newest:
        raise InputError(f"log: expected at least {2 * config.newest} requests with answers, found {len(requests)}")
    learned, newest = requests[: -config.newest], requests[-config.newest :]
    if mode == "required":  # the target answers them again
        newest = [replace(each, messages=(each.messages or [])[:-1]) for each in newest]
    return Traffic(learned[-config.most :], newest, len(requests))


@torch.inference_mode()
def foreign_share(config: AdaptConfig, directory: str) -> float:
    """Return the share of given answers that the target would hardly have written, of `LOOKED_AT` random ones.

    An answer's surprise −log p(x) − H(p) is zero a token on the mean, where the target drew it at T=1, and less where
    it was drawn at a lower temperature.
    """
    samples = list(load_completions(directory))
    random.Random(config.seed).shuffle(samples)
    model = load_model(config.target, field="target", trust_remote_code=config.trust_remote_code)
    require_split(model, "target")
    head = head_of(model)
    foreign, looked = 0, samples[:LOOKED_AT]
    for sample in each(looked, "whether the target wrote the answers", "texts"):
        ids_1T = torch.tensor(sample["input_ids"], device=model.device)[None]
        mask_T = torch.tensor(sample["loss_mask"], device=model.device)[1:].bool()
        hidden_TH = last_hidden(model, input_ids=ids_1T[:, :-1])[0, mask_T]
        surprise = 0.0
        # Not the logits of a whole text: at 32k tokens and a vocabulary of 152k they are 20 GB.
        for some_TH, some_T in zip(hidden_TH.split(AT_ONCE), ids_1T[0, 1:][mask_T].split(AT_ONCE), strict=True):
            log_p_TV = head(some_TH).float().log_softmax(-1)
            surprise -= float(log_p_TV.gather(1, some_T[:, None]).sum() - (log_p_TV.exp() * log_p_TV).sum())
        foreign += surprise / max(1, len(hidden_TH)) > FOREIGN_NATS
    return foreign / len(looked)


@dataclass(frozen=True)
class Compared:
    """Two drafters on the newest traffic, paired over its requests, all temperatures together."""

    old: Estimate
    new: Estimate
    """τ."""
    gain: Estimate
    by_temperature: dict[str, Estimate]
    """The gain."""
    by_category: dict[str, Estimate]
    promised: dict[str, Estimate]
    """α of the new drafter by temperature, as `measure --server` has it: accepted ÷ tried tokens, at this γ. Of a draft
    model that drafts its likeliest token, as servers do unless they are told otherwise, and accept less of."""


def compare(config: AdaptConfig, old: str, new: str, texts: Mapping[float, str]) -> Compared:
    """Replay both drafters on what the target wrote to the newest requests.

    Args:
        config: γ and the law.
        old: the deployed drafter's directory.
        new: the other's.
        texts: by temperature the directories of the target's answers.
    """
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    specs = drafter_specs([f"old={old}", f"new={new}"], [1])
    code = config.trust_remote_code
    pair = load_pair(config.target, tokenizer, specs, trust_remote_code=code, decodes=False)
    chains = {each.name: each.family.chain(each, config.draft_length) for each in pair.drafters}
    draft_length = min(most for _, most in chains.values())
    proposers = {name: chain for name, (chain, _) in chains.items()}
    greedy = next(each.greedy for each in pair.drafters if each.name == "new")
    served = "new" if greedy is None else "served"
    proposers |= {} if greedy is None else {served: greedy}
    columns: dict[str, dict[str, list[list[float]]]] = {}  # by temperature and drafter: tokens and rounds of each text
    categories: list[str | None] = []
    promised = dict[str, Estimate]()
    for temperature, directory in texts.items():
        samples = list(load_completions(directory).sort("id"))
        categories = [sample["category"] for sample in samples]
        prompts = [sample["prompt_length"] for sample in samples]
        pair.say_undrafted(prompts, [len(sample["input_ids"]) for sample in samples])
        replays = replay_drafters(
            pair.target,
            proposers,
            [torch.tensor(sample["input_ids"], device=pair.target.device) for sample in samples],
            prompts,
            [draft_length],
            config.at(temperature).sampler(),
            config.max_new_tokens,
        )
        counts = [text.counts[draft_length] for text in replays[served].texts]
        tried = [float(sum(its.num_reached_per_pos)) for its in counts]
        promised[f"{temperature:g}"] = ratio([float(its.num_accepted_tokens) for its in counts], tried)
        columns[f"{temperature:g}"] = {
            name: [list(map(float, column)) for column in replay.tokens_and_rounds(draft_length)]
            for name, replay in replays.items()
            if name != served or served == "new"
        }
    # Of each request its texts at all temperatures are one sample.
    pooled = {
        name: [
            [sum(values) for values in zip(*(its[name][part] for its in columns.values()), strict=True)]
            for part in (0, 1)
        ]
        for name in ("old", "new")
    }
    places: dict[str, list[int]] = {}
    for place, category in enumerate(categories):
        if category is not None:
            places.setdefault(category, []).append(place)
    return Compared(
        ratio(*pooled["old"]),
        ratio(*pooled["new"]),
        _gain(pooled, range(len(categories))),
        {temperature: _gain(its, range(len(categories))) for temperature, its in columns.items()},
        {category: _gain(pooled, its) for category, its in sorted(places.items())},
        promised,
    )


def _gain(of: Mapping[str, Sequence[Sequence[float]]], places: Sequence[int]) -> Estimate:
    """Return by how much the new drafter's τ is above the old one's on some requests."""
    columns: list[Any] = [[column[place] for place in places] for name in ("new", "old") for column in of[name]]
    return ratio_difference(*columns)
