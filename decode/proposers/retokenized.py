"""A draft model with another tokenizer, whose ids are renumbered or whose text is re-encoded.

`tokens` and `text` are the target's, `ids` are the draft's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache import CachedModel, check_rollback, layers_with_states, pad_right, positions_of
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, Proposer
from draftsmith.decode.proposers.draft_model import DraftModelProposer, Stop
from draftsmith.decode.proposers.draft_tree import DynamicTree
from draftsmith.decode.proposers.renumbered import (
    map_special_tokens,
    matching_ids,
    renumber_draft,
    special_tokens,
    stand_in,
)
from draftsmith.decode.rows import host_tokens
from draftsmith.decode.tree import Tree

# Invalid UTF-8, such as the first bytes of a character, decodes to this.
REPLACEMENT = "\ufffd"
# The number of last tokens that decide how a continuation is split: far more than any word has.
WINDOW = 32
# Draft steps for one token of the target; a draft that yields none within these is given up.
STEPS_PER_TOKEN = 8
# Attempts to find a later position from which the text can be re-encoded.
TRIES = 16


@dataclass
class _DraftText:
    """One text as the draft reads it."""

    ids: list[int] = field(default_factory=list)  # the text's ids
    fed: list[int] = field(default_factory=list)  # the ids in the cache
    settled: list[int] = field(default_factory=list)
    """The ids of the target's first `anchor` tokens, which are not encoded again."""
    anchor: int = 0
    window: int = 2 * WINDOW  # the least number of tokens that are re-encoded each round
    tail: list[int] = field(default_factory=list)  # the target's last tokens, which drafted text continues
    text: str = ""  # the text of `tail`, up to the last whole character
    before: list[int] = field(default_factory=list)  # the draft's last ids


class RetokenizedProposer(Proposer):
    """A proposer that uses a causal LM with another tokenizer than the target's.

    If the tokenizers differ only in ids (see `matching_ids`), it `renumbers` ids: the draft model becomes one over the
    target's ids, and drafts chains and trees at any temperature, as in `DraftModelProposer`. Otherwise the target's
    text is encoded for the draft, which continues greedily, and its text is encoded as the target's tokens (universal
    assisted decoding, Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
    Heterogeneous Vocabularies", section 3.1). A mistake in the mapping costs acceptance, but the output is the
    target's.

    Raises:
        InputError: a tree where text is re-encoded; in `start`, sampling there.
    """

    def __init__(
        self,
        draft_model: PreTrainedModel,
        draft_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        tree: Tree | DynamicTree | None = None,
        stop: Stop | None = None,
    ):
        ids = matching_ids(draft_tokenizer, target_tokenizer)
        self.renumbers = ids is not None
        self._drafter: Proposer
        if ids is not None:
            view = renumber_draft(draft_model, ids, stand_in=stand_in(draft_tokenizer))
            self._drafter = DraftModelProposer(view, tree, stop)
        # Re-encoding drafts only chains at T=0: under sampling a one-hot draft x would be lossless too, but accepted
        # with probability p(x) instead of Σ min(p, q).
        elif tree is not None:
            raise InputError("tree: expected a chain from a draft whose text has to be re-encoded, found a tree")
        else:
            self._drafter = ReencodingProposer(draft_model, draft_tokenizer, target_tokenizer, stop)
        self.positions = self._drafter.positions

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache."""
        return self._drafter.start(task)

    def nodes(self, draft_length: int) -> int:
        """Return the greatest number of tokens of a draft of this depth."""
        return self._drafter.nodes(draft_length)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain or a tree for each row."""
        return self._drafter.propose(contexts, draft_lengths)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the accepted tokens."""
        self._drafter.commit(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._drafter.select(rows)


class ReencodingProposer(Proposer):
    """A proposer that drafts text greedily, and encodes it with the target's tokenizer.

    The cache is rolled back to where a new encoding of the text departs from the cached one. Forwards are never
    compiled, because block sizes depend on the text. The draft's logits are not processed, because penalties and bans
    name the target's tokens. Special tokens are mapped if both tokenizers have them, and dropped otherwise. Nothing is
    drafted after a text that exceeds the draft's positions.
    """

    def __init__(
        self,
        draft_model: PreTrainedModel,
        draft_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        stop: Stop | None,
    ):
        check_rollback(draft_model, "draft model")
        if layers_with_states(draft_model.config):  # another encoding may depart from the cached one at any token
            raise InputError(
                "draft model: expected attention alone where texts are encoded anew, found "
                f"{type(draft_model).__name__}, whose states return to few tokens"
            )
        self._draft_model, self._stop = draft_model, stop
        self._draft, self._target = draft_tokenizer, target_tokenizer
        self._draft_specials, self._target_specials = special_tokens(draft_tokenizer), special_tokens(target_tokenizer)
        self._to_draft = map_special_tokens(draft_tokenizer, target_tokenizer)
        self._to_target = map_special_tokens(target_tokenizer, draft_tokenizer)
        config = draft_model.config.get_text_config()
        self._size = token_count(draft_tokenizer, config)
        self._positions = positions_of(config)
        begin = draft_tokenizer.bos_token_id
        begins = begin is not None and draft_tokenizer.encode("a")[:1] == [begin]
        self._prefix = [begin] if begins else []

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache."""
        if task.sampler.do_sample:
            tokens = self._target.get_vocab().keys()
            shared = len(tokens & self._draft.get_vocab().keys())
            raise InputError(
                "draft tokenizer: expected the target's tokens and merges under sampling, found other ones "
                f"({shared} of {len(tokens)} tokens are shared); decode at temperature 0"
            )
        self._task = task
        self._rows = [_DraftText() for _ in task.generators]
        self._renew(task.max_length)
        return task.draft_length

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain for each row: run the draft until its text yields more tokens than the draft length."""
        rows = self._rows
        texts = zip(rows, host_tokens(contexts), draft_lengths, strict=True)
        limits = [k * self._encode_row(row, tokens) for row, tokens, k in texts]
        drafted: list[list[int]] = [[] for _ in rows]
        proposed: list[list[int]] = [[] for _ in rows]
        active = [i for i, k in enumerate(limits) if k > 0]
        if active:
            logits = self._feed_texts(STEPS_PER_TOKEN * (max(limits) + 2))
        while active:
            next_ids, unfinished = logits.argmax(-1).tolist(), []
            for i in active:
                row, k, ids = rows[i], limits[i], drafted[i]
                if self._stop is not None and self._stop(logits[i].float().softmax(-1)):
                    continue
                ids.append(next_ids[i])
                proposed[i] = self._continuation(row, ids) or proposed[i]
                ends = ids[-1] in self._draft_specials or not self._has_position(len(row.ids) + len(ids) - 1)
                # One more than k, as the last token may be the beginning of a longer one. After a space too, as the
                # next character decides how spaces are split.
                enough = len(proposed[i]) > k and not _decode(self._draft, ids[-1:])[-1:].isspace()
                if not ends and not enough and len(ids) < STEPS_PER_TOKEN * (len(proposed[i]) + 1):
                    unfinished.append(i)
                    row.fed.append(ids[-1])
            active = unfinished
            if active:
                # Finished rows are fed their last id again, into its own slot.
                last = torch.tensor([row.fed[-1:] for row in rows], device=self._draft_model.device)
                logits = self._model.feed(last, [len(row.fed) - 1 for row in rows])[:, 0, : self._size]
        drafts = []
        for context, k, tokens in zip(contexts, limits, proposed, strict=True):
            valid = list(takewhile(lambda token: token < self._task.vocab_size, tokens[:k]))
            drafts.append(Proposal(context.new_tensor(valid), None, Tree.chain(len(valid))))
        return drafts

    def select(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._model.select(rows)
        self._rows = [self._rows[row] for row in rows]

    def _has_position(self, position: int) -> bool:
        return self._positions is None or position < self._positions

    def _encode_row(self, row: _DraftText, text: np.ndarray) -> bool:
        """Encode a row's text after `anchor`, and return whether the draft has positions for it."""
        tokens = text[row.anchor :].tolist()
        ids = self._encode_for_draft(tokens)
        row.ids = row.settled + ids
        if len(tokens) >= 2 * row.window:
            latest = len(tokens) - row.window
            # Move the anchor to a cut at which both halves, encoded apart, give the same ids.
            for cut in range(latest, latest - TRIES, -1):
                first = self._encode_for_draft(tokens[:cut])
                if first + self._encode_for_draft(tokens[cut:]) == ids:
                    row.settled, row.anchor = row.settled + first, row.anchor + cut
                    break
            else:
                row.window *= 2
        if row.ids[:1] != self._prefix:
            row.ids = self._prefix + row.ids
        if not row.ids:
            row.ids = [stand_in(self._draft)]
        row.tail = _after_specials(text[-WINDOW:].tolist(), self._target_specials)
        row.text = _whole(self._target, row.tail)
        row.before = _after_specials(row.ids[-WINDOW:], self._draft_specials)
        if self._has_position(len(row.ids) - 1):
            return True
        row.ids = row.ids[:1]  # the row stays in the batch with one id
        return False

    def _encode_for_draft(self, tokens: Sequence[int]) -> list[int]:
        """Encode the text of the target's tokens for the draft, without an incomplete last character."""
        ids: list[int] = []
        for special, group in groupby(tokens, self._target_specials.__contains__):
            if special:
                ids += [self._to_draft[token] for token in group if token in self._to_draft]
            else:
                ids += _encode(self._draft, _whole(self._target, list(group)))
        return [token for token in ids if token < self._size]  # a tokenizer may have tokens beyond the model's head

    def _continuation(self, row: _DraftText, drafted: list[int]) -> list[int]:
        """Return the target's tokens for the drafted text.

        The result is empty if no tokens continue the row, for example where the draft completes half a character to a
        different one.
        """
        ends = drafted[-1] in self._draft_specials
        before, after = (_decode(self._draft, row.before + ids) for ids in ([], drafted[: -1 if ends else None]))
        if not after.startswith(before):
            return []
        text, *broken = after[len(before) :].split(REPLACEMENT)
        tokens = next(self._splits(row, text), [])
        if ends and not broken and drafted[-1] in self._to_target and (tokens or not text):
            return [*tokens, self._to_target[drafted[-1]]]
        return tokens

    def _splits(self, row: _DraftText, text: str) -> Iterator[list[int]]:
        """Yield tokens that spell `text` after the row's text, first as the tokenizer itself would split it."""
        whole = row.text + text
        tokens = _encode(self._target, whole)
        count = len(row.tail)
        if tokens[:count] == row.tail:
            yield tokens[count:]
            return
        # The row's own tokens may be split differently here: the tail starts inside a word, or a prompt ended there.
        most = len(text.encode()) + 3  # a byte a token, and the bytes that complete a character
        for start in range(len(tokens) - 1, max(-1, len(tokens) - 1 - most), -1):
            if _decode(self._target, row.tail + tokens[start:]) == whole:
                yield tokens[start:]
        # Or the tokenizer would merge across the border, while the target has already chosen a shorter token.
        tokens = _encode(self._target, text)
        if _decode(self._target, row.tail + tokens) == whole:
            yield tokens

    def _feed_texts(self, room: int) -> Tensor:
        """Feed the uncached ids of each text; return the logits after it, (B, V). `room` ids may follow later."""
        rows, device = self._rows, self._draft_model.device
        longest = max(len(row.ids) for row in rows)
        if longest + room > self._slots:
            self._renew(2 * (longest + room))
        # Even of a fully cached text the last id is fed, for its logits.
        cached = [min(_common_length(row.fed, row.ids), len(row.ids) - 1) for row in rows]
        if not any(cached):
            self._model.prefill_texts([torch.tensor(row.ids, device=device) for row in rows])
            cached = [len(row.ids) - 1 for row in rows]
        width = max(len(row.ids) - n for row, n in zip(rows, cached, strict=True))
        starts = [max(0, len(row.ids) - width) for row in rows]
        blocks = [torch.tensor(row.ids[start:], device=device) for row, start in zip(rows, starts, strict=True)]
        logits = self._model.feed(pad_right(blocks, width), starts)[..., : self._size]
        for row in rows:
            row.fed = list(row.ids)
        return torch.stack([logits[i, len(block) - 1] for i, block in enumerate(blocks)])

    def _renew(self, slots: int) -> None:
        """Begin with an empty cache of `slots` slots; the number of a text's ids is not known in advance."""
        self._slots = slots
        self._model = CachedModel(self._draft_model, len(self._rows), slots, rollback=slots)
        for row in self._rows:
            row.fed = []


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _whole(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = _decode(tokenizer, ids)
    if not text.endswith(REPLACEMENT):
        return text
    # Some decoders join consecutive bytes, so that half a character spoils the whole ones before it: try shorter ids.
    return max((_decode(tokenizer, ids[: len(ids) - n]).rstrip(REPLACEMENT) for n in range(4)), key=len)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False)) if text else []


def _after_specials(ids: list[int], specials: frozenset[int]) -> list[int]:
    return list(takewhile(lambda token: token not in specials, reversed(ids)))[::-1]


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
