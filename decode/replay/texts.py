"""Texts that the target wrote, and models' predictions of their tokens by ordinary forwards of the library.

Shape suffixes: B texts, T tokens of a text, C columns of a block, N tokens of a text without its prompt, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from draftsmith.decode.cache import layers_with_states, own_positions, positions_of
from draftsmith.decode.cache.features import decoder_of
from draftsmith.decode.sampling import Sampler, align_vocabulary

Distributions = Callable[[Tensor, Tensor, int], Iterator[Tensor]]
"""(texts (B, T), mask of wanted tokens (B, T) bool, C) → for each C columns from column 1 on, the distributions of the
wanted tokens, (N, V), column by column."""
AtTokens = Callable[[int, int], Tensor]
"""(first, end) → a model's logits or distributions at these tokens of a text, (C, V)."""
LOGITS_AT_A_TIME = 2**27
"""The most logits of a model that are held at a time: 512 MiB in float32, for one long text or for several short ones.

The distributions take the same again; the drafter's logits then replace the target's. Measured in float32 with texts of
512 tokens and a chain, replay added to the peak of the process: V = 32k, eight texts at a time, 0.5 GiB at T=0, 1.1 at
T=1, 1.6 with top-p, which sorts; V = 128k, two at a time, 1.4 at T=1.
"""


@dataclass(frozen=True)
class WrittenText:
    """A text that the target wrote."""

    sequence: Tensor  # prompt and text, (T,) int64
    prompt_length: int  # the length of the prompt, at least 1 and less than T
    limit: int  # the length limit of the text; T − `prompt_length` if the limit ended it

    def __len__(self) -> int:
        """Return N, the length of the text."""
        return len(self.sequence) - self.prompt_length

    @property
    def tokens(self) -> Tensor:
        """The text without its prompt, (N,)."""
        return self.sequence[self.prompt_length :]


def fit_positions(texts: Sequence[WrittenText], positions: int | None) -> tuple[list[WrittenText], list[WrittenText]]:
    """Return the parts of texts that fit a drafter's positions, and the whole texts, with drafts limited to these."""
    if positions is None:
        return list(texts), list(texts)
    ends = [max(text.prompt_length, positions + 1) for text in texts]
    limits = [min(text.limit, positions + 2 - text.prompt_length) for text in texts]
    whole = [replace(text, limit=limit) for text, limit in zip(texts, limits, strict=True)]
    return [replace(text, sequence=text.sequence[:end]) for text, end in zip(whole, ends, strict=True)], whole


def pad_tokens(parts: Sequence[Tensor], texts: Sequence[WrittenText], value: float) -> list[Tensor]:
    """Return values of the first tokens of texts, (≤ N, …), padded with `value` to all tokens, (N, …)."""
    missing = [len(text) - len(part) for part, text in zip(parts, texts, strict=True)]
    return [
        torch.cat([part, part.new_full((n, *part.shape[1:]), value)]) for part, n in zip(parts, missing, strict=True)
    ]


def clamp_tokens(model: PreTrainedModel, texts: Sequence[Tensor]) -> list[Tensor]:
    """Return texts, (T_b,) int64, with tokens that have no embedding replaced by the model's last token.

    A target with padded logits may write tokens beyond its tokenizer, which a draft with fewer rows cannot read.
    """
    embeddings: Any = model.get_input_embeddings()
    last = len(embeddings.weight) - 1
    # A view over other ids (`renumber_draft`) overrides `forward` and reads any id.
    return list(texts) if "forward" in vars(model) else [text.clamp(max=last) for text in texts]


@contextmanager
def fixed_packing(packed: bool) -> Iterator[None]:
    """Tell the library's masks whether rows are packed, so that they need not inspect the positions.

    The inspection synchronises with the device in each forward. Without packing no mask is made.
    """

    def sequence_indices(position_ids: Tensor) -> Tensor | None:
        before_B1 = position_ids[:, :1] - 1
        return (position_ids.diff(prepend=before_B1, dim=-1) != 1).cumsum(-1) if packed else None

    original, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, sequence_indices
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def contexts_of(text: WrittenText, sampler: Sampler, first: int, end: int) -> list[Tensor]:
    """Return the contexts of tokens `first` … `end` − 1 of a text; an empty list if the sampler ignores them."""
    return [] if sampler.context_free else [text.sequence[: text.prompt_length + t] for t in range(first, end)]


def tokens_at_a_time(vocab_size: int) -> int:
    """Return the number of tokens whose logits are held at a time."""
    return max(1, LOGITS_AT_A_TIME // vocab_size)


def chunks(tokens: int, vocab_size: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the chunks of a text, from token `first` on, whose logits are held at a time."""
    size = tokens_at_a_time(vocab_size)
    while first < tokens:
        end = min(first - first % size + size, tokens)
        yield first, end
        first = end


def keep_last(at_tokens: AtTokens) -> AtTokens:
    """Return a function that remembers the last chunk that it computed, for which several drafters ask."""
    begin, kept = 0, list[Tensor]()

    def at(first: int, end: int) -> Tensor:
        nonlocal begin
        if not kept or first < begin or end > begin + len(kept[0]):
            kept.clear()  # two chunks would take twice the memory
            begin = first
            kept.append(at_tokens(first, end))
        return kept[0][first - begin : end - begin]

    return at


@contextmanager
def held_states(model: PreTrainedModel) -> Iterator[Callable[[int, int, int], Tensor]]:
    """Hold a causal LM's last hidden states of the forward in this block; its head sees only the last position.

    Yields (row, first, end) → the logits at these positions, (C, V). They are the model's own: its forward runs on the
    states held, in place of its layers, so that caps, factors and other ids are those of the family.
    """
    decoder, outputs = decoder_of(model), []

    def given(output: Any, states: Tensor) -> Any:
        output = copy.copy(output)
        output.last_hidden_state = states
        return output

    def hold(_module: Any, _inputs: Any, output: Any) -> Any:
        outputs.append(output)
        return given(output, output.last_hidden_state[:, -1:])

    def logits(row: int, first: int, end: int) -> Tensor:
        output = given(outputs[-1], outputs[-1].last_hidden_state[row : row + 1, first:end])
        tokens = torch.zeros(1, end - first, dtype=torch.long, device=model.device)
        own = vars(decoder).get("forward")  # hooks of accelerate replace it, too
        decoder.forward = lambda *_args, **_inputs: output
        try:
            return model(input_ids=tokens, use_cache=False).logits[0]  # type: ignore[no-any-return]
        finally:
            del decoder.forward
            if own is not None:
                decoder.forward = own

    hook = decoder.register_forward_hook(hold)
    try:
        yield logits
    finally:
        hook.remove()


def teacher_forced(model: PreTrainedModel, texts: Sequence[WrittenText]) -> list[AtTokens]:
    """Return a model's logits at each text's tokens, on their true prefixes, from one forward of its layers."""
    device, written = model.device, [text for text in texts if len(text)]
    if not written:
        return [lambda first, end: torch.empty(0)] * len(texts)
    inputs = clamp_tokens(model, [text.sequence[:-1] for text in written])
    padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True).to(device)
    # Padding follows the texts, where a causal model does not see it.
    positions = own_positions(model, [len(text.sequence) - 1 for text in written], padded)
    with fixed_packing(False), held_states(model) as logits:
        model(input_ids=padded, use_cache=False, **positions)

    def at_tokens(text: WrittenText) -> AtTokens:
        row = next(rows) if len(text) else 0  # nobody asks for tokens of a text that has none
        return lambda first, end: logits(row, text.prompt_length - 1 + first, text.prompt_length - 1 + end)

    rows = iter(range(len(written)))
    return [at_tokens(text) for text in texts]


def lengths_to_read(wanted_BT: Tensor) -> list[int]:
    """Return the number of tokens that a model reads of each text to predict its last wanted one."""
    places_T = torch.arange(wanted_BT.shape[1], device=wanted_BT.device)
    return (wanted_BT * places_T).amax(1).tolist()


def model_distributions(model: PreTrainedModel, sampler: Sampler, vocab_size: int | None = None) -> Distributions:
    """Return a model's distributions under a sampler, by ordinary forwards; padded or cut to `vocab_size`."""

    def distributions(ids_BT: Tensor, wanted_BT: Tensor, columns: int) -> Iterator[Tensor]:
        length, past = ids_BT.shape[1], None
        fed_BT, most = torch.stack(clamp_tokens(model, list(ids_BT))), positions_of(model.config)
        positions = own_positions(model, lengths_to_read(wanted_BT), ids_BT)
        if most is not None and length > most:  # nothing is drafted there, so any distribution will do
            places = positions.get("position_ids", torch.arange(length, device=ids_BT.device)[None])
            positions = {"position_ids": places.clamp(max=most - 1)}
        rereads = layers_with_states(model.config) > 0  # some families' states continue by a single token alone
        keeps = "logits_to_keep" in signature(model.forward).parameters
        for start in range(1, length, columns):
            stop = min(start + columns, length)
            keep: dict[str, Any] = {"logits_to_keep": stop - start} if keeps else {}
            # Texts are padded on the right, and attention is causal: no mask is needed.
            fed = slice(0 if rereads else start - 1, stop - 1)
            block = {name: places[:, fed] for name, places in positions.items()}
            use_cache = columns < length - 1 and not rereads
            output = model(input_ids=fed_BT[:, fed], past_key_values=past, use_cache=use_cache, **block, **keep)
            past = None if rereads else output.past_key_values
            logits_CBV = output.logits[:, start - stop :].transpose(0, 1)
            if vocab_size is not None:
                logits_CBV = align_vocabulary(logits_CBV, vocab_size)
            block_CB = wanted_BT[:, start:stop].T
            if sampler.context_free:
                yield sampler.probabilities(logits_CBV[block_CB], [])
                continue
            # All rows of a column have contexts of one length, so one call of the processors serves them.
            parts = [logits_CBV.new_zeros(0, logits_CBV.shape[-1])]
            for column, rows in enumerate(block_CB):
                if bool(rows.any()):
                    scores = logits_CBV[column, rows]
                    scores = scores if scores.dtype == torch.float64 else scores.float()
                    process: Any = sampler.processors
                    parts.append(process(ids_BT[rows, : start + column], scores).softmax(-1))
            yield torch.cat(parts)

    return distributions
