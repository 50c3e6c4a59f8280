"""Drafters of every kind in the list: texts at T=0 are plain decoding's, and replay counts what the decoder counts."""

import numpy as np
import pytest
import torch
from specimens import every_kind, every_shape, proposer, specimen

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.sampling import Sampler

PROMPT, NEW = 8, 20


@every_kind()
def test_it_has_a_specimen(kind):
    assert specimen(kind).shapes


def test_a_kind_without_a_specimen_fails_with_one_line():
    with pytest.raises(pytest.fail.Exception, match=r"^nothing: expected a specimen in .*, found none$"):
        specimen("nothing")


@pytest.mark.parametrize("ended", [False, True], ids=["whole", "ended"])
@every_shape
def test_texts_are_plain_decodings_and_replay_counts_the_same(deep, kind, shape, ended):
    """Texts that their limit ends, and rows of which some end before."""
    drafter, rows = proposer(kind, shape, deep), 3 if specimen(kind).batched else 1
    prompts = torch.randint(1, 97, (rows, 4), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    options = {"max_new_tokens": NEW, "do_sample": False}
    written = autoregressive_generate(deep, prompts, **options)
    if ended:
        options["eos_token_id"] = [int(written.sequences[0, PROMPT + 6]), int(written.sequences[-1, PROMPT + 12])]
        written = autoregressive_generate(deep, prompts, **options)
    plain = written.sequences
    texts = [row[: PROMPT + counts.num_emitted_tokens] for row, counts in zip(plain, written.row_counts, strict=True)]
    assert ended == any(len(text) < PROMPT + NEW for text in texts)
    rounds = {1: [], 3: []}
    decoded = {
        k: speculative_generate(deep, drafter, prompts, draft_length=k, observer=seen.append, **options)
        for k, seen in rounds.items()
    }
    assert all(torch.equal(out.sequences, plain) for out in decoded.values())
    assert sum(out.counts.num_draft_tokens for out in decoded.values()) > 0
    if drafter.replay_refusal(False) is not None:
        return
    # Each token is a stretch of its own, so that the sums are the decoder's rounds one by one.
    lengths, each = [PROMPT] * rows, [np.arange(len(text) - PROMPT) for text in texts]
    replayed = replay_drafters(deep, {"": drafter}, texts, lengths, list(decoded), Sampler.of(0), NEW, stretches=each)[
        ""
    ]
    for k, out in decoded.items():
        for text, counts in zip(replayed.texts, out.row_counts, strict=True):
            for name, count in counts.to_dict().items():
                assert getattr(text.counts[k], name) == pytest.approx(count), (k, name)
        for row, text in enumerate([] if ended else replayed.texts):  # of a cut draft the decoder counts what is left
            by_size, accepted = (np.zeros_like(getattr(text.stretches, name)[k]) for name in ("rounds", "accepted"))
            start = 0
            for round in (round for round in rounds[k] if round.row == row):
                by_size[round.source, round.nodes, start] += 1
                accepted[round.source, start : start + round.accepted] += 1
                start += len(round.tokens)
            assert text.stretches.rounds[k].tolist() == by_size.tolist()
            assert text.stretches.accepted[k].tolist() == accepted.tolist()
    for text in replayed.texts:
        assert text.stretches.contexts.sum() == text.contexts
        assert text.stretches.overlap.sum() == pytest.approx(text.overlap)
