"""Replayed acceptance of candidates and measured costs of rounds, which give the speed-up of every way to draft."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from typing_extensions import TypedDict

from draftsmith.decode import HybridProposer, Proposer, Switch
from draftsmith.decode.measurement.costs import BLOCKS, CostTable, ValidTable, measure_costs
from draftsmith.decode.planning.costs import text_seconds
from draftsmith.decode.validation import Amount, Count
from draftsmith.medusa.checkpoint_files import read_config
from draftsmith.scripts.choose.config import COPIES, LLAMA_CPP, ChooseConfig
from draftsmith.scripts.engines.offline.gguf_files import TYPES, served_at
from draftsmith.scripts.engines.offline.llama_costs import LlamaCosts
from draftsmith.scripts.engines.offline.llama_cpp import LlamaCpp, cuts_of
from draftsmith.scripts.kinds import kind_of
from draftsmith.scripts.pair import load_chains, load_decoding, named_specs, replay_completions
from draftsmith.train.data.generate import load_completions
from draftsmith.train.kinds.drafter import Drafter
from draftsmith.train.kinds.export import Served
from draftsmith.train.models import load_config, load_tokenizer
from draftsmith.train.provenance import environment

ALONE = "alone"
NEVER = 2**40  # a shortest match, in tokens, that no copy reaches
LAST_LENGTHS = (1, 2, 4)  # draft lengths tried for the trained drafter in a hybrid, with copies of any γ

Size = Annotated[int, Field(ge=1, le=2**31)]


@dataclass(frozen=True, order=True)
class Way:
    """A way to draft with a candidate: alone, or where a hybrid has no copy."""

    draft_length: int  # γ; in a hybrid, of the copies
    last: int | None = None  # the candidate's longest draft in a hybrid; None: it drafts alone

    @property
    def drafters(self) -> str:
        """The key of its replay."""
        return ALONE if self.last is None else f"last={self.last}"

    def lengths(self) -> list[int]:
        """Return γ of each drafter, in drafting order."""
        return [self.draft_length] if self.last is None else [self.draft_length, self.last]


@dataclass(frozen=True)
class ReplayedRounds:
    """The rounds of a candidate on the held-out texts of one temperature."""

    tokens: list[Count]  # of each text
    sizes: dict[str, dict[Size, list[list[list[Amount]]]]]
    """`Way.drafters` → γ → for each text its rounds by drafter and number of drafted tokens: `TextReplay.sizes`."""
    copies: str = COPIES[0]  # the first member of its hybrids

    def ways(self) -> list[Way]:
        """Return all ways that were replayed."""
        ways = []
        for drafters, by_length in self.sizes.items():
            last = None if drafters == ALONE else int(drafters.partition("=")[2])
            ways += [Way(k, last) for k in by_length]
        return sorted(ways, key=lambda way: (way.last or 0, way.draft_length))

    def rounds(self, way: Way) -> list[float]:
        """Return the number of rounds of each text."""
        return [float(np.sum(sizes)) for sizes in self._of(way)]

    def seconds(self, way: Way, candidate: str, table: CostTable, rows: int) -> list[float]:
        """Return the predicted seconds of each text, without its prompt."""
        drafters = [candidate] if way.last is None else [self.copies, candidate]
        costs = [table.at(name, rows) for name in drafters]
        return text_seconds(costs, [np.array(sizes) for sizes in self._of(way)], way.lengths(), rows)

    def plain_seconds(self, candidate: str, table: CostTable, rows: int) -> list[float]:
        """Return the predicted seconds of each text in plain decoding, without its prompt."""
        costs = table.at(candidate, rows)
        return [count * (costs.target[1] + costs.plain_overhead) for count in self.tokens]

    def _of(self, way: Way) -> list[list[list[float]]]:
        return self.sizes[way.drafters][way.draft_length]


def replay_candidates(
    config: ChooseConfig, drafters: Mapping[str, str], heldout: Mapping[float, str]
) -> dict[str, dict[str, ReplayedRounds]]:
    """Replay drafters, each alone and in a hybrid after copies, on the target's texts.

    `drafters` has directories, or kinds that need none, by name; `heldout` has directories of completions by
    temperature. Returns the rounds by name and temperature, the latter formatted as in JSON.
    """
    code, copying = config.trust_remote_code, config.copies[0]
    named = {copying: copying} | dict(drafters)
    greedy = config.server == LLAMA_CPP  # it drafts the likeliest token
    pair, chains = load_chains(config.target, named, max(config.draft_length), greedy=greedy, trust_remote_code=code)
    copies = pair.proposers[copying]
    candidates = [drafter for drafter in pair.drafters if drafter.name in drafters]
    ways: dict[tuple[str, str], Proposer] = {}
    lengths_of: dict[str, list[int]] = {}
    for drafter in candidates:
        chain, most = chains[drafter.name]
        lengths_of[drafter.name] = _lengths(config, drafter, chain, most)
        if drafter.name in config.copies or config.one_way:
            ways[drafter.name, ALONE] = chain
            continue
        # All hybrids share one replay of their members; one that never copies is the candidate alone.
        hybrid = HybridProposer([copies, chain])
        ways[drafter.name, ALONE] = hybrid.with_switch(Switch(NEVER))
        for last in (last for last in LAST_LENGTHS if last <= most):
            ways[drafter.name, Way(1, last).drafters] = hybrid.with_switch(Switch(), last)
    draft_lengths = sorted({*config.draft_length, *(k for lengths in lengths_of.values() for k in lengths)})
    results: dict[str, dict[str, ReplayedRounds]] = {drafter.name: {} for drafter in candidates}
    for temperature in config.temperature:
        samples = list(load_completions(heldout[temperature]).sort("id"))
        sampler = config.text.at(temperature).sampler()
        replays = replay_completions(
            pair, ways, samples, draft_lengths, sampler, config.max_new_tokens, with_sizes=True
        )
        tokens = [len(sample["input_ids"]) - sample["prompt_length"] for sample in samples]
        for (name, drafters_of), replay in replays.items():
            replayed_texts = results[name].setdefault(f"{temperature:g}", ReplayedRounds(tokens, {}, copying))
            first = 1 if drafters_of == ALONE and isinstance(ways[name, drafters_of], HybridProposer) else 0
            replayed_texts.sizes[drafters_of] = {
                k: [text.sizes[k][first:].tolist() for text in replay.texts]
                for k in (lengths_of[name] if drafters_of == ALONE else config.draft_length)
            }
    return results


def _lengths(config: ChooseConfig, drafter: Drafter, chain: Proposer, most: int) -> list[int]:
    """Return the values of γ to try for a drafter alone."""
    if config.server is not None and drafter.family.whole_blocks and chain.longest is not None:
        return [chain.longest]
    return [k for k in config.draft_length if k <= most] or [most]


class MeasuredCosts(TypedDict):
    """Costs of rounds on a machine, a table for each temperature."""

    environment: dict[str, Any]
    compiled: bool
    tables: list[ValidTable]


def measured_costs(
    config: ChooseConfig, drafters: Mapping[str, str], heldout: Mapping[float, str], compiled: bool | None,
    seconds: float,
) -> MeasuredCosts:  # fmt: skip
    """Measure the costs of rounds, all drafters in turns, so that drift of the machine's speed affects them alike.

    `drafters` and `heldout` are as for `replay_candidates`. The timing takes about `seconds`, after compiling.
    """
    samples = [sample for path in heldout.values() for sample in load_completions(path).sort("id")]
    if config.server == LLAMA_CPP:
        return _in_llama_cpp(config, drafters, samples)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    threads = torch.get_num_threads()
    try:
        pair, compiles = load_decoding(
            config.target, tokenizer, named_specs(drafters), config.dtype, config.threads, compiled,
            config.trust_remote_code,
        )  # fmt: skip
        chains = {drafter.name: drafter.family.chain(drafter, max(config.draft_length)) for drafter in pair.drafters}
        prompt = max(1, round(float(np.mean([sample["prompt_length"] for sample in samples]))))
        # The middle γ, because a round's other costs grow with γ, and mostly short drafts are chosen.
        middle = config.draft_length[len(config.draft_length) // 2]
        whole = float(np.mean([len(sample["input_ids"]) for sample in samples]))
        longest = 1 + max(k for drafter in pair.drafters for k in _lengths(config, drafter, *chains[drafter.name]))
        tables = measure_costs(
            pair.target,
            {name: chain for name, (chain, _) in chains.items()},
            {name: min(most, middle) for name, (_, most) in chains.items()},
            torch.tensor([token for sample in samples for token in sample["input_ids"]]),
            {temperature: config.text.at(temperature).sampler() for temperature in config.temperature},
            config.batch_size,
            max(2, round((prompt + whole) / 2)),
            prompt,
            # No block that no way to draft needs: each is compiled, which takes a minute for a large target.
            sorted({*(block for block in BLOCKS if block < longest), longest}),
            compiled=compiles,
            seconds=seconds,
        )
    finally:
        torch.set_num_threads(threads)
    return {
        "environment": environment(pair.target.device, pair.dtype) | {"threads": config.threads or threads},
        "compiled": compiles,
        "tables": tables,
    }


def _in_llama_cpp(
    config: ChooseConfig, drafters: Mapping[str, str], samples: Sequence[Mapping[str, Any]]
) -> MeasuredCosts:
    """Measure the costs of rounds by the clock of llama.cpp's server."""
    model = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    dtype = str(model.dtype or torch.float32).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    middle = [(len(sample["input_ids"]) + sample["prompt_length"]) / 2 for sample in samples]
    text = torch.tensor([token for sample in samples for token in sample["input_ids"]])
    names = (config.copies[0], *drafters)
    served: dict[str, Mapping[int, Served | None]] = {key: dict.fromkeys(config.draft_length) for key in names}
    with tempfile.TemporaryDirectory(prefix="draftsmith-costs-") as scratch:
        engine, files = LlamaCpp.found(), Path(scratch)
        target = engine.target_file(config.target, files / "target.gguf", TYPES[dtype])
        for name, path in drafters.items():
            if name in config.copies:
                continue
            kind, lengths = kind_of(path), {*config.draft_length, *LAST_LENGTHS}
            most = kind.most_drafted(read_config(Path(path))) or max(lengths)
            lengths = {min(k, most) for k in lengths}
            served[name] = served_at(path, kind, config.target, TYPES[dtype], files / name, sorted(lengths))
        costs = LlamaCosts(
            engine, target, text, round(float(np.mean(middle))), config.batch_size,
            config.temperature, config.max_new_tokens, config.threads, cuts_of(config.text),
        )  # fmt: skip
        found = environment(torch.device("cpu"), dtype) | {"threads": config.threads or os.cpu_count()}
        return {"environment": found, "compiled": False, "tables": costs.tables(served)}
