"""Replay against decoding: the same counts at T=0, the same τ in law at T=1, its variance, and the time of each.

    python -m draftsmith.scripts.bench.replay --output runs/replay-bench/figures.json

At T=0 every prompt is decoded at every draft length, and each integer that the decoder counted on a text must be the
one that replay counts on it; making estimates of them, with intervals, is timed apart. At T=1 decoder and replay see
texts of their own from the same prompts; their rounds are compared, paired over prompts, and the variances of their
rounds, which draws of one prompt differ by. The decoder's texts are replayed too, which leaves the decoder's coins
alone as noise; a greedy draft throws none, and there the rounds of each text must be equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from draftsmith.decode import Counts, DraftModelProposer
from draftsmith.decode.clock import timed
from draftsmith.decode.errors import at_least, require, require_some
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.measurement.replay import Replay, replay_acceptance
from draftsmith.decode.proposers.base import Proposer
from draftsmith.scripts.bench.common import BenchmarkPair, DecodingConfig, main
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import left_padded
from draftsmith.train.cli import Ints, numbers
from draftsmith.train.provenance import environment

ESTIMATES = (
    "alpha", "mean_acceptance_length", "draft_acceptance_rate", "acceptance_per_position", "conditional_acceptance"
)  # fmt: skip
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass
class BenchReplayConfig(DecodingConfig):
    """Compare replay with decoding, count for count at T=0 and in law at T=1."""

    limit: int = 128
    """Prompts."""
    max_new_tokens: int = 48
    """Tokens of a completion; end-of-sequence tokens are passed over."""
    longest: int = 16
    """The greatest draft length at T=0; all from 1 on are decoded."""
    sampled_lengths: Ints = "1,4,8"  # type: ignore[assignment]
    """Draft lengths decoded at T=1."""
    draws: int = 2
    """Texts of each prompt at T=1."""
    batch_size: int = 16
    """Rows decoded together."""
    drafter: list[str] = field(default_factory=list)
    """Further drafters that are compared at T=0: `[NAME=]DIR_OR_KIND`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampled_lengths = numbers(self.sampled_lengths, int, "sampled_lengths")
        require_some(self, "sampled_lengths", "draft length")
        require(self, at_least(1), "sampled_lengths")
        require(self, at_least(2), "draws")  # a variance needs two


@dataclass
class DecodedPrompts:
    """All prompts, decoded."""

    seconds: float
    texts: list[Tensor]
    """Prompt and text of each, (T,)."""
    counts: list[Counts]
    """Of each."""


def _decoded(
    pair: BenchmarkPair, config: BenchReplayConfig, decode: Callable[..., DecodeOutput], seed: int = 0, **sampling: Any
) -> DecodedPrompts:
    """Decode every prompt, by every method in the same batches."""
    result = DecodedPrompts(0.0, [], [])
    for first in range(0, len(pair.prompts), config.batch_size):
        rows = pair.prompts[first : first + config.batch_size]
        ids, mask = left_padded([row[0].tolist() for row in rows], rows[0].device)
        # Row i of a batch draws with seed + i: no row of a pass draws as another does.
        seconds, output = timed(partial(decode, ids, mask, seed=seed + first, **sampling))
        result.seconds += seconds
        pairs = zip(output.sequences, rows, strict=True)
        result.texts += [text[ids.shape[1] - prompt.shape[1] :] for text, prompt in pairs]
        result.counts += output.row_counts
    return result


def bench(config: BenchReplayConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    pair = BenchmarkPair.load(config, drafter_specs(config.drafter))
    target, draft = pair.target, pair.draft
    greedy = {"draft": _greedy_part(pair, config, DraftModelProposer(draft), range(1, config.longest + 1))}
    for drafter in pair.others:
        longest = min(config.longest, drafter.proposer.longest or config.longest)
        greedy[drafter.name] = _greedy_part(pair, config, drafter.proposer, range(1, longest + 1))
    return {
        "environment": environment(target.device, pair.dtype),
        "prompts": len(pair.prompts),
        "greedy": greedy,
        "sampled": {
            name: _sampled_part(pair, config, DraftModelProposer(draft, greedy=argmax))
            for name, argmax in (("probabilistic", False), ("greedy draft", True))
        },
    }


def _greedy_part(
    pair: BenchmarkPair, config: BenchReplayConfig, proposer: Proposer, draft_lengths: Sequence[int]
) -> dict[str, Any]:
    """Compare every integer of every text at T=0, and the seconds of replay with those of decoding."""
    texts = _decoded(pair, config, pair.plain).texts
    lengths = [ids.shape[1] for ids in pair.prompts]
    replay = partial(replay_acceptance, pair.target, proposer, texts, lengths, draft_lengths, temperature=0)
    replayed = replay().texts  # warms up, as plain decoding did for the decoder
    by_length, seconds = {}, []
    for k in tqdm(draft_lengths, desc="decode", unit="draft length"):
        # In turns, for a busy machine to slow both alike.
        seconds.append(timed(replay)[0])
        decoded = _decoded(pair, config, partial(pair.speculative, proposer=proposer, draft_length=k))
        compared = [
            both
            for counts, text in zip(decoded.counts, replayed, strict=True)
            for name, value in counts.to_dict().items()
            for both in _integers(value, getattr(text.counts[k], name))
        ]
        by_length[str(k)] = {
            "decode_seconds": decoded.seconds,
            "texts_identical": sum(map(torch.equal, decoded.texts, texts)),
            "integers": len(compared),
            "integers_equal": sum(expected == actual for expected, actual in compared),
            "mean_acceptance_length": sum(decoded.counts, Counts()).mean_acceptance_length(),
        }

    def total(name: str) -> Any:
        return sum(figures[name] for figures in by_length.values())

    replay_seconds = sum(seconds) / len(seconds)
    interval_seconds, _ = timed(lambda: [getattr(Replay(replayed), name) for name in ESTIMATES])
    return {
        "texts": len(texts),
        "replay_seconds": replay_seconds,
        "interval_seconds": interval_seconds,
        "decode_seconds": total("decode_seconds"),
        "times_faster": total("decode_seconds") / replay_seconds,
        "integers": total("integers"),
        "integers_equal": total("integers_equal"),
        "draft_lengths": by_length,
    }


def _integers(expected: Any, actual: Any) -> list[tuple[Any, Any]]:
    """Pair a count of the decoder with replay's; of positions, their number and each."""
    if not isinstance(expected, list):
        return [(expected, actual)]
    return [(len(expected), len(actual)), *zip(expected, actual, strict=False)]


def _sampled_part(pair: BenchmarkPair, config: BenchReplayConfig, proposer: Proposer) -> dict[str, Any]:
    """Compare τ of decoder and replay at T=1, and the variance of their rounds among draws of one prompt."""
    count, draws = len(pair.prompts), config.draws
    tokens = count * draws * config.max_new_tokens

    def replayed_rounds(texts: list[Tensor], draft_lengths: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the expected rounds of each draw and prompt, by draft length."""
        lengths = [ids.shape[1] for ids in pair.prompts] * draws
        replay = replay_acceptance(pair.target, proposer, texts, lengths, draft_lengths, SAMPLED["temperature"])
        return {k: np.array(replay.tokens_and_rounds(k)[1]).reshape(draws, count) for k in draft_lengths}

    plain = [text for i in range(draws) for text in _decoded(pair, config, pair.plain, i * count, **SAMPLED).texts]
    replayed_by_length = replayed_rounds(plain, config.sampled_lengths)
    by_length = {}
    for place, k in enumerate(tqdm(config.sampled_lengths, desc="decode", unit="draft length"), start=1):
        decode = partial(pair.speculative, proposer=proposer, draft_length=k)
        seeds = [(place * draws + i) * count for i in range(draws)]
        passes = [_decoded(pair, config, decode, seed, **SAMPLED) for seed in seeds]
        decoded = np.array([[counts.num_drafts for counts in one.counts] for one in passes])
        replayed = replayed_by_length[k]
        of_same_texts = replayed_rounds([text for one in passes for text in one.texts], [k])[k]
        variances = [float(rounds.var(0, ddof=1).mean()) for rounds in (decoded, replayed)]
        # Texts have one length, so that τ is a matter of their rounds alone.
        by_length[str(k)] = {
            "decoded_mean_acceptance_length": tokens / float(decoded.sum()),
            "replayed_mean_acceptance_length": tokens / float(replayed.sum()),
            "z": _z((decoded - replayed).mean(0)),
            "own_texts_mean_acceptance_length": tokens / float(of_same_texts.sum()),
            "own_texts_z": _z((decoded - of_same_texts).mean(0)),
            "own_texts_rounds_equal": int((np.abs(decoded - of_same_texts) < 1e-6).sum()),
            "decoded_variance": variances[0],
            "replayed_variance": variances[1],
            "variance_ratio": variances[0] / variances[1] if variances[1] else None,
        }
    return {"texts": len(plain), "draft_lengths": by_length}


def _z(differences: np.ndarray) -> float:
    """Return a mean over prompts in its standard errors; 0 where nothing differs."""
    error = differences.std(ddof=1) / len(differences) ** 0.5
    return float(differences.mean() / error) if error > 1e-9 else 0.0


def shown(config: BenchReplayConfig, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the comparisons at T=0 over all draft lengths, and those at T=1 of each."""
    greedy = {
        name: {key: value for key, value in part.items() if key != "draft_lengths"}
        for name, part in figures["greedy"].items()
    }
    return {"T=0": greedy} | {f"T=1, {name}": part["draft_lengths"] for name, part in figures["sampled"].items()}


if __name__ == "__main__":
    main(BenchReplayConfig, bench, shown)
