"""A draft that runs ahead: the same text as without, whichever thread is faster, and nothing left running."""

import sys
import threading
import time

import pytest
import torch
from conftest import perturbed, tiny_llama
from transformers import LogitsProcessorList, NoBadWordsLogitsProcessor

from draftsmith.decode import DraftModelProposer, InputError, autoregressive_generate, speculative_generate
from draftsmith.decode.proposers.run_ahead import RunAheadProposer
from draftsmith.decode.sampling import Sampler


def prompt(seed: int, length: int = 7, vocab_size: int = 97) -> torch.Tensor:
    return torch.randint(1, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "draft-ahead"]


@pytest.fixture(autouse=True)
def nothing_runs_on():
    """What runs ahead at the end of a text ends by itself."""
    yield
    for thread in ahead_threads():
        thread.join(timeout=30)
    assert not ahead_threads()


@pytest.mark.parametrize(("noise", "draft_length"), [(0.0, 4), (0.01, 1), (0.3, 4)])
def test_greedy_output_is_plain_decoding_and_counts_are_those_of_a_draft_that_waits(target, noise, draft_length):
    draft = perturbed(target, noise)
    proposer, rounds = RunAheadProposer(draft), 0
    for seed in range(2):
        options = {"max_new_tokens": 24, "do_sample": False}
        plain = autoregressive_generate(target, prompt(seed), **options)
        out = speculative_generate(target, proposer, prompt(seed), draft_length=draft_length, **options)
        waiting = speculative_generate(
            target, DraftModelProposer(draft), prompt(seed), draft_length=draft_length, **options
        )
        assert torch.equal(out.sequences, plain.sequences)
        assert out.counts == waiting.counts
        rounds += out.counts.num_drafts
    assert 0 < proposer.num_ahead <= rounds
    if noise == 0:  # all but the first round of each text, and a last one that only the target speaks in
        assert proposer.num_used == proposer.num_ahead
    elif noise == 0.01 and draft_length < 3:
        assert 0 < proposer.num_used < proposer.num_ahead  # taken over and called off


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_is_taken_over_was_drafted_in_the_other_thread(target, monkeypatch, do_sample):
    draft = perturbed(target, 0.0)
    # A target that is nearly certain: under sampling the guess is nearly always right.
    options = {"max_new_tokens": 31, "do_sample": do_sample, "draft_length": 2}
    if do_sample:
        options["temperature"] = 0.05
    seen, forward = [], draft.forward

    def spied(*args, **kwargs):
        seen.append((threading.current_thread() is threading.main_thread(), kwargs["input_ids"].shape[1]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(draft, "forward", spied)
    proposer = RunAheadProposer(draft)
    out = speculative_generate(target, proposer, prompt(0), **options)
    assert out.counts.num_accepted_tokens == out.counts.num_draft_tokens
    if not do_sample:
        # Ten rounds of three tokens, and one of a single token. In the first the caller's thread reads the prompt and
        # drafts; nine times the other thread drafts the guess and two tokens behind it.
        assert [tokens for main, tokens in seen if main] == [7, 1]
        assert [tokens for main, tokens in seen if not main] == [1] * 3 * 9
    assert proposer.num_used >= 8


def slowed(monkeypatch, model, seconds):
    forward = model.forward

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", slow)


@pytest.mark.parametrize("do_sample", [False, True])
def test_texts_do_not_depend_on_which_thread_is_faster(do_sample):
    target = tiny_llama(3, 13, layers=1, scale=10.0)
    draft = perturbed(target, 0.1)
    options = {"max_new_tokens": 24, "do_sample": do_sample, "draft_length": 2, "seed": 4}

    def decoded():
        proposer = RunAheadProposer(draft)
        out = speculative_generate(target, proposer, prompt(1, vocab_size=13), **options)
        return out.sequences.tolist(), out.counts, proposer.num_ahead, proposer.num_used

    first = decoded()
    assert 0 < first[3] < first[2]
    torch.manual_seed(9)
    for slow in (target, draft):
        with pytest.MonkeyPatch.context() as patch:
            slowed(patch, slow, 0.004)
            assert decoded() == first
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert decoded() == first
    finally:
        sys.setswitchinterval(interval)


def test_the_text_ends_where_it_would(target, draft):
    full = autoregressive_generate(target, prompt(3), max_new_tokens=20, do_sample=False).sequences
    proposer = RunAheadProposer(draft)  # one for all texts: what ran ahead of one must not enter the next
    for end in range(1, 12):
        eos = int(full[0, 6 + end])
        options = {"draft_length": 3, "max_new_tokens": 20, "do_sample": False, "eos_token_id": eos}
        out = speculative_generate(target, proposer, prompt(3), **options)
        first = full[0, 7:].tolist().index(eos)
        assert torch.equal(out.sequences, full[:, : 7 + first + 1])
        assert out.counts == speculative_generate(target, DraftModelProposer(draft), prompt(3), **options).counts
    for new in (1, 2, 3, 4, 5, 8):
        for do_sample in (False, True):
            out = speculative_generate(
                target, proposer, prompt(3), draft_length=3, max_new_tokens=new, do_sample=do_sample
            )
            assert out.counts.num_emitted_tokens == new
            assert do_sample or torch.equal(out.sequences, full[:, : 7 + new])


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6]]}, {"draft_length": None}],
)
def test_processors_and_planned_lengths_change_nothing(target, draft, options):
    for seed in range(2):
        kwargs = {"max_new_tokens": 40, "do_sample": False, **options}
        proposer = RunAheadProposer(draft)
        out = speculative_generate(target, proposer, prompt(seed), **kwargs)
        kwargs.pop("draft_length", None)
        assert torch.equal(out.sequences, autoregressive_generate(target, prompt(seed), **kwargs).sequences)
        assert proposer.num_ahead > 0


def test_errors_of_the_other_thread_are_raised(target, monkeypatch):
    draft = perturbed(target, 0.0)
    forward = draft.forward

    def failing(*args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("out of numbers")
        return forward(*args, **kwargs)

    proposer = RunAheadProposer(draft)
    options = {"max_new_tokens": 20, "do_sample": False}
    with monkeypatch.context() as patch:
        patch.setattr(draft, "forward", failing)
        with pytest.raises(ArithmeticError, match="out of numbers"):
            speculative_generate(target, proposer, prompt(0), **options)
    assert not ahead_threads()
    plain = autoregressive_generate(target, prompt(0), **options)  # the proposer is as good as new
    assert torch.equal(speculative_generate(target, proposer, prompt(0), **options).sequences, plain.sequences)


def test_an_error_of_the_target_leaves_nothing_running(target, draft, monkeypatch):
    def failing(*args, **kwargs):
        raise ArithmeticError("out of numbers")

    proposer = RunAheadProposer(draft)
    monkeypatch.setattr(target, "forward", failing)
    with pytest.raises(ArithmeticError):
        speculative_generate(target, proposer, prompt(0), draft_length=64, max_new_tokens=200, do_sample=False)
    proposer.close()
    assert not ahead_threads()


def test_the_callers_thread_count_stays(target, draft):
    def seen_by_a_new_thread() -> int:
        counts: list[int] = []
        thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return counts[0]

    before = torch.get_num_threads(), seen_by_a_new_thread()
    proposer = RunAheadProposer(draft)
    speculative_generate(target, proposer, prompt(0), max_new_tokens=20, do_sample=False)
    proposer.close()
    assert (torch.get_num_threads(), seen_by_a_new_thread()) == before


def test_bad_arguments_are_refused_in_one_line(target, draft):
    with pytest.raises(InputError, match="batch: expected one row where the draft runs ahead, found 3"):
        speculative_generate(target, RunAheadProposer(draft), prompt(0).repeat(3, 1), max_new_tokens=4)
    with pytest.raises(InputError, match="compiled: expected eager forwards"):
        speculative_generate(target, RunAheadProposer(draft), prompt(0), max_new_tokens=4, compiled=True)


def test_processors_follow_the_draft_to_its_device():
    here = NoBadWordsLogitsProcessor([[5]])
    here.length_1_bias, here.token = torch.zeros(3), 7
    (there,) = Sampler(LogitsProcessorList([here]), do_sample=True).on(torch.device("meta")).processors
    assert (there.length_1_bias.device.type, here.length_1_bias.device.type, there.token) == ("meta", "cpu", 7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="two devices need a GPU beside the CPU")
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_models_on_two_devices(devices):
    target = tiny_llama(0).to(devices[0])
    draft = perturbed(tiny_llama(0), 0.01).to(devices[1])
    ids, proposer = prompt(0).to(devices[0]), RunAheadProposer(draft)
    for options in ({}, {"repetition_penalty": 1.3, "min_new_tokens": 5, "eos_token_id": 3}):
        options |= {"max_new_tokens": 30, "do_sample": False}
        plain = autoregressive_generate(target, ids, **options)
        out = speculative_generate(target, proposer, ids, draft_length=2, **options)
        assert torch.equal(out.sequences, plain.sequences)
        options |= {"do_sample": True, "draft_length": 2, "seed": 1}
        first = speculative_generate(target, proposer, ids, **options)
        assert torch.equal(first.sequences, speculative_generate(target, proposer, ids, **options).sequences)
    assert proposer.num_used > 0
