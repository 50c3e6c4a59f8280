"""Tokenizers that match, and models that are renumbered."""

import json

import pytest
import torch
from bpe import END_OF_TEXT, PADDING, train_bpe
from conftest import TEXTS, tiny_llama
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.proposers.renumbered import matching_ids, renumber_draft

CJK = ["你好，世界！你好吗？", "naïve café — naïve café", "😀😀👩‍👩‍👧 x = '😀'", "  four   spaces\n\n\ttab"]


def content(tokenizer: PreTrainedTokenizerFast) -> dict:
    return json.loads(tokenizer.backend_tokenizer.to_str())


def rebuilt(parts: dict, end: str = END_OF_TEXT, **roles: str) -> PreTrainedTokenizerFast:
    roles = {"bos_token": end, "eos_token": end, "pad_token": end} | roles
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)), **roles)


def permuted(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Return the same tokenizer with other ids, and the new id of each old one."""
    parts, size = content(tokenizer), len(tokenizer)
    new = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    parts["model"]["vocab"] = {piece: new[i] for piece, i in parts["model"]["vocab"].items()}
    for token in parts["added_tokens"]:
        token["id"] = new[token["id"]]
    return rebuilt(parts, pad_token=PADDING), new


def with_merges(tokenizer: PreTrainedTokenizerFast, count: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the same ids that knows the first merges alone: it never says the longer tokens."""
    parts = content(tokenizer)
    parts["model"]["merges"] = parts["model"]["merges"][:count]
    return rebuilt(parts, pad_token=PADDING)


def unigram(texts: list[str]) -> PreTrainedTokenizerFast:
    """A Unigram model over bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.UnigramTrainer(
        vocab_size=330, special_tokens=["<unk>", "</s>"], unk_token="<unk>", initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


def wordpiece(texts: list[str]) -> PreTrainedTokenizerFast:
    """Lower case, spaces lost: text that does not come back as it was."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]", pad_token="[SEP]")


# Tokenizers that match


def test_a_permuted_tokenizer_matches(tokenizer):
    other, new = permuted(tokenizer)
    assert other.get_vocab() != tokenizer.get_vocab()
    assert matching_ids(other, tokenizer) == dict(enumerate(new))
    assert matching_ids(tokenizer, other) == {b: a for a, b in enumerate(new)}
    for text in TEXTS + CJK:
        assert [new[i] for i in tokenizer.encode(text)] == other.encode(text)


@pytest.mark.parametrize("kind", [unigram, wordpiece])
def test_a_permuted_unigram_or_wordpiece_matches(kind):
    tokenizer = kind(TEXTS)
    parts = content(tokenizer)
    vocab = parts["model"]["vocab"]
    if isinstance(vocab, list):
        vocab.reverse()
        parts["model"]["unk_id"] = len(vocab) - 1 - parts["model"]["unk_id"]
        for token in parts["added_tokens"]:
            token["id"] = len(vocab) - 1 - token["id"]
    else:
        parts["model"]["vocab"] = {piece: len(vocab) - 1 - i for piece, i in vocab.items()}
        for token in parts["added_tokens"]:
            token["id"] = len(vocab) - 1 - token["id"]
    other = rebuilt(parts, tokenizer.eos_token, unk_token=tokenizer.unk_token)
    assert matching_ids(other, tokenizer) == {i: len(vocab) - 1 - i for i in range(len(vocab))}


def test_other_merges_scores_or_kinds_do_not_match(tokenizer):
    same_pieces = with_merges(tokenizer, 20)
    assert same_pieces.get_vocab() == tokenizer.get_vocab()
    parts = content(unigram(TEXTS))
    parts["model"]["vocab"][40][1] -= 1.0
    spaced = content(tokenizer)
    spaced["pre_tokenizer"]["add_prefix_space"] = True
    others = [same_pieces, train_bpe(TEXTS + CJK, 300), train_bpe(TEXTS, 280), rebuilt(spaced), unigram(TEXTS)]
    for other in others:
        assert matching_ids(other, tokenizer) is None and matching_ids(tokenizer, other) is None
    assert matching_ids(unigram(TEXTS), rebuilt(parts, "</s>", unk_token="<unk>")) is None


def test_added_tokens_may_differ_and_go_by_name_or_role(tokenizer):
    size = len(tokenizer)
    more, _ = permuted(tokenizer)
    more.add_tokens(["<think>", "<tool>"])
    ids = matching_ids(more, tokenizer)
    assert len(ids) == size and set(ids.values()) == set(range(size))
    assert set(matching_ids(tokenizer, more)) == set(range(size))  # the target's own two are missing
    parts = json.loads(json.dumps(content(tokenizer)).replace(END_OF_TEXT, "</s>"))
    renamed = rebuilt(parts, "</s>", pad_token=PADDING)
    assert matching_ids(renamed, tokenizer) == {i: i for i in range(size)}


# Models that are renumbered


def test_a_renumbered_model_says_the_same_of_the_tokens_that_both_have():
    """The mass of what the target lacks is gone before a token is drawn; what the draft lacks is never drafted."""
    model = tiny_llama(0, 12)
    ids = {0: 7, 1: 3, 2: 11, 4: 0, 5: 99}  # 3 has no counterpart, nor has 5 a logit
    view = renumber_draft(model, ids, stand_in=9)
    text = torch.tensor([[0, 2, 3, 1, 4, 8]])  # 8: an entry of the target's padding
    q = view(input_ids=text).logits.softmax(-1)
    own = model(input_ids=torch.tensor([[7, 11, 9, 3, 0, 9]])).logits[..., [7, 3, 11, 0]].softmax(-1)
    assert q.shape == (1, 6, 6)
    assert torch.equal(q[..., [3, 5]], torch.zeros(1, 6, 2))
    torch.testing.assert_close(q[..., [0, 1, 2, 4]], own)
    assert model.forward.__func__ is type(model).forward  # the model itself is as it was


def test_of_two_ends_that_are_one_to_the_draft_the_later_is_drafted():
    view = renumber_draft(tiny_llama(0, 12), {0: 5, 1: 5, 2: 6}, stand_in=0)
    logits = view(input_ids=torch.tensor([[0, 1, 2]])).logits
    assert torch.isneginf(logits[..., 0]).all() and torch.isfinite(logits[..., 1:]).all()
