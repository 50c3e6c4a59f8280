"""What the entries of a parallel draft's forward see, and which token serves as mask."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftsmith.decode.errors import InputError
from draftsmith.distill.parallel.layout import mask_token_of, unused_token, visible_entries


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
