"""A target and its drafters: what their positions hold."""

import pytest
from conftest import tiny_llama

from draftsmith.decode import DraftModelProposer, PromptLookupProposer
from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter, Pair


def test_a_drafters_positions_do_not_limit_the_text_and_what_it_leaves_out_is_said(capsys):
    target, draft = tiny_llama(0, 97), tiny_llama(1, 97)
    draft.config.max_position_embeddings = 24
    drafters = [
        Drafter("short", "draft", None, None, DraftModelProposer(draft), model=draft),
        Drafter("copies", "prompt_lookup", None, None, PromptLookupProposer()),
    ]
    pair = Pair(target, None, "float32", drafters)
    pair.check_positions(500, 12)
    with pytest.raises(InputError, match=r"^max_new_tokens: .* within the target's 512 positions, found 501 \+ 12 tok"):
        pair.check_positions(501, 12)
    assert pair.holds(24) and not pair.holds(25)
    pair.warn_undrafted([10, 30], [25, 45])
    assert not capsys.readouterr().err.count("copies")
    pair.warn_undrafted([10, 30], [28, 45])
    assert capsys.readouterr().err == "short: drafted none of 18 of 33 tokens, past its 24 positions\n"
