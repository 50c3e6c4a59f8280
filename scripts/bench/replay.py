"""Replay against decoding: the same counts at T=0, the same τ in law at T=1, its variance, and the time of each.

    python -m draftsmith.scripts.bench.replay --output runs/replay-bench/figures.json

At T=0 every prompt is decoded at every draft length, and each integer that the decoder counted on a text must be the
one that replay counts on it. At T=1 decoder and replay see texts of their own from the same prompts; their rounds are
compared, paired over prompts, and the variances of their rounds, which draws of one prompt differ by. The decoder's
texts are replayed too, which leaves the decoder's coins alone as noise; a greedy draft throws none, and there the
rounds of each text must be equal.
Parts that `--output` holds already are not run again.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from draftsmith.decode import Counts, DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.measurement.replay import replay_acceptance
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.tree import Tree
from draftsmith.medusa.heads import MedusaHeads
from draftsmith.medusa.proposer import MedusaProposer
from draftsmith.medusa.tree_search import reference_tree
from draftsmith.scripts.bench.common import PairConfig, load_pair, timed
from draftsmith.train.cli import numbers, parse_config, run
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment, write_json

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass
class BenchReplayConfig(PairConfig):
    """Compare replay with decoding, count for count at T=0 and in law at T=1."""

    limit: int = 128
    """Prompts."""
    max_new_tokens: int = 48
    """Tokens of a completion; end-of-sequence tokens are passed over."""
    longest: int = 16
    """The greatest draft length at T=0; all from 1 on are decoded."""
    sampled_lengths: Any = "1,4,8"
    """Draft lengths decoded at T=1."""
    draws: int = 2
    """Texts of each prompt at T=1."""
    batch_size: int = 16
    """Rows decoded together."""
    medusa: str | None = None
    """A directory of heads, to be compared as a chain and as Medusa's reference tree at T=0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("longest", "batch_size")
        self.sampled_lengths = numbers(self.sampled_lengths, int, "sampled_lengths")
        if min(self.sampled_lengths, default=0) < 1:
            raise InputError(f"sampled_lengths: expected draft lengths of at least 1, found {self.sampled_lengths}")
        if self.draws < 2:
            raise InputError(f"draws: expected at least 2, of which a variance is had, found {self.draws}")


@dataclass
class Decoded:
    """What a decoder made of all prompts."""

    seconds: float
    texts: list[Tensor]
    """Prompt and text of each, (T,)."""
    counts: list[Counts]
    """Of each; empty of plain decoding."""


@dataclass(frozen=True)
class Decoder:
    """A target and its prompts, decoded in the same batches by every method."""

    target: PreTrainedModel
    prompts: list[Tensor]
    config: BenchReplayConfig

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [ids.shape[1] for ids in self.prompts]

    def plain(self, seed: int = 0, **sampling: Any) -> list[Tensor]:
        """Return the texts of plain decoding."""
        return self._decoded(partial(autoregressive_generate, self.target), seed, sampling).texts

    def speculative(self, proposer: Proposer, draft_length: int, seed: int = 0, **sampling: Any) -> Decoded:
        """Decode every prompt at one draft length."""

        def decode(ids: Tensor, mask: Tensor, **options: Any) -> DecodeOutput:
            return speculative_generate(self.target, proposer, ids, mask, draft_length, **options)

        return self._decoded(decode, seed, sampling)

    def _decoded(self, decode: Callable[..., DecodeOutput], seed: int, sampling: dict[str, Any]) -> Decoded:
        options = {"max_new_tokens": self.config.max_new_tokens, **sampling}
        found = Decoded(0.0, [], [])
        for first in range(0, len(self.prompts), self.config.batch_size):
            rows = self.prompts[first : first + self.config.batch_size]
            width = max(ids.shape[1] for ids in rows)
            ids = torch.cat([torch.nn.functional.pad(own, (width - own.shape[1], 0)) for own in rows])
            mask = torch.cat([torch.nn.functional.pad(torch.ones_like(o), (width - o.shape[1], 0)) for o in rows])
            # Row i of a batch draws with seed + i: no row of a pass draws as another does.
            seconds, output = timed(lambda ids=ids, mask=mask, s=seed + first: decode(ids, mask, seed=s, **options))  # type: ignore[misc]
            found.seconds += seconds
            found.texts += [text[width - own.shape[1] :] for text, own in zip(output.sequences, rows, strict=True)]
            found.counts += output.row_counts
        return found


def bench(config: BenchReplayConfig, console: Console) -> dict[str, Any]:
    """Run what is missing, print the tables and return the figures."""
    if config.threads:
        torch.set_num_threads(config.threads)
    target, draft, prompts = load_pair(config, load_tokenizer(config.target, field="target"))
    decoder = Decoder(target, prompts, config)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "greedy: draft": lambda: greedy_part(decoder, DraftModelProposer(draft), range(1, config.longest + 1))
    }
    if config.medusa is not None:
        heads: Any = MedusaHeads.from_pretrained(config.medusa, dtype=target.dtype)
        heads.to(target.device)
        count = heads.config.num_heads
        for name, tree in (("chain", Tree.chain(count)), ("tree", reference_tree(count))):
            parts[f"greedy: medusa {name}"] = lambda tree=tree: greedy_part(  # type: ignore[misc]
                decoder, MedusaProposer(heads, tree), range(1, count + 1)
            )
    for name, greedy in (("probabilistic", False), ("greedy draft", True)):
        parts[f"sampled: {name}"] = lambda greedy=greedy: sampled_part(  # type: ignore[misc]
            decoder, DraftModelProposer(draft, greedy=greedy)
        )
    figures = _kept(config) | {"environment": environment(target.device, config.dtype), "config": vars(config)}
    figures["prompts"] = len(prompts)
    for name, part in parts.items():
        if name not in figures["parts"]:
            console.print(name, highlight=False)
            figures["parts"][name] = part()
            if config.output:
                write_json(Path(config.output), figures)
    _print(figures, console)
    return figures


def _kept(config: BenchReplayConfig) -> dict[str, Any]:
    path = Path(config.output) if config.output else None
    if path is None or not path.is_file():
        return {"parts": {}}
    found = json.loads(path.read_text(encoding="utf-8"))
    if any(found["config"].get(name) != value for name, value in vars(config).items() if name != "output"):
        raise InputError(
            f"output: expected figures of this configuration, found another's in {path}: take another file"
        )
    return {"parts": found["parts"]}


def greedy_part(decoder: Decoder, proposer: Proposer, draft_lengths: Sequence[int]) -> dict[str, Any]:
    """Compare every integer of every text at T=0, and the seconds of replay with those of decoding."""
    texts = decoder.plain(**GREEDY)

    def replayed() -> Any:
        return replay_acceptance(
            decoder.target, proposer, texts, decoder.prompt_lengths, draft_lengths, temperature=0
        ).texts

    found = replayed()  # warms up, as plain decoding did for the decoder
    by_length, turns = {}, []
    for k in tqdm(draft_lengths, desc="decode", unit="draft length"):
        # In turns, for a busy machine to slow both alike.
        turns.append(timed(replayed)[0])
        out = decoder.speculative(proposer, k, **GREEDY)
        pairs = [(counts.to_dict(), own.counts[k]) for counts, own in zip(out.counts, found, strict=True)]
        compared = [
            (expected, actual)
            for counts, own in pairs
            for name, value in counts.items()
            for expected, actual in _integers(value, getattr(own, name))
        ]
        by_length[str(k)] = {
            "decode_seconds": out.seconds,
            "texts_identical": sum(map(torch.equal, out.texts, texts)),
            "integers": len(compared),
            "integers_equal": sum(expected == actual for expected, actual in compared),
            "mean_acceptance_length": sum(out.counts, Counts()).mean_acceptance_length(),
        }
    seconds = sum(turns) / len(turns)
    decode_seconds = sum(own["decode_seconds"] for own in by_length.values())
    return {
        "texts": len(texts),
        "replay_seconds": seconds,
        "decode_seconds": decode_seconds,
        "times_faster": decode_seconds / seconds,
        "integers": sum(own["integers"] for own in by_length.values()),
        "integers_equal": sum(own["integers_equal"] for own in by_length.values()),
        "draft_lengths": by_length,
    }


def _integers(expected: Any, actual: Any) -> list[tuple[Any, Any]]:
    """Pair a count of the decoder with replay's; of positions, their number and each."""
    if not isinstance(expected, list):
        return [(expected, actual)]
    return [(len(expected), len(actual)), *zip(expected, actual, strict=False)]


def sampled_part(decoder: Decoder, proposer: Proposer) -> dict[str, Any]:
    """Compare τ of decoder and replay at T=1, and the variance of their rounds among draws of one prompt."""
    config, count = decoder.config, len(decoder.prompts)
    draws, tokens = config.draws, count * config.draws * config.max_new_tokens

    def replayed(texts: list[Tensor], draft_lengths: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the expected rounds of each draw and prompt, by draft length."""
        lengths = decoder.prompt_lengths * draws
        found = replay_acceptance(decoder.target, proposer, texts, lengths, draft_lengths, SAMPLED["temperature"])
        rounds = {k: [text.counts[k].num_drafts for text in found.texts] for k in draft_lengths}
        return {k: np.array(own).reshape(draws, count) for k, own in rounds.items()}

    plain = [text for i in range(draws) for text in decoder.plain(seed=i * count, **SAMPLED)]
    of_plain = replayed(plain, config.sampled_lengths)
    by_length = {}
    for place, k in enumerate(tqdm(config.sampled_lengths, desc="decode", unit="draft length"), start=1):
        passes = [decoder.speculative(proposer, k, seed=(place * draws + i) * count, **SAMPLED) for i in range(draws)]
        decoded = np.array([own.num_drafts for out in passes for own in out.counts]).reshape(draws, count)
        own = replayed([text for out in passes for text in out.texts], [k])[k]
        variances = [float(rounds.var(0, ddof=1).mean()) for rounds in (decoded, of_plain[k])]
        # Texts have one length, so that τ is a matter of their rounds alone.
        by_length[str(k)] = {
            "decoded_mean_acceptance_length": tokens / float(decoded.sum()),
            "replayed_mean_acceptance_length": tokens / float(of_plain[k].sum()),
            "z": _z((decoded - of_plain[k]).mean(0)),
            "own_texts_mean_acceptance_length": tokens / float(own.sum()),
            "own_texts_z": _z((decoded - own).mean(0)),
            "own_texts_rounds_equal": int((np.abs(decoded - own) < 1e-6).sum()),
            "decoded_variance": variances[0],
            "replayed_variance": variances[1],
            "variance_ratio": variances[0] / variances[1],
        }
    return {"texts": len(plain), "draft_lengths": by_length}


def _z(differences: np.ndarray) -> float:
    """Return a mean over prompts in its standard errors; 0 where nothing differs."""
    error = differences.std(ddof=1) / len(differences) ** 0.5
    return float(differences.mean() / error) if error > 1e-9 else 0.0


def _print(figures: dict[str, Any], console: Console) -> None:
    where = figures["environment"]
    console.print(f"{where['device']}, {where['threads']} threads, {where['dtype']}", highlight=False)
    table = Table("T=0", "texts", "γ", "integers equal", "texts identical", "replay", "decoding", "ratio", box=None)
    for name, part in figures["parts"].items():
        if not name.startswith("greedy:"):
            continue
        own = part["draft_lengths"].values()
        table.add_row(
            name.partition(": ")[2],
            str(part["texts"]),
            f"1…{len(own)}",
            f"{part['integers_equal']} of {part['integers']}",
            f"{sum(o['texts_identical'] for o in own)} of {len(own) * part['texts']}",
            f"{part['replay_seconds']:.2f} s",
            f"{part['decode_seconds']:.1f} s",
            f"{part['times_faster']:.0f}×",
        )
    console.print(table)
    # Var: of the decoder's rounds over that of replay's, among draws of one prompt.
    table = Table("T=1", "γ", "τ decoded", "replayed", "z", "own texts", "z", "equal", "Var", box=None)
    for name, part in figures["parts"].items():
        if not name.startswith("sampled:"):
            continue
        for k, own in part["draft_lengths"].items():
            table.add_row(
                name.partition(": ")[2],
                k,
                f"{own['decoded_mean_acceptance_length']:.3f}",
                f"{own['replayed_mean_acceptance_length']:.3f}",
                f"{own['z']:+.2f}",
                f"{own['own_texts_mean_acceptance_length']:.3f}",
                f"{own['own_texts_z']:+.2f}",
                f"{own['own_texts_rounds_equal']} of {part['texts']}",
                f"{own['variance_ratio']:.2f}×",
            )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    bench(parse_config(BenchReplayConfig, argv, prog="python -m draftsmith.scripts.bench.replay"), Console())
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
