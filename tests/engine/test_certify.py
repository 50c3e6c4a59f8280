"""Real servers certified: plain decoding passes, a build that samples wrongly fails, and passes once it is mended."""

import json

import pytest
from engine import DRAFT, TARGET

from draftsmith.scripts import cli
from draftsmith.train.data.corpus import stdlib_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FALSE_ALARM = 1e-3


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in stdlib_prompts(16, heldout=True, seed=3)))
    return path


def certify(url, prompts, output, temperature, *more, target=TARGET):
    """Return the exit code, the certificate, and its laws by temperature."""
    argv = ["certify", "--server", url, "--target", str(target), "--prompts", str(prompts), "--output", str(output)]
    argv += ["--temperature", temperature, "--config", "{max_prompt_tokens: 40}", "--max-new-tokens", "16"]
    argv += ["--threads", "1", "--sampled-tokens", "2400", "--concurrency", "8", "--false-alarm", str(FALSE_ALARM)]
    code = cli.main([*argv, *more])
    found = json.loads((output / "certificate.json").read_text())
    return code, found, {law["temperature"]: law for law in found["sampled"]}


def test_plain_decoding_passes(plain, prompts, tmp_path):
    """A false alarm has probability 1e-3."""
    code, found, laws = certify(plain.url, prompts, tmp_path / "out", "0,0.05,1")
    assert code == 0 and found["passed"] and found["greedy"]["identical"]
    assert set(laws) == {0.05, 1.0} and all(law["passed"] for law in laws.values())
    assert found["servers"]["server"]["counters"]["num_drafts"] == 0


def test_a_build_that_samples_wrongly_fails(astray, prompts, tmp_path):
    """This one verifies drafts at a temperature that nobody set: see `tests/support/engine_plugins`."""
    own = astray.log.parent / "target"
    code, found, laws = certify(astray.url, prompts, tmp_path / "out", "0,0.05", target=own)
    assert code == 3 and not found["passed"]
    assert found["greedy"]["identical"] and found["greedy"]["prompts_identical"] == 16
    assert laws[0.05]["p_value"] < 1e-9 and not laws[0.05]["passed"]
    assert min(test["p_value"] for test in laws[0.05]["tests"].values()) < 1e-9
    assert found["servers"]["server"]["counters"]["num_drafts"] > 0


def test_the_mended_build_passes(speculating, prompts, tmp_path):
    """With the draft, to look for what leans towards it."""
    code, found, laws = certify(speculating.url, prompts, tmp_path / "out", "0,1", "--draft", str(DRAFT))
    assert code == 0 and found["greedy"]["identical"]
    assert all(law["passed"] for law in laws.values())
    assert found["servers"]["server"]["counters"]["num_accepted_tokens"] > 0
