"""Speculative decoding: the round loop.

Under the exact rule the law of the output is that of plain decoding of the target, token for token at T=0 and in
distribution otherwise, whatever the proposer drafts (Leviathan et al. 2023, appendix A.1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from draftsmith.decode.cache import CachedModel, check_model
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput, Departure, Row, decode_rows, padded, run_generate
from draftsmith.decode.planner import Plan, now
from draftsmith.decode.proposers.base import Outcome, Proposal, Proposer, Task
from draftsmith.decode.rules import Rule, as_rule
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import ROOT


@dataclass(frozen=True)
class Round:
    """What one round wrote: told to an observer as it happens."""

    row: int
    """The row's place in the batch."""
    tokens: list[int]
    """The emitted tokens, in order."""
    accepted: int
    """How many of them are accepted drafted ones, the first."""
    drafted: int
    """Depth of the draft."""
    nodes: int
    """Tokens drafted: as many as `drafted` in a chain, more in a tree."""
    bonus: bool
    """Whether the token after the accepted ones is a bonus, no draft having stood against it; else a correction."""
    done: bool
    """Whether the text ends here."""


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
        target: the model whose law the output has.
        proposer: what drafts.
        input_ids: prompts, (B, T) int64, left-padded where B > 1. Rows advance independently.
        attention_mask: (B, T), 0 on padding; all ones if None.
        draft_length: γ, depth of a draft; less where the length limit is near. None lets a `Plan` choose it each round
            from measured costs and acceptance; a `Plan` of one's own keeps what it learnt from call to call.
        rule: "exact", the lossless rule, or a lossy one: "typical", "threshold" or "cascade", or one of `decode.rules`
            with its own levels.
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
    return run_generate(
        target,
        speculative_decode,
        input_ids,
        attention_mask,
        proposer=proposer,
        draft_length=draft_length,
        rule=as_rule(rule),
        seed=seed,
        **generate_kwargs,
    )


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
    """The callable for the library's own door: `target.generate(…, custom_generate=speculative_decode, proposer=…)`.

    `generate` prepares everything but `proposer`, `draft_length`, `rule`, `compiled`, `observer` and `seed` (None draws
    from the global generator).
    """
    check_model(model, "target")
    chosen = as_rule(rule)
    if isinstance(draft_length, int) and draft_length < 1:
        raise InputError(f"draft_length: expected at least 1, found {draft_length}")
    length = Plan() if draft_length is None else draft_length

    def decode(rows: list[Row], sampler: Sampler) -> None:
        _decode(model, proposer, rows, length, sampler, chosen, compiled, observer)

    mask = model_kwargs.get("attention_mask")  # named in the signature, `generate` would pass it twice
    return decode_rows(
        decode, logits_processor, input_ids, mask, stopping_criteria, generation_config, seed, lossy=chosen.lossy
    )


def _decode(
    model: PreTrainedModel,
    proposer: Proposer,
    rows: list[Row],
    draft_length: int | Plan,
    sampler: Sampler,
    rule: Rule,
    compiled: bool,
    observer: Observer | None,
) -> None:
    """Decode rows until all have ended; p and q are the target's and the drafter's distributions."""
    max_length = max(row.limits.max_length for row in rows)
    vocab_size = model.config.get_text_config().vocab_size
    generators = [row.generator for row in rows]
    plan = draft_length if isinstance(draft_length, Plan) else None
    longest = draft_length if isinstance(draft_length, int) else draft_length.longest
    task = Task(sampler, vocab_size, generators, max_length, longest, not rule.lossy, compiled, target=model)
    largest = proposer.start(task)
    target = CachedModel(model, len(rows), max_length, 1 + largest, compiled, wants_hidden=proposer.wants_hidden)
    if plan is not None:
        plan.start(model, len(rows), max(row.length for row in rows), compiled)
    fed = False
    while rows:
        gamma = longest if plan is None else plan.draft_length()
        begun = 0.0 if plan is None else now(model)
        drafts = proposer.propose([row.context for row in rows], [min(gamma, row.room - 1) for row in rows])
        if plan is not None:
            plan.drafted(now(model) - begun, max(draft.tree.depth for draft in drafts))
        logits = _verify(target, rows, drafts, largest if compiled else max(len(draft.tokens) for draft in drafts), fed)
        fed = True
        outcomes, left = [], []
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            p_logits = logits[i, : len(draft.tokens) + 1]
            contexts = [] if sampler.context_free else _contexts(row, draft)
            verdict = rule.verify(sampler, p_logits, contexts, draft, row.generator)
            if verdict.path:
                target.keep_path(i, row.length - 1, [node + 1 for node in verdict.path])
            hidden = None if target.hidden is None else target.hidden[i, : len(p_logits)]
            outcomes.append(Outcome(verdict.path, p_logits, hidden))
            tokens = [*draft.tokens[verdict.path].tolist(), verdict.token] if verdict.path else [verdict.token]
            emitted, done = row.emit(tokens)
            # Where the text ends inside the draft, what was drafted after its end is no failure of the drafter.
            accepted = min(len(verdict.path), emitted)
            depth = draft.tree.depth if emitted > accepted else emitted
            nodes = sum(d <= depth for d in draft.tree.depths)
            row.rounds.append(Counts.of_round(depth, accepted, emitted, nodes=nodes))
            if plan is not None:
                plan.observe(accepted, depth)
            if verdict.departures is not None:
                for distance, wrong in verdict.departures[:emitted]:
                    row.departure += Departure(distance, int(wrong), 1)
            if observer is not None:
                last = verdict.path[-1] if verdict.path else ROOT
                bonus = emitted > accepted and not draft.tree.children[last + 1] and len(draft.tree) > 0
                observer(Round(row.index, tokens[:emitted], accepted, depth, nodes, bonus, done))
            if not done:
                left.append(i)
        if not left:
            return
        proposer.commit(outcomes)
        if len(left) < len(rows):
            rows = [rows[i] for i in left]
            target.select(left)
            proposer.select(left)


def _verify(target: CachedModel, rows: list[Row], drafts: list[Proposal], width: int, fed: bool) -> Tensor:
    """Feed each row's last token, which was not fed yet, and its draft; return the logits, (B, 1 + width, V)."""
    chains = all(draft.tree.is_chain for draft in drafts)
    if not fed:
        longest = max(row.length for row in rows)
        if len(rows) == 1 and chains and not target.compiled:
            # The prompt and the first draft in one forward.
            return target.prefill(torch.cat([rows[0].context, drafts[0].tokens])[None, :], keep=width + 1)
        if longest > 1:
            target.prefill(padded([row.context for row in rows], longest)[:, :-1])
    blocks = [torch.cat([row.context[-1:], draft.tokens]) for row, draft in zip(rows, drafts, strict=True)]
    starts = [row.length - 1 for row in rows]
    if chains:
        return target.feed(padded(blocks, width + 1), starts)
    visible = torch.eye(width + 1, dtype=torch.bool).repeat(len(rows), 1, 1)
    depths = torch.zeros(len(rows), width + 1, dtype=torch.long)
    for i, draft in enumerate(drafts):
        size = len(draft.tree) + 1
        visible[i, :size, :size] = draft.tree.visible
        depths[i, 1:size] = torch.tensor(draft.tree.depths)
    device = blocks[0].device
    return target.feed(padded(blocks, width + 1), starts, visible=visible.to(device), depths=depths.to(device))


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
