"""Chains of masks, and where they are laid out."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftsmith.decode.errors import InputError
from draftsmith.distill.parallel.chains import ALIGNED, draw_lengths, kept_shares, make_chains
from draftsmith.distill.parallel.layout import mask_token_of, unused_token, visible_entries
from draftsmith.distill.parallel.model import _blocks
from draftsmith.train.data.examples import ahead_positions


def test_shares_fall_geometrically_to_the_least():
    assert kept_shares(5, 0.5, 0.2).tolist() == [0.5, 0.25, 0.2, 0.2]
    assert kept_shares(4, 1.0, 0.0).tolist() == [1.0, 1.0, 1.0]
    assert kept_shares(8, 0.5, 0.05).sum() == pytest.approx(1.0875)  # further tokens a place, by default


def test_lengths_follow_from_the_seeds_alone():
    shares = kept_shares(6, 0.7, 0.2)
    one = draw_lengths(50, shares, 0, 3, "masks", 7)
    assert one.tolist() == draw_lengths(50, shares, 0, 3, "masks", 7).tolist()
    assert one.tolist() != draw_lengths(50, shares, 0, 4, "masks", 7).tolist()
    assert one.tolist() != draw_lengths(50, shares, 0, 3, "masks", 8).tolist()
    assert draw_lengths(3, kept_shares(4, 1.0, 0.0), 1).tolist() == [3, 3, 3]


def test_lengths_have_the_law_of_their_shares():
    """Chi-square over 20,000 anchors; false-alarm probability 1e-3 over the choice of seed."""
    shares = kept_shares(6, 0.6, 0.1)
    counts = np.bincount(draw_lengths(20_000, shares, 5), minlength=6)
    law = -np.diff([1.0, *shares, 0.0])
    assert chisquare(counts[law > 0], 20_000 * law[law > 0]).pvalue > 1e-3
    assert counts[law <= 0].sum() == 0


def test_chains_end_with_the_tokens_that_carry_a_loss_and_with_the_row():
    # Two rows of 8 tokens: answers x3…x6 and x2, x3, x5, x6.
    predicted = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 1, 1, 0]]).bool()
    flat = ahead_positions(predicted, 0)[0]
    assert flat.tolist() == [2, 3, 4, 5, 9, 10, 12, 13]
    chains = make_chains(flat, (2, 8), torch.tensor([3, 1, 5, 5, 0, 4, 4, 4]))
    assert chains.offsets_E.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0]
    assert chains.indices_E.tolist() == [0, 1, 2, 3, 1, 2, 2, 3, 3, 4, 5, 6, 7, 7]
    assert chains.spans_E.tolist() == chains.indices_E.tolist()
    masks = chains.positions_BM.shape[1]
    assert masks == 8 and (8 + masks) % ALIGNED == 0  # five of them, filled up
    assert chains.positions_BM.tolist() == [[3, 4, 5, 4, 5, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0]]
    assert chains.anchors_BM.tolist() == [[2, 2, 2, 3, 4, -1, -1, -1], [4] + [-1] * 7]
    assert chains.entries_E.tolist() == [2, 8, 9, 10, 3, 11, 4, 12, 5, 17, 18, 20, 24, 21]
    assert chains.texts_BL is None
    assert chains.work == (16, sum([4, 5, 6, 5, 6, 6]) + 10, 6)


def test_places_that_are_left_out_have_no_entry():
    chains = make_chains(torch.tensor([1, 2, 3]), (1, 8), torch.tensor([-1, 2, -1]))
    assert chains.indices_E.tolist() == [1, 2] and chains.offsets_E.tolist() == [0, 1]


def test_masks_of_packed_rows_stand_in_their_texts():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])
    chains = make_chains(torch.tensor([1, 2, 4, 5]), (1, 8), torch.tensor([2, 2, 2, 2]), positions)
    assert chains.offsets_E.tolist() == [0, 1, 0, 0, 1, 0]
    assert chains.positions_BM[0, :2].tolist() == [2, 1] and chains.anchors_BM[0, :2].tolist() == [1, 0]
    assert chains.texts_BL is not None
    assert chains.texts_BL[0, :10].tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 1, 2]
    assert (chains.texts_BL[0, 10:] == 0).all()  # what fills up the row is in none


def test_a_step_without_room_for_masks_has_none():
    chains = make_chains(torch.tensor([3]), (1, 8), torch.tensor([7]))
    assert chains.positions_BM.shape == (1, 0) and chains.entries_E.tolist() == [3]


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_flex_attention_is_told_the_same_as_other_kinds(packed, window):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]]) if packed else torch.arange(8)[None]
    flat = torch.tensor([1, 2, 4, 5]) if packed else torch.arange(2, 7)
    chains = make_chains(flat, (1, 8), torch.full((len(flat),), 2), positions if packed else None)
    entries = torch.cat([positions, chains.positions_BM], dim=1), torch.cat([positions, chains.anchors_BM], dim=1)
    visible = visible_entries(*entries, chains.texts_BL)[0]
    if window:
        visible &= entries[0].T - entries[0] < window
    number = torch.arange(len(visible))
    told = _blocks(*entries, chains.texts_BL, window).mask_mod(torch.tensor(0), None, number[:, None], number)
    assert torch.equal(told, visible)


def test_a_mask_sees_the_text_up_to_its_anchor_and_the_earlier_masks_of_its_draft() -> None:
    # x0 x1 x2, then two masks behind x0 and one behind x1
    positions, anchors = torch.tensor([[0, 1, 2, 1, 2, 2]]), torch.tensor([[0, 1, 2, 0, 0, 1]])
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert visible_entries(positions, anchors)[0].int().tolist() == expected


def test_texts_of_a_row_do_not_see_each_other() -> None:
    positions, anchors = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 0, 0, 0]])
    visible = visible_entries(positions, anchors, torch.tensor([[0, 0, 1, 1]]))[0]
    assert visible.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_a_model_without_a_mask_token_is_no_parallel_draft() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    for token in (None, 16, "1"):
        model.config.pard_token = token
        with pytest.raises(InputError, match=f"expected pard_token in the config, a token below 16, found {token}"):
            mask_token_of(model)
    model.config.pard_token = 3
    assert mask_token_of(model) == 3


def test_a_padded_vocabulary_lends_its_first_row_and_otherwise_padding_serves() -> None:
    tokenizer = AutoTokenizer.from_pretrained("assets/tiny-target")
    assert unused_token(tokenizer, 4096 + 64) == 4096
    assert unused_token(tokenizer, 4096) == tokenizer.pad_token_id


def test_padding_that_ends_texts_too_is_no_mask() -> None:
    tokenizer = AutoTokenizer.from_pretrained("assets/tiny-target")
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    assert unused_token(tokenizer, 4096) == 1  # which has no name now
