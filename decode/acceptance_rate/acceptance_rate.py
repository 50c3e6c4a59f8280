"""The acceptance rate of speculative decoding, as a metric that `evaluate.load` takes from this folder."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import lt
from typing import Any

import datasets

# Imported as a module: `evaluate` takes the first metric class in this file, which would be an imported `Metric`.
import evaluate

from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import ratio

DESCRIPTION = """\
How often a target model agrees with its drafts in speculative decoding: accepted ÷ drafted tokens, and tokens per
forward of the target (τ), with 95 % intervals over prompts.
"""
CITATION = """\
@inproceedings{leviathan2023fast,
  title = {Fast Inference from Transformers via Speculative Decoding},
  author = {Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle = {International Conference on Machine Learning},
  year = {2023}
}
"""
INPUTS = """
Args:
    predictions: one entry a prompt. Under "counts", the default, a dictionary with vLLM's names: num_drafts,
        num_draft_tokens, num_accepted_tokens, num_accepted_tokens_per_pos; if available also num_emitted_tokens (else
        num_accepted_tokens + num_drafts), num_draft_tokens_per_pos and num_reached_per_pos (else derived where every
        round drafted every position). Under "tokens" a list of rounds, each the list of its drafted tokens.
    references: under "tokens" only, shaped likewise: the tokens that the target emitted in each round, the accepted
        ones and the one after them, under the exact rule and for chains.

Returns:
    draft_acceptance_rate: accepted ÷ drafted tokens, bonus excluded; it depends on the draft length.
    mean_acceptance_length: tokens emitted per forward of the target, bonus included; plain decoding has 1.
    draft_acceptance_rate_ci95, mean_acceptance_length_ci95: [low, high], by bootstrap over prompts; None for one.
    acceptance_per_position: rounds that accepted position i ÷ rounds that drafted it.
    conditional_acceptance: the same among rounds that accepted every position before it.
    counts: the sums from which all of these derive.
    A figure that cannot be computed is None, never 0.

Examples:
    >>> metric = evaluate.load("decode/acceptance_rate", "tokens")
    >>> result = metric.compute(predictions=[[[5, 6], [7, 8]]], references=[[[5, 6, 9], [3]]])
    >>> result["draft_acceptance_rate"], result["mean_acceptance_length"]
    (0.5, 2.0)
"""

NAMES = tuple(field.name for field in fields(Counts))
REQUIRED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


class AcceptanceRate(evaluate.Metric):
    """Acceptance from counts or tokens, one entry a prompt (see `INPUTS`); an `InputError` names a wrong entry."""

    def _info(self) -> evaluate.MetricInfo:
        whole = datasets.Value("int64")
        if self.config_name == "tokens":
            rounds = datasets.Sequence(datasets.Sequence(whole))
            features = {"predictions": rounds, "references": rounds}
        elif self.config_name in ("default", "counts"):
            per_pos = datasets.Sequence(whole)
            features = {"predictions": {name: per_pos if name.endswith("_per_pos") else whole for name in NAMES}}
        else:
            raise InputError(f"config_name: expected 'counts' or 'tokens', found {self.config_name!r}")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features(features),
            reference_urls=["https://arxiv.org/abs/2211.17192"],
            license="Apache-2.0",
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add prompts."""
        # Faults are raised here, where prompts still have the user's numbers and nothing was written to disk.
        if not len(predictions):
            raise InputError("predictions: expected one entry a prompt, found none")
        if self.config_name == "tokens":
            if references is None or len(predictions) != len(references):
                found = "none" if references is None else len(references)
                raise InputError(f"references: expected {len(predictions)} prompts, found {found}")
            for i, rounds in enumerate(zip(predictions, references, strict=True)):
                _count_rounds(f"references[{i}]", *rounds)
            kwargs["references"] = references
        else:
            predictions = [_completed(f"predictions[{i}]", entry) for i, entry in enumerate(predictions)]
        super().add_batch(predictions=predictions, **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Add one prompt."""
        self.add_batch(predictions=[prediction], references=reference and [reference], **kwargs)

    def _compute(self, *, predictions: Any = None, references: Any = None) -> dict[str, Any]:
        unknown: list[str] = []
        if self.config_name == "tokens":
            prompts = [_count_rounds("", *rounds) for rounds in zip(predictions, references, strict=True)]
        else:
            unknown = [name for name in NAMES if any(counts[name] is None for counts in predictions)]
            prompts = [_without(unknown, counts) for counts in predictions]
        total = sum(prompts, Counts())
        rate = ratio([c.num_accepted_tokens for c in prompts], [c.num_draft_tokens for c in prompts])
        length = ratio([c.num_emitted_tokens for c in prompts], [c.num_drafts for c in prompts])
        return {
            "draft_acceptance_rate": total.draft_acceptance_rate(),
            "draft_acceptance_rate_ci95": rate.to_dict()["ci95"],
            "mean_acceptance_length": total.mean_acceptance_length(),
            "mean_acceptance_length_ci95": length.to_dict()["ci95"],
            "acceptance_per_position": total.acceptance_per_position(),
            "conditional_acceptance": total.conditional_acceptance(),
            "counts": total.to_dict() | dict.fromkeys(unknown),
        }


def _completed(where: str, entry: Any) -> dict[str, Any]:
    """Check one prompt's counts and complete them; counts that do not follow from the given ones become None."""
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: expected a dictionary of counts (tokens: config 'tokens'), found {entry!r:.60}")
    if unknown := [name for name in entry if name not in NAMES]:
        raise InputError(f"{where}: expected the names {', '.join(NAMES)}, found {unknown[0]!r}")
    if missing := [name for name in REQUIRED if entry.get(name) is None]:
        raise InputError(f"{where}: expected {missing[0]}, found none")
    counts: dict[str, Any] = {name: entry.get(name) for name in NAMES}
    drafts, drafted, accepted, per_pos = (counts[name] for name in REQUIRED)
    if sum(per_pos) != accepted or accepted > drafted:
        expected = f"the sum over positions, {sum(per_pos)}, and at most num_draft_tokens, {drafted}"
        raise InputError(f"{where}.num_accepted_tokens: expected {expected}, found {accepted}")
    if counts["num_emitted_tokens"] is None:
        counts["num_emitted_tokens"] = accepted + drafts
    elif not accepted <= counts["num_emitted_tokens"] <= accepted + drafts:
        expected = f"the {accepted} accepted and at most one more for each of {drafts} drafts"
        raise InputError(f"{where}.num_emitted_tokens: expected {expected}, found {counts['num_emitted_tokens']}")
    # Where every round drafted every position, the rest follows from vLLM's four counts.
    every = [drafts] * len(per_pos)
    if counts["num_draft_tokens_per_pos"] is None and drafted == sum(every):
        counts["num_draft_tokens_per_pos"] = every
    if counts["num_reached_per_pos"] is None and counts["num_draft_tokens_per_pos"] == every:
        counts["num_reached_per_pos"] = [drafts, *per_pos][: len(per_pos)]
    for name in ("num_draft_tokens_per_pos", "num_reached_per_pos"):
        values = counts[name]
        if values is not None and (len(values) != len(per_pos) or any(map(lt, values, per_pos))):
            raise InputError(f"{where}.{name}: expected at least {per_pos}, the accepted ones, found {values}")
    return counts


def _without(unknown: Sequence[str], counts: Mapping[str, Any]) -> Counts:
    """Return one prompt's counts, with zeros for those that some prompt lacks, so that their ratios are None."""
    return Counts.from_dict(dict(counts) | dict.fromkeys(unknown, [0] * len(counts["num_accepted_tokens_per_pos"])))


def _count_rounds(where: str, drafted: Sequence[list[int]], emitted: Sequence[list[int]]) -> Counts:
    """Count the rounds of one prompt; tokens after the text's end count neither as drafted nor as accepted."""
    if len(drafted) != len(emitted):
        raise InputError(f"{where}: expected {len(drafted)} rounds as in predictions, found {len(emitted)}")
    counts = Counts()
    for i, (draft, tokens) in enumerate(zip(drafted, emitted, strict=True)):
        agree = [a == b for a, b in zip(draft, tokens, strict=False)]
        accepted = [*agree, False].index(False)
        # Under the exact rule a correction differs from the token that it replaces, so agreeing tokens were accepted.
        ends = len(tokens) == accepted > 0 and i == len(drafted) - 1
        if not ends and len(tokens) != accepted + 1:
            expected = f"the {accepted} accepted tokens and one more, which only the last round may lack"
            raise InputError(f"{where}[{i}]: expected {expected}, found {len(tokens)} tokens")
        counts += Counts.of_round(len(draft), accepted, len(tokens))
    return counts
