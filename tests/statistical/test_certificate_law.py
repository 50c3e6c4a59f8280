"""How often a server's certificate raises a false alarm, and which faults it sees: texts without a server.

Seeds are fixed.
"""

import pytest
import torch
from conftest import perturbed, tiny_llama
from scipy.stats import binom

from draftsmith.decode import DraftModelProposer
from draftsmith.decode.measurement.certificate import tie_tolerant_test
from draftsmith.decode.measurement.distribution_test import sample_texts
from draftsmith.decode.sampling import Sampler

pytestmark = pytest.mark.slow

VOCAB, PROMPTS, TEXTS, TOKENS = 13, 8, 128, 16
CERTIFICATES, LEVEL = 200, 0.1
SAMPLER = Sampler.of(1.0)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(3, VOCAB, layers=1, scale=10.0)


def drawn(model, count, seed=0, temperature=1.0, tokens=TOKENS):
    """Texts of the library's own sampling, prompt by prompt, as a server is asked for them."""
    prompts = torch.randint(VOCAB, (PROMPTS, 3), generator=torch.Generator().manual_seed(1))
    rows = prompts[torch.arange(count) % PROMPTS]
    options = {"do_sample": True, "top_k": 0, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    return [
        (text, 3)
        for text in model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=tokens, **options)
    ]


def judged(target, texts, seed=0):
    return tie_tolerant_test(target, texts, SAMPLER, seed=seed, batch_size=TEXTS)


def test_false_alarms_are_as_rare_as_stated(target):
    """Bonferroni's bound: 200 right certificates at 10 % fail at most 37 times, but for a chance of 1e-4.

    Certificates that fail at 25 % are seen with a probability of 98 %. Right ones fail no more rarely than half as
    often as stated, for the tests are nearly independent: at least once, but for 1e-4.
    """
    texts = [text for start in range(4) for text in drawn(target, CERTIFICATES * TEXTS // 4, seed=10**6 * start)]
    alarms, first = 0, {}
    for i in range(CERTIFICATES):
        result = judged(target, texts[i * TEXTS : (i + 1) * TEXTS], seed=i)
        alarms += result.p_value <= LEVEL
        for name, test in result.tests.items():
            first.setdefault(name, []).append(test.p_value)
    print(f"{alarms} false alarms of {CERTIFICATES} at {LEVEL}")
    assert int(binom.ppf(1e-4, CERTIFICATES, LEVEL / 2)) <= alarms <= int(binom.isf(1e-4, CERTIFICATES, LEVEL))
    # Each of the 4 tests alone: none fails at 10 % more often than chance allows, at 1e-4 each.
    most = int(binom.isf(1e-4, CERTIFICATES, LEVEL))
    assert len(first) == 4
    for name, found in first.items():
        assert sum(p <= LEVEL for p in found) <= most, name


def tokens_of_the_row_beside(target):
    """A row whose tenth token is that of the row before."""
    texts = [text.clone() for text, _ in drawn(target, 4 * TEXTS)]
    for i in range(1, len(texts)):
        texts[i][3 + 9] = texts[i - 1][3 + 9]
    return [(text, 3) for text in texts]


def drafts_that_stand_too_often(target):
    prompts = torch.randint(VOCAB, (PROMPTS, 3), generator=torch.Generator().manual_seed(1))
    proposer = DraftModelProposer(perturbed(target, 0.3))
    texts, _ = sample_texts(
        target, proposer, list(prompts), 6000, rule="threshold", temperature=1.0, top_k=0, max_new_tokens=TOKENS,
        batch_size=6000 // TOKENS,
    )  # fmt: skip
    return texts


@pytest.mark.parametrize(
    ("fault", "seen_by"),
    [
        (tokens_of_the_row_beside, "uniform by p"),
        (drafts_that_stand_too_often, "uniform by p"),
        (lambda target: drawn(target, 4 * TEXTS, temperature=0.8), "uniform by p"),
        (lambda target: drawn(target, 4 * TEXTS, temperature=1.25), "uniform by p"),
        (lambda target: drawn(target, 2 * TEXTS, temperature=0), "uniform by p"),
    ],
)
def test_faults_are_seen(target, fault, seen_by):
    """Each is found at 1e-4, and by the test that it was thought of for."""
    result = judged(target, fault(target))
    assert result.combined < 1e-4
    assert result.tests[seen_by].p_value < 1e-4
