"""Which of a model's logits are tokens, and texts with tokens that have none, as multimodal Gemmas' tokenizers make."""

import pytest
from conftest import tiny_llama
from gemma import IMAGE, TURN_ENDS, gemma_tokenizer, save_gemma, tiny_gemma

from draftsmith.decode.draft_models.parallel import unused_token
from draftsmith.decode.draft_models.vocabulary import require_logits, token_count
from draftsmith.decode.errors import InputError
from draftsmith.train.data.chat_masks import mask_conversation
from draftsmith.train.data.prompts import Prompt, encode_prompt
from draftsmith.train.models import check_head, check_same_tokenizer, load_tokenizer


def test_tokens_behind_all_logits_and_logits_behind_all_tokens_do_not_count() -> None:
    tokenizer, model = gemma_tokenizer(), tiny_gemma()
    rows = model.config.vocab_size
    assert tokenizer.convert_tokens_to_ids(IMAGE) == rows
    assert token_count(tokenizer, model.config) == rows
    assert token_count(tokenizer, tiny_llama(0, rows + 20).config) == rows + 1


def test_only_pieces_of_text_and_what_the_target_writes_need_logits() -> None:
    tokenizer, model = gemma_tokenizer(), tiny_gemma()
    rows = model.config.vocab_size
    wide = tiny_llama(0, rows + 1)
    check_head(model, tokenizer, "target")
    check_head(model, tokenizer, "draft", model)
    check_head(wide, tokenizer, "draft", model)
    with pytest.raises(InputError, match=f"draft: expected a vocabulary of at least {rows + 1} for .* {rows}$"):
        check_head(model, tokenizer, "draft", wide)  # which can write the token that the draft cannot read
    with pytest.raises(InputError, match=r"target: expected a vocabulary of at least \d+ for its tokenizer, found 200"):
        check_head(tiny_llama(0, 200), tokenizer, "target")


def test_tokenizers_are_compared_where_texts_have_tokens() -> None:
    with_image, without = gemma_tokenizer(), gemma_tokenizer(image=False)
    rows = len(without)
    for one, other in ((with_image, without), (without, with_image)):
        check_same_tokenizer(one, other, "t", "d", vocab_size=rows)
        with pytest.raises(InputError, match=f"found 1 tokens that differ, the first {rows}"):
            check_same_tokenizer(one, other, "t", "d", vocab_size=rows + 1)


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_with_a_token_that_has_no_logit_is_refused(chat) -> None:
    tokenizer, rows = gemma_tokenizer(chat=chat), tiny_gemma().config.vocab_size
    wrong = (
        f"expected tokens below the model's vocabulary of {rows}, found '{IMAGE}', which its tokenizer numbers {rows}"
    )
    require_logits([1, rows - 1], tokenizer, rows, "it")
    for content in ("print(x)", f"print({IMAGE})"):
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
        prompt = Prompt("7", None, messages[:1], None)
        if IMAGE in content:
            with pytest.raises(InputError, match=rf"^prompt '7': {wrong}$"):
                encode_prompt(prompt, tokenizer, vocab_size=rows)
            with pytest.raises(InputError, match=rf"^sample 's': {wrong}$"):
                mask_conversation(messages, tokenizer, "s", vocab_size=rows)
        else:
            assert max(encode_prompt(prompt, tokenizer, vocab_size=rows)) < rows
            assert any(mask_conversation(messages, tokenizer, "s", vocab_size=rows).mask)


def test_padding_has_an_embedding(tmp_path) -> None:
    """A pad token that was added without resizing the model is not one to feed."""
    tokenizer = gemma_tokenizer()
    tokenizer.pad_token = IMAGE
    loaded = load_tokenizer(save_gemma(tmp_path, tokenizer))
    assert loaded.pad_token == loaded.eos_token == "<eos>"
    tokenizer.pad_token = TURN_ENDS
    assert load_tokenizer(save_gemma(tmp_path, tokenizer)).pad_token == TURN_ENDS


def test_a_mask_token_has_an_embedding() -> None:
    tokenizer, rows = gemma_tokenizer(), tiny_gemma().config.vocab_size
    assert unused_token(tokenizer, rows) == rows - 1
    assert unused_token(tokenizer, rows + 9) == rows + 1
