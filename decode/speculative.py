"""The round loop of speculative decoding.

Under the exact rule the output is that of plain decoding of the target, token for token at T=0 and in distribution
otherwise, for any proposer (Leviathan et al. 2023, appendix A.1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from draftsmith.decode.cache import CachedModel, Slots, check_rollback
from draftsmith.decode.cache.forward import NO_TOKEN
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError, at_least
from draftsmith.decode.generation import DecodeOutput, collect_output, generate_arguments, prepare_rows, run_decoder
from draftsmith.decode.proposers.base import Drafts, DraftTask, Outcome, Proposal, Proposer, stack_tokens
from draftsmith.decode.rows import Departure, RowTexts, TextBatch, TextRow
from draftsmith.decode.rules import Rule, as_rule
from draftsmith.decode.rules.verification import Verdict
from draftsmith.decode.tree import masks_of


@dataclass(frozen=True)
class Round:
    """One round of one row, for observers; `counts` are the round's own, and `done` says that the text ended."""

    row: int  # the row's index in the batch
    tokens: list[int]  # the emitted tokens, accepted ones first
    counts: Counts
    bonus: bool
    """True if the last token is a bonus after a fully accepted path; otherwise it is a correction."""
    done: bool
    source: int = 0
    """For drafters that take turns, the index of the round's drafter."""

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
        """Drafted tokens: equal to `drafted` in a chain, more in a tree."""
        return self.counts.num_draft_tokens


Observer = Callable[[Round], None]


def speculative_generate(
    target: PreTrainedModel,
    proposer: Proposer,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    draft_length: int | None = 4,
    rule: str | Rule = "exact",
    seed: int = 0,
    **generate_kwargs: Any,
) -> DecodeOutput:
    """Decode speculatively with the arguments of `target.generate`.

    Args:
        input_ids: prompts, (B, T) int64, left-padded where B > 1. Rows advance independently.
        attention_mask: (B, T), 0 on padding; all ones if None.
        draft_length: γ, depth of a draft; less near the length limit. None is the proposer's `longest`, or 4 without
            one.
        rule: "exact", the lossless rule, or a lossy one: "typical", "threshold" or "cascade", or one of `decode.rules`
            with other levels.
        seed: row i has its own generator, seeded with seed + i; its draws do not depend on the batch.
        generate_kwargs: arguments of `generate` (max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id,
            stop_strings, streamer, …), with the defaults of the target's `generation_config`. In addition
            `compiled=True` runs the models' compiled programs, and `observer` is called with each `Round`.

    Returns:
        `sequences` (B, ≤ T + max_new_tokens), padded on the right where rows end early, and `counts`.

    Raises:
        InputError: γ < 1 or beyond the proposer's `longest`, an unknown rule, or a model that cannot be rolled back.
    """
    streamer = generate_kwargs.get("streamer")
    if streamer is not None:
        # `generate` gives the streamer the prompt, but does not pass it on to `custom_generate`.
        if len(input_ids) > 1:
            raise InputError(f"streamer: expected one prompt, found {len(input_ids)}")
        generate_kwargs["observer"] = _streaming(streamer, generate_kwargs.get("observer"))
    arguments = generate_arguments(target, input_ids, attention_mask, **generate_kwargs)
    arguments |= {"proposer": proposer, "draft_length": draft_length, "rule": as_rule(rule), "seed": seed}
    return run_decoder(target, speculative_decode, arguments)


def speculative_decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    proposer: Proposer,
    draft_length: int | None = 4,
    rule: str | Rule = "exact",
    compiled: bool = False,
    observer: Observer | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> DecodeOutput | Tensor:
    """Decode as the callable for `target.generate(…, custom_generate=speculative_decode, proposer=…)`.

    `generate` prepares all arguments except `proposer`, `draft_length`, `rule`, `compiled`, `observer` and `seed` (None
    draws from the global generator). It hands callables neither an assistant model nor a streamer: use `observer`, or
    `speculative_generate`, which serves streamers. Logits processors must be functions of tokens and logits, since they
    see contexts that are never written.

    Raises:
        InputError: as `speculative_generate`, or an input or option of `generate` that is not served.
    """
    check_rollback(model, "target")
    rule, draft_length = as_rule(rule), _draft_length(draft_length, proposer.longest)
    rows = prepare_rows(model, logits_processor, input_ids, model_kwargs, stopping_criteria, generation_config, seed)
    _run_rounds(model, proposer, list(rows), draft_length, rule, compiled, observer)
    return collect_output(rows, input_ids, generation_config, rule.lossy, proposer.positions)


def _draft_length(draft_length: int | None, longest: int | None) -> int:
    """Return γ, checked against the proposer's greatest, `longest`."""
    draft_length = longest or 4 if draft_length is None else draft_length
    at_least(1).check("draft_length", draft_length)
    if longest is not None and draft_length > longest:
        raise InputError(
            f"draft_length: expected at most the {longest} tokens that the draft was trained to propose, found "
            f"{draft_length}"
        )
    return draft_length


def _run_rounds(
    model: PreTrainedModel,
    proposer: Proposer,
    rows: list[TextRow],
    draft_length: int,
    rule: Rule,
    compiled: bool,
    observer: Observer | None,
) -> None:
    """Write texts to their ends, a round at a time (Leviathan et al. 2023, algorithm 1)."""
    task = _task(model, rows, draft_length, rule, compiled)
    largest = proposer.start(task)
    wants: dict[str, Any] = {"wants_hidden": proposer.wants_hidden, "wants_features": proposer.wants_features}
    # Rejected tokens are all in the last block: the target's cache rolls back no further.
    target = CachedModel(model, len(rows), task.max_length, 1 + largest, compiled, rollback=0, **wants)
    texts = TextBatch(rows, 1 + largest)
    while True:
        rows, roots = texts.rows, texts.lengths + -1  # a root is the slot of a text's last token
        # Draft γ tokens from q, but leave room for the target's own.
        row_texts = RowTexts(rows)
        drafts = proposer.propose(row_texts, [min(draft_length, row.room - 1) for row in rows])
        # Verify: one forward of the target gives the logits of p after the text and after each drafted token.
        width = max(len(draft.tree) for draft in drafts)
        logits = _verify(target, texts, drafts, roots, width)
        # Accept the drafted tokens of a path while they pass, and take one more token from p or its residual.
        contexts = [Contexts(text, draft) for text, draft in zip(row_texts, drafts, strict=True)]
        samplers, generators = [row.sampler for row in rows], [row.generator for row in rows]
        verdicts = rule.verify_batch(samplers, logits, contexts, drafts, generators, target.likeliest)
        # Emit them; in the target's cache, accepted nodes of a tree move to where a chain has its tokens.
        tokens = [_emitted(*args) for args in zip(rows, verdicts, drafts, strict=True)]
        paths = _moves(verdicts)
        accepted = texts.write(tokens, paths)
        if paths:
            target.keep_paths(roots, paths, accepted)
        for row, draft, verdict, emitted in zip(rows, drafts, verdicts, tokens, strict=True):
            round = _recorded(row, draft, verdict, emitted)
            if observer is not None:
                observer(round)
        # Continue with the texts that have not ended.
        unfinished = [index for index, row in enumerate(rows) if not row.done]
        if not unfinished:
            return
        proposer.commit(_outcomes(target, drafts, verdicts, logits, roots, accepted))
        if len(unfinished) < len(rows):
            texts.select(unfinished)
            target.select(unfinished)
            proposer.select(unfinished)


def _task(model: PreTrainedModel, rows: Sequence[TextRow], draft_length: int, rule: Rule, compiled: bool) -> DraftTask:
    sampler, samplers = rows[0].sampler, [row.sampler for row in rows]
    return DraftTask(
        sampler,
        model.config.get_text_config().vocab_size,
        [row.generator for row in rows],
        max(len(row.text) for row in rows),
        draft_length,
        draw_siblings=not rule.lossy,
        compiled=compiled,
        target=model,
        row_samplers=() if all(other is sampler for other in samplers) else samplers,
    )


def _verify(target: CachedModel, texts: TextBatch, drafts: Sequence[Proposal], roots: Slots, width: int) -> Tensor:
    """Feed each row's last token, which was not fed yet, and its draft; return the logits, (B, 1 + width, V)."""
    rows, chains = texts.rows, all(draft.tree.is_chain for draft in drafts)
    if target.is_empty:  # the first round
        if len(rows) == 1 and chains and not target.has_states:
            # The prompt and the first draft in one forward.
            return target.prefill(torch.cat([rows[0].context, drafts[0].tokens])[None, :], keep=width + 1)
        target.prefill_texts([row.context for row in rows])
    # A proposer may have made the whole block on the device already.
    blocks = drafts.block if isinstance(drafts, Drafts) else None
    if blocks is None or blocks.shape[1] != 1 + width:
        blocks = torch.cat([texts.last(), stack_tokens(drafts, width)], 1) if width else texts.last()
    if chains:
        return target.feed(blocks, roots)
    if target.has_states:
        raise InputError(f"drafts: expected chains, found a tree, which {type(target.model).__name__} cannot follow")
    visible, depths = masks_of([draft.tree for draft in drafts], width, blocks.device)
    return target.feed(blocks, roots, visible=visible, depths=depths)


class Contexts(Sequence[Tensor]):
    """The tokens before each position of a block, (T_j,): the text, then the path of drafted tokens."""

    def __init__(self, text: Tensor, draft: Proposal):
        self._text, self._draft = text, draft

    def __len__(self) -> int:
        return 1 + len(self._draft.tokens)

    def __getitem__(self, index: Any) -> Any:
        if not index:
            return self._text
        node = range(len(self))[index] - 1  # the range resolves a negative index
        return torch.cat([self._text, self._draft.tokens[self._draft.tree.path(node)]])


def _emitted(row: TextRow, verdict: Verdict, draft: Proposal) -> list[int]:
    """Return the accepted tokens and the one after them, as far as there is room; NaN raises an `InputError`."""
    if verdict.token == NO_TOKEN:
        raise row.not_finite(len(verdict.path))
    accepted = verdict.accepted
    if accepted is None:
        accepted = draft.tokens[verdict.path].tolist() if verdict.path else []
    return [*accepted, verdict.token][: row.room]


def _moves(verdicts: Sequence[Verdict]) -> list[list[int]]:
    """Return each row's accepted nodes in its block, counted from the root; empty if all are in order already."""
    if all(verdict.path == list(range(len(verdict.path))) for verdict in verdicts):
        return []
    return [[node + 1 for node in verdict.path] for verdict in verdicts]


def _recorded(row: TextRow, draft: Proposal, verdict: Verdict, emitted: Sequence[int]) -> Round:
    """Count a row's round, up to the end of its text."""
    tokens = row.advance(emitted)
    counts = Counts.of_round(draft.tree, len(verdict.path), len(tokens))
    row.rounds.append(counts)
    row.sources.append(draft.source)
    for distance, disagrees in (verdict.departures or [])[: len(tokens)]:
        row.departure += Departure(distance, int(disagrees), 1)
    # After a leaf the token is a bonus; elsewhere the target rejected a child, unless the text ended in the path.
    at_leaf = not draft.tree.children[verdict.path[-1] + 1 if verdict.path else 0]
    bonus = at_leaf and len(draft.tree) > 0 and len(tokens) > len(verdict.path)
    return Round(row.index, tokens, counts, bonus, row.done, draft.source)


def _outcomes(
    target: CachedModel,
    drafts: Sequence[Proposal],
    verdicts: Sequence[Verdict],
    logits: Tensor,
    roots: Slots,
    accepted: Tensor | None,
) -> list[Outcome]:
    """Return the outcome of each row's draft, with the target's hidden states or features where they are wanted.

    `logits` are (B, 1 + K, V). `accepted` are the accepted nodes in each row's block, (B, D), None for chains.
    """
    features = _features(target, logits.shape[1], roots, accepted) if target.features else None
    outcomes, hidden = [], target.hidden
    for row, (draft, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
        size, row_logits, row_hidden = 1 + len(draft.tree), logits[row], None if hidden is None else hidden[row]
        if size < row_logits.shape[0]:  # padding after a smaller draft
            row_logits, row_hidden = row_logits[:size], None if row_hidden is None else row_hidden[:size]
        block, prompt = (None, None) if features is None else features[row]
        if block is not None:
            block = block[: 1 + len(verdict.path)]
        outcomes.append(Outcome(verdict.path, row_logits, row_hidden, block, prompt))
    return outcomes


def _features(
    target: CachedModel, width: int, roots: Slots, accepted: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """Return each row's features of a block of `width` tokens, accepted ones first, and the prompt's before it.

    They come from one forward, or from two: the prompts', and then the first block's.
    """
    prompts, block = target.features[0], target.features[-1][:, -width:]
    with_prompts = len(target.features) > 1 or prompts.shape[1] > width
    if accepted is not None:
        nodes = torch.nn.functional.pad(accepted, (1, 0)).to(block.device).clamp(max=width - 1)
        block = block.take_along_dim(nodes[..., None], dim=1)
    # The list would otherwise grow by each round's features.
    target.features.clear()
    return [(block[row], prompts[row, :root] if with_prompts else None) for row, root in enumerate(roots.host)]


def _streaming(streamer: Any, observer: Observer | None) -> Observer:
    """Return an observer that gives each round's tokens to a `transformers` streamer, in a burst."""

    def observe(round: Round) -> None:
        streamer.put(torch.tensor(round.tokens))
        if round.done:
            streamer.end()
        if observer is not None:
            observer(round)

    return observe
