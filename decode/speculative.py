"""Speculative decoding: the round loop.

Under the exact rule the output is that of plain decoding of the target, token for token at T=0 and in distribution
otherwise, whatever the proposer drafts (Leviathan et al. 2023, appendix A.1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from draftsmith.decode.cache import CachedModel, check_model, padded
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import (
    DecodeOutput,
    Departure,
    Row,
    collect_output,
    decoded,
    generate_arguments,
    prepare_rows,
)
from draftsmith.decode.planner import FixedLength, Plan, as_plan
from draftsmith.decode.proposers.base import Outcome, Proposal, Proposer, Task
from draftsmith.decode.rules import NO_TOKEN, Rule, as_rule


@dataclass(frozen=True)
class Round:
    """What one round wrote: told to an observer as it happens."""

    row: int
    """The row's place in the batch."""
    tokens: list[int]
    """The emitted tokens, in order: first the accepted ones."""
    counts: Counts
    """Of this round alone."""
    bonus: bool
    """Whether the last token is a bonus, no draft having stood against it; else a correction."""
    done: bool
    """Whether the text ends here."""

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens."""
        return self.counts.num_accepted_tokens

    @property
    def drafted(self) -> int:
        """Depth of the draft."""
        return len(self.counts.num_draft_tokens_per_pos)

    @property
    def nodes(self) -> int:
        """Drafted tokens: as many as `drafted` in a chain, more in a tree."""
        return self.counts.num_draft_tokens


Observer = Callable[[Round], None]


def speculative_generate(
    target: PreTrainedModel,
    proposer: Proposer,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    draft_length: int | Plan | None = 4,
    rule: str | Rule = "exact",
    seed: int = 0,
    **generate_kwargs: Any,
) -> DecodeOutput:
    """Decode speculatively with the arguments of `target.generate`.

    Args:
        target: the model that decides what is written.
        proposer: what drafts.
        input_ids: prompts, (B, T) int64, left-padded where B > 1. Rows advance independently.
        attention_mask: (B, T), 0 on padding; all ones if None.
        draft_length: γ, depth of a draft; less where the length limit is near. None lets a `Plan` choose it each round
            from measured costs and acceptance; a `Plan` that you pass keeps what it learnt from call to call.
        rule: "exact", the lossless rule, or a lossy one: "typical", "threshold" or "cascade", or one of `decode.rules`
            with other levels.
        seed: seeds each row's draws: row i uses seed + i, so that it draws as it would alone.
        generate_kwargs: what `generate` takes (max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id,
            stop_strings, streamer, …); what is left out has the default of the target's `generation_config`, as in
            `generate` itself. And `compiled=True`, to run the models through `torch.compile` with static shapes; and
            `observer`, called with each `Round`.

    Returns:
        `sequences` (B, ≤ T + max_new_tokens), padded on the right where rows end early, and `counts`.

    Raises:
        InputError: γ < 1, an unknown rule, or a model that cannot be rolled back.
    """
    streamer = generate_kwargs.get("streamer")
    if streamer is not None:
        # `generate` gives it the prompt, and then hands callables no streamer.
        if len(input_ids) > 1:
            raise InputError(f"streamer: expected one prompt, found {len(input_ids)}")
        generate_kwargs["observer"] = _streaming(streamer, generate_kwargs.get("observer"))
    arguments = generate_arguments(target, input_ids, attention_mask, **generate_kwargs)
    arguments |= {"proposer": proposer, "draft_length": draft_length, "rule": as_rule(rule), "seed": seed}
    return decoded(target, speculative_decode, arguments)


def speculative_decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    proposer: Proposer,
    draft_length: int | Plan | None = 4,
    rule: str | Rule = "exact",
    compiled: bool = False,
    observer: Observer | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> DecodeOutput | Tensor:
    """The callable for the library: `target.generate(…, custom_generate=speculative_decode, proposer=…)`.

    `generate` prepares everything but `proposer`, `draft_length`, `rule`, `compiled`, `observer` and `seed` (None draws
    from the global generator). It hands callables neither a streamer, to which it gives the prompt alone, nor an
    assistant model: use `observer`, or `speculative_generate`, which serves the one and refuses the other. Logits
    processors must be functions of tokens and logits: they see contexts that are never written.

    Raises:
        InputError: as `speculative_generate`, or an input or option of `generate` that is not served.
    """
    check_model(model, "target")
    rule, plan = as_rule(rule), as_plan(draft_length)
    rows = prepare_rows(model, logits_processor, input_ids, model_kwargs, stopping_criteria, generation_config, seed)
    _write(model, proposer, list(rows), plan, rule, compiled, observer)
    return collect_output(rows, input_ids, generation_config, rule.lossy)


def _write(
    model: PreTrainedModel,
    proposer: Proposer,
    rows: list[Row],
    plan: Plan | FixedLength,
    rule: Rule,
    compiled: bool,
    observer: Observer | None,
) -> None:
    """Write texts to their ends, a round at a time (Leviathan et al. 2023, algorithm 1): draft, verify, accept, emit.

    p is the target's distribution and q the proposer's, both warped by the sampler.
    """
    max_length, vocab_size = max(len(row.text) for row in rows), model.config.get_text_config().vocab_size
    sampler, generators = rows[0].sampler, [row.generator for row in rows]
    samplers = [row.sampler for row in rows]
    task = Task(
        sampler, vocab_size, generators, max_length, plan.longest, not rule.lossy, compiled, target=model,
        row_samplers=() if all(other is sampler for other in samplers) else samplers,
    )  # fmt: skip
    largest = proposer.start(task)
    target = CachedModel(model, len(rows), max_length, 1 + largest, compiled, proposer.wants_hidden)
    plan.start(model, proposer, len(rows), max(row.length for row in rows), compiled)
    while True:
        # Draft γ tokens from q, but leave room for the target's own.
        drafts = plan.propose(model, proposer, [row.context for row in rows], [row.room - 1 for row in rows])
        # Verify: one forward of the target gives the logits of p after the text and after each drafted token.
        logits = _verify(target, rows, drafts, largest if compiled else max(len(draft.tokens) for draft in drafts))
        outcomes = []
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            # Accept the drafted tokens of a path while they pass, and take one more token from p or its residual.
            p_logits = logits[i, : 1 + len(draft.tokens)]
            contexts = [] if sampler.context_free else _contexts(row, draft)
            verdict = rule.verify(row.sampler, p_logits, contexts, draft, row.generator)
            if verdict.token == NO_TOKEN:
                raise row.not_finite(len(verdict.path))
            hidden = None if target.hidden is None else target.hidden[i, : len(p_logits)]
            outcomes.append(Outcome(verdict.path, p_logits, hidden))
            target.keep_path(i, row.length - 1, [node + 1 for node in verdict.path])
            # Emit them, up to the end of the text.
            accepted = draft.tokens[verdict.path].tolist() if verdict.path else []
            tokens = row.emit([*accepted, verdict.token])
            counts = Counts.of_round(draft.tree, len(accepted), len(tokens))
            row.rounds.append(counts)
            for distance, wrong in (verdict.departures or [])[: len(tokens)]:
                row.departure += Departure(distance, int(wrong), 1)
            plan.observe(counts.num_accepted_tokens, len(counts.num_draft_tokens_per_pos))
            if observer is not None:
                leaf = not draft.tree.children[verdict.path[-1] + 1 if verdict.path else 0]
                bonus = leaf and len(draft.tree) > 0 and len(tokens) > len(accepted)
                observer(Round(row.index, tokens, counts, bonus, row.done))
        left = [i for i, row in enumerate(rows) if not row.done]
        if not left:
            return
        proposer.commit(outcomes)
        if len(left) < len(rows):
            rows = [rows[i] for i in left]
            target.select(left)
            proposer.select(left)


def _verify(target: CachedModel, rows: list[Row], drafts: list[Proposal], width: int) -> Tensor:
    """Feed each row's last token, which was not fed yet, and its draft; return the logits, (B, 1 + width, V)."""
    chains = all(draft.tree.is_chain for draft in drafts)
    if target.is_empty:
        if len(rows) == 1 and chains and not target.compiled:
            # The prompt and the first draft in one forward.
            return target.prefill(torch.cat([rows[0].context, drafts[0].tokens])[None, :], keep=width + 1)
        target.prefill_texts([row.context for row in rows])
    blocks = padded([torch.cat([row.context[-1:], d.tokens]) for row, d in zip(rows, drafts, strict=True)], width + 1)
    starts = [row.length - 1 for row in rows]
    if chains:
        return target.feed(blocks, starts)
    visible = torch.eye(width + 1, dtype=torch.bool).repeat(len(rows), 1, 1)
    depths = torch.zeros(len(rows), width + 1, dtype=torch.long)
    for i, draft in enumerate(drafts):
        size = len(draft.tree) + 1
        visible[i, :size, :size] = draft.tree.visible
        depths[i, 1:size] = torch.tensor(draft.tree.depths)
    return target.feed(blocks, starts, visible=visible.to(blocks.device), depths=depths.to(blocks.device))


def _contexts(row: Row, draft: Proposal) -> list[Tensor]:
    """Return the tokens before each position of the block: the text, and the path of drafted tokens to it."""
    paths = [draft.tree.path(node) for node in range(-1, len(draft.tree))]
    return [torch.cat([row.context, draft.tokens[path]]) if path else row.context for path in paths]


def _streaming(streamer: Any, observer: Observer | None) -> Observer:
    """Let a `transformers` streamer have each round's tokens, in a burst."""

    def observe(round: Round) -> None:
        streamer.put(torch.tensor(round.tokens))
        if round.done:
            streamer.end()
        if observer is not None:
            observer(round)

    return observe
