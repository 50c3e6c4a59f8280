"""A draft model with another tokenizer: ids are renumbered where the tokens are the same, text is re-encoded elsewhere.

Target and draft ids are told apart by name: `tokens` and `text` are the target's, `ids` the draft's.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.decode.cache import CachedModel, check_model, padded
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Outcome, Proposal, Proposer, Task
from draftsmith.decode.proposers.draft_model import DraftModelProposer, DynamicTree, Stop
from draftsmith.decode.tree import Tree

# What bytes that are no UTF-8, such as the first ones of a character, decode to.
REPLACEMENT = "\ufffd"
# Tokens at the end of a text that decide how its continuation is split: far more than any word.
WINDOW = 32
# Of a draft with a few bytes a token: what brings no token of the target in so many steps is given up.
STEPS_PER_TOKEN = 8
# Places that are tried when the text that is encoded anew each round is to begin later.
TRIES = 16


class RetokenizedProposer(Proposer):
    """Drafts with a causal LM whose tokenizer is not the target's.

    Where the tokenizers are the same but for the numbers of their tokens (see `matching_ids`), ids are renumbered: the
    draft model becomes one over the target's ids (`renumbered`), and drafts chains and trees as in `DraftModelProposer`
    at any temperature. Elsewhere text is what both have in common: the target's text is encoded for the draft, which
    goes on greedily, and what it writes is encoded as the target's tokens (universal assisted decoding, Timor et al.
    2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
    section 3.1). That is for chains at T=0 alone. Under sampling such a one-hot draft would be lossless too, but of
    little use: x would be accepted with probability p(x) where a draw from q has Σ min(p, q).

    Whichever way, the output's law is the target's: what decides is whether the draft reads the text as it was trained
    to, so a mistake costs acceptance and nothing else.

    Args:
        draft_model: the drafter.
        draft_tokenizer: its tokenizer.
        target_tokenizer: the target's.
        tree: as in `DraftModelProposer`; None drafts chains.
        stop: ends a chain early, as in `DraftModelProposer`; where text is re-encoded it sees the draft's own law.

    Attributes:
        renumbers: whether ids are renumbered; text is re-encoded otherwise.

    Raises:
        InputError: a tree where text is re-encoded, or in `start` sampling there.
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
            view = renumbered(draft_model, ids, stand_in=_stand_in(draft_tokenizer))
            self._drafter = DraftModelProposer(view, tree, stop)
        elif tree is not None:
            raise InputError("tree: expected a chain from a draft whose text has to be re-encoded, found a tree")
        else:
            self._drafter = _Reencoder(draft_model, draft_tokenizer, target_tokenizer, stop)

    def start(self, task: Task) -> int:
        """Begin with an empty cache."""
        return self._drafter.start(task)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain or a tree for each row."""
        return self._drafter.propose(contexts, draft_lengths)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep what was accepted."""
        self._drafter.commit(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows."""
        self._drafter.select(rows)


def matching_ids(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> dict[int, int] | None:
    """Return the draft's id of each of the target's, where both split every text into the same pieces; else None.

    That is so where normalizer, pre-tokenizer, decoder and model (its pieces, and their merges or scores) are equal but
    for the pieces' ids. Equal pieces alone prove nothing: with other merges the draft would read text split as it never
    saw in training. Added tokens may differ. Those of the target that the draft lacks are missing from the result,
    unless they play the role (beginning and end of text, padding, unknown) of one that the draft has.

    Tokenizers that are not of the `tokenizers` library do not show how they split, and match nothing.
    """
    if not isinstance(draft, PreTrainedTokenizerFast) or not isinstance(target, PreTrainedTokenizerFast):
        return None
    if _pipeline(draft) != _pipeline(target):
        return None
    known = draft.get_vocab()
    ids = {token: known[piece] for piece, token in target.get_vocab().items() if piece in known}
    return _same_roles(draft, target) | ids


def renumbered(draft_model: PreTrainedModel, ids: Mapping[int, int], stand_in: int) -> PreTrainedModel:
    """Return a view of a model that reads and writes another tokenizer's ids: it shares all weights.

    For `DraftModelProposer(renumbered(…))`. The law that it drafts from holds no token that only the draft model has,
    for its logits are not there when the softmax is taken; the target's tokens that it lacks have probability zero.

    Args:
        draft_model: a causal LM.
        ids: its id of each of the target's; pairs beyond its head's width are left out.
        stand_in: its id to read where it has none.
    """
    width = draft_model.config.get_text_config().vocab_size
    # One entry more than there are ids: the target's padding entries, which some targets do write.
    table = torch.full((max(ids) + 2,), -1, device=draft_model.device)
    for token, own in ids.items():
        if own < width:
            table[token] = own
    read, written = table.masked_fill(table < 0, stand_in), table[:-1].clamp(min=0)
    # Of several tokens that are one to the draft model, it writes the last: the end of the text, not its beginning.
    writer = {own: token for token, own in ids.items()}
    lacking = table[:-1] < 0
    for token, own in ids.items():
        lacking[token] |= writer[own] != token
    is_whole = not bool(lacking.any())

    def forward(input_ids: Tensor, **inputs: Any) -> Any:
        output: Any = draft_model(input_ids=read[input_ids.clamp(max=len(read) - 1)], **inputs)
        logits = output.logits[..., written]
        output.logits = logits if is_whole else logits.masked_fill(lacking, float("-inf"))
        return output

    view: Any = copy.copy(draft_model)
    view.forward = forward
    return view


@dataclass
class _Row:
    """One text as the draft reads it."""

    ids: list[int] = field(default_factory=list)
    """The text's ids."""
    fed: list[int] = field(default_factory=list)
    """The ids in the cache."""
    settled: list[int] = field(default_factory=list)
    """The first of `ids`, which are not encoded again: those of the target's first `anchor` tokens."""
    anchor: int = 0
    window: int = 2 * WINDOW
    """Tokens that are encoded anew at least."""
    tail: list[int] = field(default_factory=list)
    """The target's last tokens, of which drafted text is the continuation."""
    text: str = ""
    """Their text, up to the last whole character."""
    before: list[int] = field(default_factory=list)
    """The draft's last ids."""


class _Reencoder(Proposer):
    """Drafts text greedily, and proposes what the target's tokenizer makes of it.

    The cache holds what the draft read, and is taken back to where a new encoding of the text departs from it. Forwards
    are never compiled, for the sizes of their blocks depend on the text. The draft's logits are not processed as the
    target's are: penalties and bans name the target's tokens. Special tokens go from one tokenizer to the other where
    both have them, and are left out elsewhere. Where a text gets longer than the draft's positions, nothing is drafted.
    """

    def __init__(
        self,
        draft_model: PreTrainedModel,
        draft_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        stop: Stop | None,
    ):
        check_model(draft_model, "draft model")
        self._draft_model, self._stop = draft_model, stop
        self._draft, self._target = draft_tokenizer, target_tokenizer
        self._draft_specials, self._target_specials = _specials(draft_tokenizer), _specials(target_tokenizer)
        self._to_draft = _same_specials(draft_tokenizer, target_tokenizer)
        self._to_target = _same_specials(target_tokenizer, draft_tokenizer)
        config = draft_model.config.get_text_config()
        self._size = min(config.vocab_size, max(draft_tokenizer.get_vocab().values()) + 1)
        self._positions: int | None = getattr(config, "max_position_embeddings", None)
        begin = draft_tokenizer.bos_token_id
        begins = begin is not None and draft_tokenizer.encode("a")[:1] == [begin]
        self._prefix = [begin] if begins else []

    def start(self, task: Task) -> int:
        """Begin with an empty cache."""
        if task.sampler.do_sample:
            tokens = self._target.get_vocab().keys()
            shared = len(tokens & self._draft.get_vocab().keys())
            raise InputError(
                "draft tokenizer: expected the target's tokens and merges under sampling, found other ones "
                f"({shared} of {len(tokens)} tokens are shared); decode at temperature 0"
            )
        self._task = task
        self._rows = [_Row() for _ in task.generators]
        self._renew(task.max_length)
        return task.draft_length

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain for each row: steps of the draft until its text gives more than the tokens asked for.

        More, because the last of them may be the beginning of a longer token; and how spaces are split is decided by
        what follows them.
        """
        rows = self._rows
        limits = [k * self._reads(row, context) for row, context, k in zip(rows, contexts, draft_lengths, strict=True)]
        drafted: list[list[int]] = [[] for _ in rows]
        found: list[list[int]] = [[] for _ in rows]
        going = [i for i, k in enumerate(limits) if k > 0]
        if going:
            logits = self._feed_texts(STEPS_PER_TOKEN * (max(limits) + 2))
        while going:
            chosen, left = logits.argmax(-1).tolist(), []
            for i in going:
                row, k, own = rows[i], limits[i], drafted[i]
                if self._stop is not None and self._stop(logits[i].float().softmax(-1)):
                    continue
                own.append(chosen[i])
                found[i] = self._continuation(row, own) or found[i]
                ends = own[-1] in self._draft_specials or not self._has_position(len(row.ids) + len(own) - 1)
                enough = len(found[i]) > k and not _decode(self._draft, own[-1:])[-1:].isspace()
                if not ends and not enough and len(own) < STEPS_PER_TOKEN * (len(found[i]) + 1):
                    left.append(i)
                    row.fed.append(own[-1])
            going = left
            if going:
                # Rows that have their draft are fed their last id again, into its own slot.
                last = torch.tensor([row.fed[-1:] for row in rows], device=self._draft_model.device)
                logits = self._model.feed(last, [len(row.fed) - 1 for row in rows])[:, 0, : self._size]
        drafts = []
        for context, k, tokens in zip(contexts, limits, found, strict=True):
            known = list(takewhile(lambda token: token < self._task.vocab_size, tokens[:k]))
            drafts.append(Proposal(context.new_tensor(known), None, Tree.chain(len(known))))
        return drafts

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows."""
        self._model.select(rows)
        self._rows = [self._rows[row] for row in rows]

    def _has_position(self, position: int) -> bool:
        return self._positions is None or position < self._positions

    def _reads(self, row: _Row, context: Tensor) -> bool:
        """Encode a row's text, and say whether the draft has positions for it.

        What comes before `anchor` is settled. The anchor moves where cutting the text makes no difference to its ids,
        and stays where it always does.
        """
        tokens = context[row.anchor :].tolist()
        ids = self._encoded(tokens)
        row.ids = row.settled + ids
        if len(tokens) >= 2 * row.window:
            latest = len(tokens) - row.window
            for cut in range(latest, latest - TRIES, -1):
                first = self._encoded(tokens[:cut])
                if first + self._encoded(tokens[cut:]) == ids:
                    row.settled, row.anchor = row.settled + first, row.anchor + cut
                    break
            else:
                row.window *= 2
        if row.ids[:1] != self._prefix:
            row.ids = self._prefix + row.ids
        if not row.ids:
            row.ids = [_stand_in(self._draft)]
        row.tail = _behind(context[-WINDOW:].tolist(), self._target_specials)
        row.text = _whole(self._target, row.tail)
        row.before = _behind(row.ids[-WINDOW:], self._draft_specials)
        if self._has_position(len(row.ids) - 1):
            return True
        row.ids = row.ids[:1]  # it goes on in the batch without being read
        return False

    def _encoded(self, tokens: Sequence[int]) -> list[int]:
        """Encode the text of the target's tokens for the draft; of an incomplete character nothing."""
        ids: list[int] = []
        for special, group in groupby(tokens, self._target_specials.__contains__):
            if special:
                ids += [self._to_draft[token] for token in group if token in self._to_draft]
            else:
                ids += _encode(self._draft, _whole(self._target, list(group)))
        return ids

    def _continuation(self, row: _Row, drafted: list[int]) -> list[int]:
        """Return the target's tokens that go on from its own with the text of the draft's.

        None where there are none, such as after half a character that the draft completes to another one.
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

    def _splits(self, row: _Row, text: str) -> Iterator[list[int]]:
        """Give tokens that say `text` behind the row's own, the way that the tokenizer itself would split it first."""
        whole = row.text + text
        tokens = _encode(self._target, whole)
        count = len(row.tail)
        if tokens[:count] == row.tail:
            yield tokens[count:]
            return
        # The text's own beginning may be split otherwise: it starts inside a word, or a prompt ended there.
        most = len(text.encode()) + 3  # a byte a token, and what a character that has begun lacks
        for start in range(len(tokens) - 1, max(-1, len(tokens) - 1 - most), -1):
            if _decode(self._target, row.tail + tokens[start:]) == whole:
                yield tokens[start:]
        # Or a token reaches over the border, where the target has decided for a shorter one.
        tokens = _encode(self._target, text)
        if _decode(self._target, row.tail + tokens) == whole:
            yield tokens

    def _feed_texts(self, room: int) -> Tensor:
        """Feed what the cache lacks of each text, with `room` for ids behind it; return the logits after it, (B, V)."""
        rows, device = self._rows, self._draft_model.device
        longest = max(len(row.ids) for row in rows)
        if longest + room > self._slots:
            self._renew(2 * (longest + room))
        # Of what is there already the last id is fed again, for its logits.
        cached = [min(_common(row.fed, row.ids), len(row.ids) - 1) for row in rows]
        if not any(cached):
            self._model.prefill_texts([torch.tensor(row.ids, device=device) for row in rows])
            cached = [len(row.ids) - 1 for row in rows]
        width = max(len(row.ids) - n for row, n in zip(rows, cached, strict=True))
        starts = [max(0, len(row.ids) - width) for row in rows]
        blocks = [torch.tensor(row.ids[start:], device=device) for row, start in zip(rows, starts, strict=True)]
        logits = self._model.feed(padded(blocks, width), starts)[..., : self._size]
        for row in rows:
            row.fed = list(row.ids)
        return torch.stack([logits[i, len(block) - 1] for i, block in enumerate(blocks)])

    def _renew(self, slots: int) -> None:
        """Begin with an empty cache of so many slots: how many ids a text has is not known beforehand."""
        self._slots = slots
        self._model = CachedModel(self._draft_model, len(self._rows), slots)
        for row in self._rows:
            row.fed = []


def _pipeline(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return all that decides how text is split, without ids and added tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["content"] for token in content["added_tokens"]}
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram's pieces and scores, in the order of their ids
        model["unk_id"] = None if model["unk_id"] is None else vocab[model["unk_id"]][0]
        scores = dict(vocab)
    else:
        scores = dict.fromkeys(vocab)
    model["vocab"] = {piece: score for piece, score in scores.items() if piece not in added}
    return {part: content[part] for part in ("normalizer", "pre_tokenizer", "decoder", "model")}


def _same_roles(to: PreTrainedTokenizerBase, of: PreTrainedTokenizerBase) -> dict[int, int]:
    """Map the tokens that begin and end texts, pad, or stand for what is unknown."""
    pairs = ((getattr(of, role), getattr(to, role)) for role in (f"{r}_token_id" for r in ("unk", "pad", "bos", "eos")))
    return {a: b for a, b in pairs if a is not None and b is not None}


def _same_specials(to: PreTrainedTokenizerBase, of: PreTrainedTokenizerBase) -> dict[int, int]:
    """Map the special tokens that both have, by name or else by role."""
    known, own_specials, specials = to.get_vocab(), _specials(to), _specials(of)
    ids = {token: known.get(piece) for piece, token in of.get_vocab().items() if token in specials}
    return _same_roles(to, of) | {token: own for token, own in ids.items() if own in own_specials}


def _specials(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that are no text. Added tokens that are not special are text, such as runs of spaces."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}


def _stand_in(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that says the least."""
    candidates = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in candidates if token is not None), 0)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _whole(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decode up to the last whole character."""
    text = _decode(tokenizer, ids)
    if not text.endswith(REPLACEMENT):
        return text
    # Half a character takes the whole ones before it along where a decoder joins all bytes in a row.
    return max((_decode(tokenizer, ids[: len(ids) - n]).rstrip(REPLACEMENT) for n in range(4)), key=len)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False)) if text else []


def _behind(ids: list[int], specials: frozenset[int]) -> list[int]:
    """Return the ids behind the last special one."""
    return list(takewhile(lambda token: token not in specials, reversed(ids)))[::-1]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids two lists begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
