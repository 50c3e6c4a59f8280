"""`draftsmith export --verify vllm`, with an engine that walks its rounds one by one; tests/engine has the real one."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.heads.formats.importing import import_heads
from draftsmith.scripts import cli
from draftsmith.scripts.engines import export
from draftsmith.scripts.engines.offline.jobs import Answer, EngineFailure, EngineRun, Job
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.models import load_model

NONE = ServerCounts(0, 0, 0, ())
TOKENS = 12


class Engine:
    """What vLLM does at T=0: the prompt's step, then γ drafts a step, whatever the limit."""

    def __init__(self):
        self.jobs: list[Job] = []
        self.model = cache(partial(load_model, dtype="float32", device="cpu"))
        self.heads = cache(lambda directory: import_heads(directory).float())
        self.change = lambda place, answer: answer

    def __call__(self, python, jobs):
        self.jobs = jobs
        return EngineRun("0.32.0", "cpu", [self.change(i, self.answer(job)) for i, job in enumerate(jobs)])

    def answer(self, job: Job) -> Answer | EngineFailure:
        target = self.model(job.target)
        target.generation_config = GenerationConfig(pad_token_id=0)
        gamma = job.speculative["num_speculative_tokens"] if job.speculative else 0
        prompts = [torch.tensor([ids]) for ids in job.prompts]
        wholes = [
            target.generate(
                p, attention_mask=torch.ones_like(p), max_new_tokens=job.max_tokens + gamma, do_sample=False
            )
            for p in prompts
        ]
        counters = NONE
        for prompt, whole in zip(prompts, wholes, strict=True):
            counters += self.walked(job, target, whole, prompt.shape[1]) if gamma else NONE
        starts = [p.shape[1] for p in prompts]
        return Answer([w[0, n : n + job.max_tokens].tolist() for w, n in zip(wholes, starts, strict=True)], counters)

    def walked(self, job: Job, target, whole, start: int) -> ServerCounts:
        gamma, end = job.speculative["num_speculative_tokens"], start + job.max_tokens
        drafts, per_pos, place = 0, [0] * gamma, start + 1
        while place < end:
            drafted = self.drafted(job.speculative, target, whole[:, :place], gamma)
            accepted = 0
            while accepted < gamma and drafted[accepted] == whole[0, place + accepted]:
                per_pos[accepted] += 1
                accepted += 1
            drafts, place = drafts + 1, place + accepted + 1
        return ServerCounts(drafts, drafts * gamma, sum(per_pos), tuple(per_pos))

    def drafted(self, speculative: dict, target, ids, gamma: int) -> list[int]:
        with torch.no_grad():
            if speculative["method"] == "medusa":
                # The state that the last token was predicted from.
                hidden = last_hidden(target, input_ids=ids)[0, -2]
                return self.heads(speculative["model"])(hidden).argmax(-1)[:gamma].tolist()
            draft = self.model(speculative["model"])
            for _ in range(gamma):
                ids = torch.cat([ids, draft(input_ids=ids).logits[:, -1:].argmax(-1)], -1)
            return ids[0, -gamma:].tolist()


@pytest.fixture
def engine(monkeypatch) -> Engine:
    fake = Engine()
    monkeypatch.setattr(export, "run_jobs", fake)
    monkeypatch.setattr(export, "engine_python", lambda: Path("python"))
    monkeypatch.setattr(export, "PROMPTS", 3)
    monkeypatch.setattr(export, "NEW_TOKENS", TOKENS)
    return fake


@pytest.fixture
def flags(pair_dirs) -> list[str]:
    return ["--target", str(pair_dirs[0]), "--verify", "vllm"]


def ran(capsys, *argv: object) -> tuple[int, list[str], str]:
    capsys.readouterr()
    code = cli.main(["export", *map(str, argv)])
    out, err = capsys.readouterr()
    assert err.count("\n") == (1 if code else 0), err
    return code, out.splitlines(), err


def test_a_draft_is_verified_greedy_and_probabilistic(pair_dirs, engine, flags, capsys):
    code, lines, _ = ran(capsys, "--draft", pair_dirs[1], "--format", "vllm", "--draft_length", 3, *flags)
    assert code == 0
    (launch,) = [line for line in lines if not line.startswith("# ")]
    assert launch.startswith("vllm serve ")
    assert "# vLLM without a drafter: 3 of 3 texts are draftsmith's plain text" in lines
    for method in ("greedy", "probabilistic"):
        assert f"# vLLM with the draft, {method}: 3 of 3 texts are its text without" in lines
        assert any(line.startswith(f"# the draft, {method}, γ = 3: ") for line in lines)
    assert "certify" in lines[-1]
    plain, greedy, drawn = engine.jobs
    assert plain.speculative is None and greedy.speculative["draft_sample_method"] == "greedy"
    assert drawn.speculative["draft_sample_method"] == "probabilistic"
    assert {job.temperature for job in engine.jobs} == {0.0} and {job.dtype for job in engine.jobs} == {"float32"}
    assert {len(job.prompts) for job in engine.jobs} == {3} and plain.max_tokens == TOKENS
    assert plain.max_model_len > max(map(len, plain.prompts)) + TOKENS + 3


@pytest.fixture
def heads(pair_dirs, tmp_path):
    """Noisy heads, by name of their kind."""

    def made(token_map=None, **shape) -> str:
        target = load_model(pair_dirs[0], device="cpu")
        heads = MedusaHeads.of_target(target, 3, token_map, base_model_name_or_path=str(pair_dirs[0]), **shape)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        heads.save_pretrained(tmp_path / "heads")
        return str(tmp_path / "heads")

    return made


def test_heads_are_verified_as_they_were_written(heads, engine, flags, tmp_path, capsys):
    given = heads(torch.arange(0, 40), medusa_fc_bias=True)
    argv = ["--heads", given, "--format", "vllm", "--output", tmp_path / "out"]
    code, lines, _ = ran(capsys, *argv, "--dtype", "bfloat16", *flags)
    assert code == 0 and "# vLLM with the heads: 3 of 3 texts are its text without" in lines
    assert any(line.startswith("# the heads, γ = 3: ") for line in lines)
    assert engine.jobs[1].speculative["model"] == str(tmp_path / "out")


def other_text(place: int, answer: Answer) -> Answer:
    texts = [list(text) for text in answer.token_ids]
    texts[1][4] ^= 1
    return replace(answer, token_ids=texts)


def other_counts(place: int, answer: Answer) -> Answer:
    return replace(answer, counters=answer.counters + ServerCounts(0, 0, 1, (1,))) if place else answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, a: other_text(i, a) if i == 0 else a, "expected vLLM without a drafter to write draftsmith's plain"),
        (lambda i, a: other_text(i, a) if i == 1 else a, "expected vLLM with the heads to write its text"),
        (other_counts, "expected vLLM with the heads to count "),
        (lambda i, a: EngineFailure("ValueError: x") if i else a, "to decode with the heads, found: ValueError: x"),
        (lambda i, a: a if i else EngineFailure("OSError: y"), "without a drafter, found: OSError: y"),
    ],
)  # fmt: skip
def test_what_fails_is_one_line_and_1_and_the_export_stays(heads, engine, flags, tmp_path, capsys, change, message):
    engine.change = change
    code, lines, err = ran(capsys, "--heads", heads(), "--format", "vllm", "--output", tmp_path / "out", *flags)
    assert code == 1 and err.startswith("error: verify: ") and message in err
    assert lines[-1].startswith("vllm serve ")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_heads"] == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--draft", "D", "--format", "sglang", "--target", "T"], "expected it with vllm, found it with sglang"),
        (["--medusa", "H", "--output", "O", "--format", "own", "--target", "T"], "it with vllm, found it with own"),
        (["--import_from", "H", "--output", "O", "--target", "T"], "verify: expected none with heads to import"),
        (["--draft", "D", "--format", "vllm"], "target: expected one to verify with, found none"),
        (["--draft", "D", "--format", "vllm", "--target", "T", "--verify", "sglang"], "verify: expected one of vllm"),
    ],
)  # fmt: skip
def test_what_cannot_be_verified_is_said_before_the_work(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    code, lines, err = ran(capsys, "--verify", "vllm", *argv)
    assert code == 2 and message in err and not lines and not list(tmp_path.iterdir())


def test_a_target_with_few_positions_is_seen_before_the_engine(pair_dirs, engine, flags, capsys):
    config = pair_dirs[0] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 32}))
    code, _, err = ran(capsys, "--draft", pair_dirs[1], "--format", "vllm", *flags)
    assert code == 2 and err.startswith("error: verify: expected a target with ") and not engine.jobs
