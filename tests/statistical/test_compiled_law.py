"""The law of sampled output where programs draft and judge, exactly, as `test_enumeration` has it of eager decoding.

Each drafter decodes three prompts of different lengths, and some one alone. What programs would compute is run as it
is: what the compiler makes of it the tests of programs hold against the models.
"""

import pytest
from conftest import tiny_llama
from enumeration import enumerated, target_law
from specimens import case_id, proposer, shapes
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.decode.proposers import draft_model

VOCAB = 7
PROMPTS = [(6, 3, 0, 3), (2,), (3, 4, 5, 6, 0, 6)]
EOS = 4
ROUNDING = 1e-12
SHAPES = [shape for shape in shapes() if shape[0] != "run_ahead"]  # which refuses programs


@pytest.fixture(scope="module")
def llama():
    """A target that has features, in double precision, neither flat nor sure."""
    model = tiny_llama(2, VOCAB, layers=3, hidden=8).double()
    for weight in model.parameters():
        weight.mul_(10 if weight.ndim > 1 else 1)
    return model


@pytest.fixture(autouse=True)
def doubly_normed(monkeypatch):
    """The library's norm computes in single precision whatever it is given."""

    def forward(norm, hidden):
        return norm.weight * hidden * (hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def difference(target, drafter, prompts, temperature=1.0, length=3, **options):
    """Return how far any text's probability is from the target's, and the shares of drafted tokens that stand."""
    sampling = {"temperature": temperature, "top_k": 0, "eos_token_id": EOS, "compiled": True}
    written = enumerated(target, drafter, prompts, length, **sampling, **options)
    processors = LogitsProcessorList([] if temperature == 1 else [TemperatureLogitsWarper(temperature)])
    greatest = 0.0
    for law, prompt in zip(written, prompts, strict=True):
        texts, wanted = law.texts(), target_law(target, prompt, length, processors, EOS)
        greatest = max(greatest, *(abs(texts.get(t, 0.0) - wanted.get(t, 0.0)) for t in {*texts, *wanted}))
    return greatest, [law.accepted() for law in written]


@pytest.mark.parametrize("shape", SHAPES, ids=case_id)
def test_every_text_has_the_targets_probability(llama, untraced, shape):
    off, shares = difference(llama, proposer(*shape, llama), PROMPTS, 0.7, width=500)
    assert off < ROUNDING
    assert any(0.02 < share < 0.98 for share in shares), shares  # drafts fail and stand
    assert untraced


@pytest.mark.usefixtures("untraced")
def test_a_text_alone_has_the_targets_probability(llama):
    assert difference(llama, proposer("draft", "chain", llama), PROMPTS[:1], draft_length=1)[0] < ROUNDING


def test_a_chain_of_several_programs_leaves_the_law(llama, untraced, monkeypatch):
    monkeypatch.setattr(draft_model, "MOST_LAYERS", 1)
    assert difference(llama, proposer("draft", "chain", llama), PROMPTS, width=500)[0] < ROUNDING
    assert {key[1] for _, key in untraced if key[0] == "ModelDraftForward"} == {(-1,)}  # programs of one step
