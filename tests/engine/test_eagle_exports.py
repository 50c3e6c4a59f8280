"""EAGLE-3 heads in a real vLLM: its texts are plain decoding's, and it drafts what the heads draft without a cache."""

from functools import cache

import pytest
import torch
from engine import TARGET, verified
from trained_eagle import drafted, fused_states, train_eagle
from transformers import GenerationConfig

from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.medusa.eagle.formats.export import FORMATS
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.scripts.engines.offline.jobs import EngineFailure, Job, engine_python, run_jobs
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.models import load_model, load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

K, TOKENS, PROMPTS = 3, 32, 8
VARIANTS = {
    "plain": {},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "normed by depth": {"fc_norm": True, "layer_ids": [1, 4, 7, 12], "cut": True},
}


@pytest.fixture(scope="module")
def target():
    model = load_model(TARGET, dtype="float32", device="cpu")
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@pytest.fixture(scope="module")
def prompts():
    return encoded_prompts(None, load_tokenizer(TARGET), PROMPTS, 48)


@pytest.fixture(scope="module")
def heads(target, prompts):
    """By name, heads that learnt a little of the target's own text."""
    texts = plain_texts(target, [torch.tensor(ids) for ids in prompts[:6]], 6, max_new_tokens=40)
    frequent = torch.cat(texts).bincount(minlength=target.config.vocab_size).topk(400).indices.sort().values

    @cache
    def trained(name: str) -> EagleHeads:
        torch.manual_seed(0)
        shape = dict(VARIANTS.get(name, {"cut": True}))
        tokens = frequent if shape.pop("cut", False) else None
        made = EagleHeads.of_target(target, tokens, base_model_name_or_path=str(TARGET), **shape)
        return train_eagle(target, made, texts, steps=30)

    return trained


@pytest.fixture(scope="module")
def answers(heads, prompts, tmp_path_factory):
    """By name, what one process of vLLM made of each."""
    folder, jobs = tmp_path_factory.mktemp("exports"), {"plain decoding": None}
    for name in VARIANTS:
        FORMATS.write(heads(name), folder / name, "vllm")
        jobs[name] = {"method": "eagle3", "model": str(folder / name), "num_speculative_tokens": K}
    asked = [Job(str(TARGET), prompts, config, max_tokens=TOKENS, max_model_len=128) for config in jobs.values()]
    return dict(zip(jobs, run_jobs(engine_python(), asked, timeout=600).answers, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_vllm_drafts_what_the_heads_draft(answers, heads, target, prompts, name):
    """At T=0 what is accepted follows from what is drafted at every place of its text where a round begins."""
    answer, plain = answers[name], answers["plain decoding"]
    assert not isinstance(answer, EngineFailure), str(answer)
    assert answer.token_ids == plain.token_ids
    rounds, accepted = 0, [0] * K
    written = [torch.tensor([*ids, *found]) for ids, found in zip(prompts, answer.token_ids, strict=True)]
    longer = plain_texts(target, written, PROMPTS, max_new_tokens=K + 1)  # vLLM drafts and counts behind the end
    for ids, whole in zip(prompts, longer, strict=True):
        known, states = len(ids) + 1, fused_states(target, heads(name), whole)
        while known < len(ids) + TOKENS:
            guesses, right = drafted(target, heads(name), whole[:known], states[:, : known - 1], K), 0
            while right < K and guesses[right] == whole[known + right]:
                accepted[right] += 1
                right += 1
            rounds, known = rounds + 1, known + right + 1
    counters = answer.counters
    assert [counters.num_drafts, counters.num_draft_tokens] == [rounds, rounds * K]
    assert list(counters.num_accepted_tokens_per_pos) == accepted
    assert accepted[1] > 5 and accepted[0] < rounds, "heads that guess nothing, or all, prove nothing"


def test_heads_are_verified_by_the_command(heads, tmp_path, capsys):
    """Against our decoder and its replay, which have a cache."""
    heads("a cut vocabulary").save_pretrained(tmp_path / "heads")
    argv = ["--heads", tmp_path / "heads", "--output", tmp_path / "out"]
    ((first, second, *_),) = verified(capsys, ["the heads"], 4, *argv)
    assert first > second > 0, "heads that guess nothing prove nothing"
