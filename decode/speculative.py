"""Speculative decoding: the round loop.

The law of the output is exactly that of plain decoding of the target, token for token at T=0 and in distribution
otherwise, whatever the proposer drafts (Leviathan et al. 2023, appendix A.1).
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from draftsmith.decode.acceptance import accept_exact, accept_greedy
from draftsmith.decode.cache import forward, new_cache, require_rollback, rollback
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput, Limits, decode_rows, run_generate
from draftsmith.decode.proposers.protocol import Proposer
from draftsmith.decode.sampling import Law

RULES = ("exact",)


def speculative_generate(
    target: PreTrainedModel,
    proposer: Proposer,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    draft_length: int = 4,
    rule: str = "exact",
    seed: int = 0,
    **generate_kwargs: Any,
) -> DecodeOutput:
    """Decode speculatively with the arguments of `target.generate`.

    Args:
        target: the model whose law the output has.
        proposer: what drafts.
        input_ids: prompts, (B, T) int64, left-padded where B > 1. Rows are decoded one after another.
        attention_mask: (B, T), 0 on padding; all ones if None.
        draft_length: γ, drafted tokens a round; fewer where the length limit is near.
        rule: "exact", the lossless rule.
        seed: seeds each row's draws: row i uses seed + i, so that it draws as it would alone.
        generate_kwargs: what `generate` takes (max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id, …);
            what is left out has the default of the target's `generation_config`, as in `generate` itself.

    Returns:
        `sequences` (B, ≤ T + max_new_tokens), padded on the right where rows end early, and the sum of `counts`.

    Raises:
        InputError: γ < 1, an unknown rule, or a model that cannot be rolled back.
    """
    if draft_length < 1:
        raise InputError(f"draft_length: expected at least 1, found {draft_length}")
    if rule not in RULES:
        raise InputError(f"rule: expected one of {', '.join(RULES)}, found {rule!r}")
    return run_generate(
        target,
        speculative_decode,
        input_ids,
        attention_mask,
        proposer=proposer,
        draft_length=draft_length,
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
    draft_length: int = 4,
    seed: int | None = None,
    **model_kwargs: Any,
) -> DecodeOutput | Tensor:
    """The callable for the library's own door: `target.generate(…, custom_generate=speculative_decode, proposer=…)`.

    `generate` prepares everything but `proposer`, `draft_length` and `seed` (None draws from the global generator).
    """
    require_rollback(model, "target")
    law = Law(logits_processor, bool(generation_config.do_sample))

    def decode_row(prompt: Tensor, limits: Limits, generator: torch.Generator | None) -> tuple[Tensor, Counts]:
        return _decode_row(model, proposer, prompt, draft_length, law, limits, generator)

    mask = model_kwargs.get("attention_mask")  # named in the signature, `generate` would pass it twice
    return decode_rows(decode_row, input_ids, mask, stopping_criteria, generation_config, seed)


def _decode_row(
    target: PreTrainedModel,
    proposer: Proposer,
    prompt: Tensor,
    draft_length: int,
    law: Law,
    limits: Limits,
    generator: torch.Generator | None,
) -> tuple[Tensor, Counts]:
    """Decode one prompt (1, T); p and q are the target's and the drafter's distributions."""
    sequence = limits.buffer(prompt)  # (1, max_length), of which the first `length` tokens stand
    length, done, counts = prompt.shape[1], False, []
    cache, cached = new_cache(), 0
    proposer.start(law, target.config.get_text_config().vocab_size, generator)
    while not done:
        k = min(draft_length, limits.max_length - length - 1)
        if k > 0:
            draft = proposer.propose(sequence[:, :length], k)
            k = len(draft.tokens)
            sequence[0, length : length + k] = draft.tokens
        # The last token (at first the whole prompt), which was not fed yet, and the draft.
        logits = forward(target, sequence[:, cached : length + k], cache, keep=k + 1)
        fed = length + k
        context = sequence[0, :fed]
        if k == 0:
            accepted, following = 0, law.next_token(logits, context, generator)
        elif law.do_sample:
            p, q = law.probabilities(logits, context), draft.probabilities
            accepted, following = accept_exact(p, q, draft.tokens, generator)
        else:
            chosen = law.choose(logits, context)
            accepted = accept_greedy(chosen, draft.tokens)
            following = chosen[accepted]
        sequence[0, length + accepted] = following
        emitted, done = limits.cut(sequence, length, accepted + 1)
        # Where the text ends inside the draft, what was drafted after its end is no failure of the drafter.
        accepted, k = min(accepted, emitted), emitted if emitted <= accepted else k
        counts.append((k, accepted, emitted))
        length += emitted
        if not done:
            cached = length - 1
            rollback(cache, fed - cached)
            proposer.rollback(cached)
    return sequence[:, :length], sum((Counts.of_round(*c) for c in counts), Counts())
