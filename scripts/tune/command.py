"""`draftsmith tune`: lossy rules at many levels, what they gain in speed and how far they depart from the target."""

import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode import DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.repetition import count_repeated_ngrams
from draftsmith.decode.proposers.base import Proposer
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.scripts.tune.tradeoff import (
    EXACT,
    PLAIN,
    RULES,
    Seen,
    Setting,
    choose,
    draw_tradeoff,
    figures,
    level_between,
    print_tradeoff,
)
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.prompts import encode_prompt, read_prompts
from draftsmith.train.data.shards import output_directory
from draftsmith.train.models import check_head, check_same_tokenizer, identity, load_model, load_tokenizer
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.tune/1"
JOURNAL = "decoded.json"


@dataclass
class TuneConfig:
    """Decode prompts by lossy rules at several levels, and find the fastest that departs less than you allow."""

    target: str
    """The target: a model directory or hub id."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    output: str
    """The directory that receives `tune.json` and `tune.svg`; a killed run goes on from what it keeps there."""
    draft: str | None = None
    """The draft model that drafts chains; or give `medusa`."""
    medusa: str | None = None
    """Medusa or Hydra heads that draft the tree of their config."""
    draft_length: int = 4
    """γ, drafted tokens a round, of the draft model. Of all levels alike: where more tokens stand, a longer draft may
    pay that did not."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    max_disagreement: float | None = None
    """At temperature 0: the share of tokens, below 1, that may differ from the target's argmax in their context."""
    max_total_variation: float | None = None
    """Under sampling: how far a token's law may be from the target's in its context, mean total variation, below 1. A
    text of n tokens is then at most n times as far in law."""
    typical_levels: str | float | list[float] = "0.05,0.1,0.2,0.4,0.8"
    """ε of typical acceptance: levels with commas, an empty list for none of this rule. However high ε is, it stays
    lenient where the target is unsure, unless δ is high too."""
    typical_delta: float | None = None
    """δ of typical acceptance at every ε, above which ε changes nothing; None for √ε, as Medusa's authors set it."""
    threshold_levels: str | float | list[float] = "0.05,0.1,0.2,0.4,0.8"
    """Levels of the threshold rule, which near 1 is nearly exact, and slower than the exact rule: it refuses the
    target's own choice too where that is less likely. At temperature 0 it looks at the target's probability at
    temperature 1."""
    cascade_levels: str | float | list[float] = "0.15,0.3,0.5,0.7,0.9"
    """The drafter's confidence from which the cascade lets its tokens stand."""
    refine: int = 3
    """Further levels of each rule, each half-way between one that departs little enough and one that does not, while
    there is something to gain. Nothing is tried beyond the levels given."""
    max_new_tokens: int = 128
    """Tokens of a completion at most."""
    max_prompt_tokens: int | None = None
    """Keep the last so many tokens of a longer prompt."""
    limit: int | None = None
    """Decode the first so many prompts only."""
    seed: int = 0
    """Seeds the sampling: prompt i draws with seed + i."""
    dtype: str = "bfloat16"
    """Weights and arithmetic of all models."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""
    settings: list[Setting] = field(init=False)

    def __post_init__(self) -> None:
        if (self.draft is None) == (self.medusa is None):
            raise InputError(
                f"draft: expected a draft model or, as `medusa`, heads, found {'both' if self.draft else 'neither'}"
            )
        for name, least in (
            ("draft_length", 1),
            ("refine", 0),
            ("max_new_tokens", 1),
            ("max_prompt_tokens", 1),
            ("limit", 2),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name}: expected at least {least}, found {value}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature: expected 0 or more, found {self.temperature}")
        # The other one says nothing there: disagreements are of T=0 alone.
        wanted, other = ("max_disagreement", "max_total_variation")[:: 1 if self.temperature == 0 else -1]
        if getattr(self, other) is not None:
            raise InputError(f"{other}: expected {wanted} at temperature {self.temperature:g}, found {other}")
        if self.most is not None and not 0 < self.most < 1:
            raise InputError(f"{wanted}: expected more than 0 and less than 1, found {self.most}")
        if self.typical_delta is not None and not self.typical_delta >= 0:
            raise InputError(f"typical_delta: expected at least 0, found {self.typical_delta}")
        self.settings = [self.setting(rule, level) for rule in RULES for level in self._levels(rule)]
        if not self.settings:
            raise InputError("threshold_levels: expected a level of at least one rule, found none")

    @property
    def most(self) -> float | None:
        """The departure that the user allows."""
        return self.max_disagreement if self.temperature == 0 else self.max_total_variation

    def setting(self, rule: str, level: float) -> Setting:
        """Return a lossy rule at a level, with the δ that typical acceptance has there."""
        if rule != "typical":
            return Setting(rule, level)
        return Setting(rule, level, math.sqrt(level) if self.typical_delta is None else self.typical_delta)

    def _levels(self, rule: str) -> list[float]:
        name = f"{rule}_levels"
        value = getattr(self, name)
        try:
            found = [float(x) for x in (value if isinstance(value, list) else str(value).split(",")) if x != ""]
        except ValueError as error:
            raise InputError(f"{name}: expected numbers separated by commas, found {value!r}") from error
        for level in found:
            if not (0 <= level < 1 or (level == 1 and rule == "cascade")):
                most = "at most" if rule == "cascade" else "less than"
                raise InputError(f"{name}: expected levels of at least 0 and {most} 1, found {level:g}")
        return sorted(set(found))


@dataclass(frozen=True)
class Pair:
    """The target, what drafts for it, and the prompts."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    proposer: Proposer
    draft_length: int
    prompts: list[Tensor]
    """Each (1, T)."""


def tune(config: TuneConfig, progress: bool = True) -> dict[str, Any]:
    """Decode as the config says, write `tune.json` and `tune.svg`, and return what tune.json holds.

    Each prompt is decoded in every setting before the next prompt's turn, in an order that rotates from prompt to
    prompt. The levels that the search then asks for take a turn of their own, and plain decoding once more with them:
    a speed-up is over the plain decoding of its own turn. Prompts are decoded one at a time, for a call tells the
    departure of all its rows together, and the intervals are over prompts.

    Raises:
        InputError: models or prompts that cannot be used, an output directory that cannot be written in, or one where
            a run of other settings or inputs was killed.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    pair, output = _load(config), Path(config.output)
    journal = _Journal(output / JOURNAL, _fingerprint(config, pair))
    with output_directory(output, lambda: f"{journal.count()} decoded texts"):
        report = _tune(config, pair, journal, progress)
        write_json(output / "tune.json", report)
        draw_tradeoff(report, output / "tune.svg")
        journal.path.unlink()
    return report


def _tune(config: TuneConfig, pair: Pair, journal: "_Journal", progress: bool) -> dict[str, Any]:
    seen = _decode_all(config, pair, [PLAIN, EXACT, *config.settings], journal, progress)
    plain, exact, greedy = seen[PLAIN], seen[EXACT], config.temperature == 0
    levels = [figures(setting, seen[setting], plain, exact, greedy) for setting in config.settings]
    for _ in range(config.refine if config.most is not None else 0):
        between = {
            rule: level_between([row for row in levels if row["rule"] == rule], config.most or 0.0) for rule in RULES
        }
        wanted = [config.setting(rule, level) for rule, level in between.items() if level is not None]
        if not wanted:
            break
        seen = _decode_all(config, pair, [PLAIN, *wanted], journal, progress)
        levels += [figures(setting, seen[setting], seen[PLAIN], exact, greedy) for setting in wanted]
    levels.sort(key=lambda row: (RULES.index(row["rule"]), row["level"]))
    chosen, reason = choose(levels, config.most)
    return {
        "schema": SCHEMA,
        "environment": environment(pair.target.device, config.dtype),
        "target": {"path": config.target, "parameters": pair.target.num_parameters(), "dtype": config.dtype},
        "proposer": {
            "kind": "draft" if config.draft else "medusa",
            "path": config.draft or config.medusa,
            "parameters": pair.drafter.num_parameters(),
        },
        "prompts": {"path": config.prompts, "count": len(pair.prompts)},
        "temperature": config.temperature,
        "draft_length": pair.draft_length,
        "departure": "argmax_disagreement" if greedy else "mean_total_variation",
        "max_departure": config.most,
        "plain": figures(PLAIN, plain, plain, exact, greedy),
        "exact": figures(EXACT, exact, plain, exact, greedy),
        "levels": levels,
        "chosen": chosen,
        "reason": reason,
    }


class _Journal:
    """What was decoded so far, on disk after every prompt, so that a killed run goes on."""

    def __init__(self, path: Path, fingerprint: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {"run": fingerprint, "turns": []}
        if path.exists():
            self.content = json.loads(path.read_text(encoding="utf-8"))
            for name, value in fingerprint.items():
                if (found := self.content["run"].get(name)) != value:
                    raise InputError(
                        f"{name}: expected {found!r}, found {value!r}; {path} is of a killed run that was begun "
                        "otherwise, delete it or give another --output"
                    )

    def turn(self, settings: list[Setting]) -> list[list[dict[str, Any]]]:
        """Return what these settings decoded, by prompt; what is appended to it is written by `save`."""
        asked = [asdict(setting) for setting in settings]
        for turn in self.content["turns"]:
            if turn["settings"] == asked:
                return turn["prompts"]
        self.content["turns"].append({"settings": asked, "prompts": []})
        return self.content["turns"][-1]["prompts"]

    def save(self) -> None:
        write_json(self.path, self.content)

    def count(self) -> int:
        return sum(len(turn["settings"]) * len(turn["prompts"]) for turn in self.content["turns"])


def _fingerprint(config: TuneConfig, pair: Pair) -> dict[str, Any]:
    """Return all that the figures of a setting depend on: models and prompts by digests, the rest as it is."""
    names = ("draft_length", "temperature", "max_new_tokens", "seed", "dtype", "threads")
    drafter = config.draft or config.medusa or ""
    return {
        "target": _digest(identity(config.target, trust_remote_code=config.trust_remote_code)),
        "draft" if config.draft else "medusa": _digest(identity(drafter, trust_remote_code=config.trust_remote_code)),
        "prompts": _digest([prompt.tolist() for prompt in pair.prompts]),
        **{name: getattr(config, name) for name in names},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _load(config: TuneConfig) -> Pair:
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    tokenizer = load_tokenizer(config.target, field="target", **options)
    if config.draft:
        own = load_tokenizer(config.draft, field="draft", **options)
        check_same_tokenizer(tokenizer, own, config.target, config.draft)
    prompts = read_prompts(config.prompts, limit=config.limit)
    if len(prompts) < 2:  # of which no interval can be told
        raise InputError(f"prompts: expected at least 2 in {config.prompts}, found {len(prompts)}")
    target = load_model(config.target, field="target", dtype=config.dtype, **options)
    check_head(target, tokenizer, "target")
    # `generate` fills what is left open from here: only where a text ends may come from the target, not how it samples.
    ends = target.generation_config.eos_token_id  # type: ignore[union-attr]
    target.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    ids = [encode_prompt(prompt, tokenizer, max_tokens=config.max_prompt_tokens) for prompt in prompts]
    encoded = [torch.tensor([row], device=target.device) for row in ids]
    if config.draft:
        draft = load_model(config.draft, field="draft", dtype=config.dtype, **options)
        check_head(draft, tokenizer, "draft")
        return Pair(target, draft, DraftModelProposer(draft), config.draft_length, encoded)
    heads: Any = MedusaHeads.from_pretrained(config.medusa or "")
    heads.check_fits(target)
    proposer = MedusaProposer(heads.to(target.device, target.dtype))
    return Pair(target, heads, proposer, proposer.tree.depth, encoded)


def _decode_all(
    config: TuneConfig, pair: Pair, settings: list[Setting], journal: _Journal, progress: bool
) -> dict[Setting, list[Seen]]:
    """Decode every prompt in every setting, from where the journal ends."""
    done = journal.turn(settings)
    left = range(len(done), len(pair.prompts))
    for setting in {setting.rule: setting for setting in settings}.values() if left else ():
        _decode(config, pair, setting, 0)  # warm-up: the first calls allocate
    for i in tqdm(left, desc=f"{len(settings)} settings", unit="prompt", disable=not progress):
        turn = i % len(settings)
        seen = {setting: _decode(config, pair, setting, i) for setting in settings[turn:] + settings[:turn]}
        done.append([asdict(seen[setting]) for setting in settings])
        journal.save()
    return {setting: [Seen(**row[j]) for row in done] for j, setting in enumerate(settings)}


def _decode(config: TuneConfig, pair: Pair, setting: Setting, i: int) -> Seen:
    ids = pair.prompts[i]
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": config.temperature > 0}
    if config.temperature > 0:
        options |= {"temperature": config.temperature, "top_k": 0, "top_p": 1.0}
    options["seed"] = config.seed + i
    _synchronize()
    begun = time.perf_counter()
    if setting == PLAIN:
        output = autoregressive_generate(pair.target, ids, **options)
    else:
        options |= {"draft_length": pair.draft_length, "rule": setting.build()}
        output = speculative_generate(pair.target, pair.proposer, ids, **options)
    _synchronize()
    seconds = time.perf_counter() - begun
    counts, departure = output.counts, output.departure
    return Seen(
        counts.num_drafts,
        counts.num_draft_tokens,
        counts.num_accepted_tokens,
        counts.num_emitted_tokens,
        seconds,
        0.0 if departure is None else departure.total_variation,
        *count_repeated_ngrams(output.sequences[0, ids.shape[1] :].tolist()),
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Tune, print the table and what to take, and say where the curve is."""
    config = parse_config(TuneConfig, argv, prog="draftsmith tune")
    print_tradeoff(tune(config))
    print(f"curve: {Path(config.output) / 'tune.svg'}, figures: {Path(config.output) / 'tune.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
