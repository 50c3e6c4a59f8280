"""What the draft service loads: hybrids with their stores, and what it refuses to serve."""

import pytest
from conftest import tiny_llama

from draftsmith.decode import InputError, SuffixStore
from draftsmith.scripts.services.draft_protocol import DraftRow
from draftsmith.scripts.services.serve_draft.command import load_texts
from draftsmith.scripts.services.serve_draft.config import ServeDraftConfig
from draftsmith.train.kinds.untrained import vocabulary_digest

EARLIER = [10, 11, 12, 13, 14]


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("draft")
    tiny_llama(1, len(tokenizer), layers=1).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def loaded(drafter: str, **fields):
    return load_texts(ServeDraftConfig(drafter=[drafter], dtype="float32", device="cpu", **fields))


def ask(texts, tokens: list[int], want: int = 2) -> tuple[list[int] | None, int]:
    """A draft behind a text, and how many were copied."""
    before = texts.copied
    (draft,) = texts.draft([0], [DraftRow(0, 0, tokens, want)])
    return draft, texts.copied - before


def test_a_hybrid_copies_where_its_switch_says_so(directory):
    alone, hybrid = loaded(str(directory)), loaded(f"hybrid:prompt_lookup+suffix+{directory}@match=3")
    assert ask(hybrid, [1, 2, 3, 4, 5, 1, 2, 3]) == ([4, 5], 1)
    short = [1, 2, 3, 4, 5, 9, 2, 3]
    assert ask(hybrid, short) == (ask(alone, short)[0], 0)


def test_a_store_of_the_drafts_tokenizer_is_copied_from(directory, tokenizer, tmp_path):
    store = SuffixStore(len(tokenizer), tokenizer=vocabulary_digest(tokenizer))
    store.add(EARLIER)
    store.save(tmp_path / "store")
    drafter = f"hybrid:suffix:2,{tmp_path / 'store'}+{directory}"
    assert ask(loaded(drafter), EARLIER[:3]) == ([13, 14], 1)
    other = SuffixStore(len(tokenizer), tokenizer="another")
    other.save(tmp_path / "store")
    with pytest.raises(InputError, match="store: expected texts of the target's tokenizer"):
        loaded(drafter)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ("hybrid:suffix+prompt_lookup", "drafter: expected a draft model, .* found n-grams"),
        ("hybrid:suffix+run_ahead:DIR", "drafter: expected a draft model, .* found draft that runs ahead"),
        ("hybrid:DIR+DIR", "drafter: expected drafters that copy .* found draft model"),
        ("hybrid:suffix+DIR@often", "drafter: expected match=TOKENS, .* found often"),
        ("suffix", "drafter: expected a draft model, .* found suffix matches"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(directory, drafter, words):
    with pytest.raises(InputError, match=words) as error:
        loaded(drafter.replace("DIR", str(directory)))
    assert "\n" not in str(error.value)
