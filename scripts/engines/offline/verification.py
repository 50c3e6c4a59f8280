"""Verification of an export in an engine: its texts must equal plain decoding and ours, and its counts those of replay.

All runs are at T=0 in float32. The engine ends before the target is loaded here, since a device holds only one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode import Proposer
from draftsmith.decode.measurement.certificate import certify_greedy
from draftsmith.decode.measurement.distribution_test import plain_texts, speculative_texts
from draftsmith.decode.measurement.exactness import GREEDY
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.measurement.server_counts import ServerCounts, pooled, vllm_counts
from draftsmith.decode.progress import phase
from draftsmith.scripts.engines.offline.jobs import Answer, EngineFailure, EngineRun, Job
from draftsmith.train.kinds.export import Served

BATCH = 8
"""Prompts that vLLM and this decoder decode together."""
NEAR = 0.05
"""The share by which accepted tokens may depart where drafters read features of another arithmetic, or one more."""


@dataclass(frozen=True)
class Engine:
    """An engine that decodes jobs."""

    name: str
    run: Callable[[Sequence[Job]], EngineRun]
    batch: int = BATCH
    """Prompts decoded together."""
    to_the_limit: bool = False
    """Whether drafts end with the text's most tokens; vLLM drafts and counts past them."""
    tie: float | None = None
    """The margin of two logits that its texts may turn, where it computes in another arithmetic than float32."""


def room(served: Sequence[Served], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Return the positions that vLLM needs, drafts past the last token included: at its limit it drafts less."""
    return max(map(len, prompts)) + max_new_tokens + 2 * max(form.draft_length for form in served) + 2


def verify(
    engine: Engine,
    target: str,
    served: Sequence[Served],
    prompts: Sequence[Sequence[int]],
    load: Callable[[], tuple[PreTrainedModel, Proposer]],
    max_new_tokens: int = 64,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> list[str]:
    """Decode prompts (token ids) in an engine, plainly and with each form of the drafter, and compare with ours.

    `served` holds one or several configs of one drafter, with one γ. `load` returns the target in float32 and the
    drafter; it is called after the engine has ended. `overrides` are added to the target's config in vLLM. Return a
    line for each comparison. Raise EngineFailure if the engine fails, writes another text, or counts differently.
    """
    gamma = max(form.draft_length for form in served)
    common: dict[str, Any] = {"prompts": prompts, "max_tokens": max_new_tokens}
    common["max_model_len"] = room(served, prompts, max_new_tokens)
    common |= {"max_num_seqs": engine.batch, "trust_remote_code": trust_remote_code, "overrides": overrides or {}}
    jobs = [Job(target, speculative=None, **common)]
    jobs += [Job(form.target or target, speculative=dict(form.speculative), **common) for form in served]
    with phase(f"{engine.name} decodes {len(prompts)} prompts, plainly and with the drafter"):
        run = engine.run(jobs)
    name, (plain, *answers) = f"{engine.name} {run.version}", run.answers
    if isinstance(plain, EngineFailure):
        raise EngineFailure(f"verify: expected {name} to decode {target} without a drafter, found: {plain}")
    model, proposer = load()
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end of text, no warping of logits
    ids = [torch.tensor(ids, device=model.device) for ids in prompts]
    checks = Checks(model, proposer, ids, max_new_tokens, engine)
    precision = "float32" if engine.tie is None else "products of rounded numbers"
    lines = [f"{name} on {run.device}, T=0, {precision}: {len(prompts)} prompts, {max_new_tokens} tokens each"]
    # llama.cpp ends texts at their end, vLLM runs on.
    ours = [text[: len(other)] for text, other in zip(checks.plain, plain.token_ids, strict=True)]
    without = f"{engine.name} without a drafter"
    lines.append(checks.same(without, "draftsmith's plain text", ours, plain.token_ids, engine.tie))
    lines.append(checks.decoded_here(gamma))
    for form, answer in zip(served, answers, strict=True):
        if isinstance(answer, EngineFailure):
            raise EngineFailure(f"verify: expected {name} to decode with {form.name}, found: {answer}")
        with_it = f"{engine.name} with {form.name}"
        lines.append(checks.same(with_it, "its text without", plain.token_ids, answer.token_ids, engine.tie))
        lines.append(checks.counted(form, answer))
    lines.append("text at T > 0 is not compared here: `draftsmith certify` tests a server's")
    return lines


class Checks:
    """Comparisons on a set of prompts; each returns a line, or raises an `EngineFailure`.

    The target is in float32, and its generation config neither ends texts nor warps logits. The prompts are (T,) int64
    on its device, and the proposer drafts chains.
    """

    def __init__(self, target: PreTrainedModel, proposer: Proposer, prompts: list[Tensor], tokens: int, engine: Engine):
        """Decode the prompts plainly, to `tokens` tokens each."""
        self.engine, self.tokens = engine, tokens
        self.target, self.proposer, self.prompts = target, proposer, prompts
        self.plain = self._texts(plain_texts(target, prompts, BATCH, max_new_tokens=tokens))

    def same(
        self,
        name: str,
        other: str,
        expected: Sequence[Sequence[int]],
        actual: Sequence[Sequence[int]],
        tie: float | None = None,
    ) -> str:
        """Compare texts token for token; they may differ after a tie, which is as in float32 if `tie` is None."""
        certificate = certify_greedy(self.target, expected, actual, self.prompts, tie=tie)
        if not certificate.passed:
            raise EngineFailure(f"verify: expected {name} to write {other}, found {certificate.reason}")
        line = f"{name}: {certificate.prompts_identical} of {len(self.prompts)} texts are {other}"
        return line if certificate.reason is None else f"{line}; {certificate.reason}"

    def decoded_here(self, draft_length: int) -> str:
        """Compare this decoder's texts with and without the drafter."""
        options = {"draft_length": draft_length, "max_new_tokens": self.tokens}
        texts = speculative_texts(self.target, self.proposer, self.prompts, BATCH, **options)
        return self.same("draftsmith with the drafter", "its text without", self.plain, self._texts(texts))

    def counted(self, served: Served, answer: Answer) -> str:
        """Compare the engine's counts with those that replay on its texts predicts."""
        expected, counts = self.expected_counts(answer.token_ids, served.draft_length), answer.counters
        line = f"{served.name}, γ = {served.draft_length}: {_words(counts)}"
        if not expected.same_as(counts):
            departure = abs(counts.num_accepted_tokens - expected.num_accepted_tokens)
            mtp = served.speculative.get("method") == "draft-mtp"  # llama.cpp's layers begin a token earlier
            if (mtp or self.engine.tie is not None) and departure <= NEAR * expected.num_accepted_tokens:
                cause = "the state before a text's first token turns" if mtp else "features of rounded products turn"
                return f"{line}; replay says {_words(expected)}: {cause} some drafts"
            found = f"{_words(expected)}, found {_words(counts)}"
            raise EngineFailure(f"verify: expected {self.engine.name} with {served.name} to count {found}")
        return f"{line}, as replay says that {self.engine.name} counts"

    def expected_counts(self, texts: Sequence[Sequence[int]], draft_length: int) -> ServerCounts:
        """Return the engine's counts for writing texts, by replay on them and on the γ tokens after them."""
        limit = self.tokens if self.engine.to_the_limit else None
        # vLLM's last round drafts past the text's end, and those tokens count as drafted.
        written = [torch.cat([p, p.new_tensor(list(t))]) for p, t in zip(self.prompts, texts, strict=True)]
        longer = plain_texts(self.target, written, BATCH, max_new_tokens=draft_length)
        lengths = [len(prompt) for prompt in self.prompts]
        options: dict[str, Any] = {"rounds_of": draft_length, "allow_biased": self.engine.tie is not None}
        replay = replay_drafters(self.target, {"": self.proposer}, longer, lengths, [draft_length], GREEDY, **options)
        counts = []
        for text, replayed in zip(texts, replay[""].texts, strict=True):
            assert replayed.rounds is not None  # chains at T=0 always have rounds
            counts.append(vllm_counts(replayed.rounds, len(text), draft_length, limit))
        return pooled(counts)

    def _texts(self, sequences: Sequence[Tensor]) -> list[list[int]]:
        return [text[len(prompt) :].tolist() for text, prompt in zip(sequences, self.prompts, strict=True)]


def _words(counts: ServerCounts) -> str:
    accepted, drafted = counts.num_accepted_tokens, counts.num_draft_tokens
    per_pos = ", ".join(f"{number:.0f}" for number in counts.num_accepted_tokens_per_pos)
    return f"{counts.num_drafts:.0f} drafts, {accepted:.0f} of {drafted:.0f} tokens accepted [{per_pos}]"
