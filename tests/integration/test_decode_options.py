"""What surrounds the round loop: streamers, observers, stop strings, lengths, compiled forwards, early stops."""

import itertools

import pytest
import torch
from conftest import tiny_llama
from specimens import wavering
from transformers.generation.streamers import BaseStreamer

from draftsmith.decode import (
    DraftModelProposer,
    InputError,
    autoregressive_generate,
    speculative_decode,
    speculative_generate,
)
from draftsmith.decode.speculative import Round
from draftsmith.decode.tree import Tree

GREEDY = {"max_new_tokens": 24, "do_sample": False}
TREES = [None, Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])]


def batch(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of these lengths, and their mask."""
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, n in enumerate(lengths):
        ids[row, width - n :] = torch.randint(1, 97, (n,), generator=torch.Generator().manual_seed(row))
        mask[row, width - n :] = 1
    return ids, mask


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.bursts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.bursts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamers_get_the_prompt_and_then_bursts_of_accepted_tokens(target, draft):
    ids, _ = batch(6)
    collector = Collector()
    out = speculative_generate(target, DraftModelProposer(draft), ids, streamer=collector, **GREEDY)
    assert collector.bursts[0] == ids[0].tolist()
    assert list(itertools.chain(*collector.bursts)) == out.sequences[0].tolist()
    assert len(collector.bursts) - 1 == out.counts.num_drafts and collector.ended == 1
    assert max(map(len, collector.bursts[1:])) > 1
    with pytest.raises(InputError, match="streamer: expected one prompt, found 2"):
        speculative_generate(target, DraftModelProposer(draft), batch(3, 4)[0], streamer=Collector(), **GREEDY)


@pytest.mark.parametrize("tree", TREES)
def test_observers_see_every_round_of_every_row(target, draft, tree):
    ids, mask = batch(3, 7, 5)
    rounds: list[Round] = []
    out = speculative_generate(
        target, DraftModelProposer(draft, tree), ids, mask, draft_length=3, observer=rounds.append, **GREEDY
    )
    for row, counts in enumerate(out.row_counts):
        own = [r for r in rounds if r.row == row]
        assert list(itertools.chain(*(r.tokens for r in own))) == out.sequences[row, 7:].tolist()
        assert [r.done for r in own] == [False] * (len(own) - 1) + [True]
        assert (len(own), sum(r.accepted for r in own)) == (counts.num_drafts, counts.num_accepted_tokens)
        assert all(r.accepted <= r.drafted <= 3 and len(r.tokens) - r.accepted in (0, 1) for r in own)


def test_stop_strings_end_the_text_inside_a_block(tokenizer):
    target = tiny_llama(0, len(tokenizer))
    target.generation_config.pad_token_id = tokenizer.pad_token_id
    ids = torch.tensor([[40, 41, 42]])
    mask = torch.ones_like(ids)
    whole = autoregressive_generate(target, ids, **GREEDY)
    assert whole.finish_reasons == ("length",)
    plain, places = whole.sequences, set()
    for text in map(tokenizer.decode, plain[0, 4:-1].tolist()):
        if not (text.isascii() and text.isprintable()):
            continue  # half a character is no text
        options = {"stop_strings": [text], "tokenizer": tokenizer, **GREEDY}
        library = target.generate(ids, attention_mask=mask, **options)
        out = speculative_generate(target, DraftModelProposer(target), ids, draft_length=5, **options)
        assert torch.equal(out.sequences, library) and library.shape[1] < plain.shape[1]
        assert out.finish_reasons == ("stop",)
        assert torch.equal(autoregressive_generate(target, ids, **options).sequences, library)
        assert out.counts.draft_acceptance_rate() in (1.0, None)
        places.add((library.shape[1] - 4) % 6)
    assert len(places) >= 3, "the texts were meant to end at different places of a block"
    with pytest.raises(InputError, match="tokenizer: expected the target's tokenizer with stop_strings"):
        speculative_generate(target, DraftModelProposer(target), ids, stop_strings=["x"], **GREEDY)


@pytest.mark.parametrize("tree", TREES)
def test_rows_that_end_early_leave_the_others_as_they_would_be_alone(target, draft, tree):
    ids, mask = batch(3, 7, 5, 2, 6)
    plain = autoregressive_generate(target, ids, mask, **GREEDY).sequences
    ends = [int(plain[row, 7 + offset]) for row, offset in ((0, 2), (2, 9), (4, 15))]
    out = speculative_generate(
        target, DraftModelProposer(draft, tree), ids, mask, draft_length=3, eos_token_id=ends, **GREEDY
    )
    lengths = set()
    for row, counts in enumerate(out.row_counts):
        own = ids[row : row + 1, mask[row] == 1]
        alone = speculative_generate(
            target, DraftModelProposer(draft, tree), own, draft_length=3, eos_token_id=ends, **GREEDY
        )
        n = counts.num_emitted_tokens
        lengths.add(n)
        assert torch.equal(out.sequences[row, 7 : 7 + n], alone.sequences[0, own.shape[1] :])
        assert counts == alone.counts
    assert len(lengths) >= 3, "the rows were meant to end at different times"


@pytest.mark.parametrize("tree", TREES)
def test_sampled_rows_are_as_alone_up_to_the_length_limit(target, draft, tree):
    ids, mask = batch(3, 7, 5)
    options = {"max_new_tokens": 12, "do_sample": True, "draft_length": 3}
    out = speculative_generate(target, DraftModelProposer(draft, tree), ids, mask, seed=5, **options)
    for row in range(3):
        own = ids[row : row + 1, mask[row] == 1]
        alone = speculative_generate(target, DraftModelProposer(draft, tree), own, seed=5 + row, **options)
        assert torch.equal(out.sequences[row, 7:], alone.sequences[0, own.shape[1] :])


def test_the_librarys_own_door_takes_batches(target, draft):
    ids, mask = batch(3, 7, 5)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    options = {"proposer": DraftModelProposer(draft), "draft_length": 3, "rule": "exact"}
    out = target.generate(ids, attention_mask=mask, custom_generate=speculative_decode, **options, **GREEDY)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("options", [{"top_k": 0}, {"repetition_penalty": 1.3}, {"do_sample": False}])
@pytest.mark.parametrize("lengths", [(5,), (3, 6, 4)])
def test_rounds_without_drafts_are_plain_decoding(target, draft, options, lengths):
    """Sampled texts are the same, too: such a round takes the one random number that plain decoding takes."""
    ids, mask = batch(*lengths)
    options = {"max_new_tokens": 24, "do_sample": True, "seed": 5, **options}
    idle = speculative_generate(target, wavering(DraftModelProposer(draft), [0]), ids, mask, **options)
    assert idle.sequences.tolist() == autoregressive_generate(target, ids, mask, **options).sequences.tolist()
    assert idle.counts.num_draft_tokens == 0 and idle.counts.num_drafts == 24 * len(lengths)
