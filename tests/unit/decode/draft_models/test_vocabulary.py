"""Which of a model's logits are tokens, and texts with tokens that have none, as multimodal Gemmas' tokenizers make."""

import json

import pytest
from conftest import tiny_llama
from gemma import IMAGE, TURN_ENDS, gemma_tokenizer, save_gemma, tiny_gemma

from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.distill.parallel.layout import unused_token
from draftsmith.train.data.prompts import Prompt, encode_prompt, read_prompts
from draftsmith.train.models import check_head, check_same_tokenizer, load_tokenizer


def test_tokens_behind_all_logits_and_logits_behind_all_tokens_do_not_count() -> None:
    tokenizer, model = gemma_tokenizer(), tiny_gemma()
    rows = model.config.vocab_size
    assert tokenizer.convert_tokens_to_ids(IMAGE) == rows
    assert token_count(tokenizer, model.config) == rows
    assert token_count(tokenizer, tiny_llama(0, rows + 20).config) == rows + 1


def test_only_pieces_of_text_and_what_the_target_writes_need_logits() -> None:
    tokenizer, model = gemma_tokenizer(), tiny_gemma().config
    rows = model.vocab_size
    wide = tiny_llama(0, rows + 1).config
    check_head(model, tokenizer, "target")
    check_head(model, tokenizer, "draft", model)
    check_head(wide, tokenizer, "draft", model)
    with pytest.raises(InputError, match=f"draft: expected a vocabulary of at least {rows + 1} for .* {rows}$"):
        check_head(model, tokenizer, "draft", wide)  # which can write the token that the draft cannot read
    with pytest.raises(InputError, match=r"target: expected a vocabulary of at least \d+ for its tokenizer, found 200"):
        check_head(tiny_llama(0, 200).config, tokenizer, "target")


def test_tokenizers_are_compared_where_texts_have_tokens() -> None:
    with_image, without = gemma_tokenizer(), gemma_tokenizer(image=False)
    rows = len(without)
    for one, other in ((with_image, without), (without, with_image)):
        check_same_tokenizer(one, other, "t", "d", vocab_size=rows)
        with pytest.raises(InputError, match=f"found 1 tokens that differ, the first {rows}"):
            check_same_tokenizer(one, other, "t", "d", vocab_size=rows + 1)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_with_a_token_that_has_no_logit_is_refused(chat, tmp_path) -> None:
    tokenizer, rows, file = gemma_tokenizer(chat=chat), tiny_gemma().config.vocab_size, tmp_path / "prompts.jsonl"
    wrong = (
        f"expected tokens below the model's vocabulary of {rows}, found '{IMAGE}', which its tokenizer numbers {rows}"
    )
    messages = [[{"role": "user", "content": content}] for content in ("print(x)", f"print({IMAGE})")]
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    harmless, prompt = read_prompts(str(file))
    assert max(encode_prompt(harmless, tokenizer, vocab_size=rows)) < rows
    with pytest.raises(InputError, match=rf"^{file}:2: prompt '1': {wrong}$"):
        encode_prompt(prompt, tokenizer, vocab_size=rows)
    assert rows in encode_prompt(prompt, tokenizer)
    with pytest.raises(InputError, match=rf"^prompt 'x': {wrong}$"):
        encode_prompt(Prompt("x", None, messages[1], None), tokenizer, vocab_size=rows)


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
