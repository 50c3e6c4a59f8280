"""`draftsmith certify` against a server in vLLM's streaming shape: right ones pass, faults fail, failures keep."""

import json
import random
import shutil
import threading
from collections import defaultdict

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from server_fixtures import server  # noqa: F401
from transformers import AutoConfig

from draftsmith.decode import autoregressive_generate
from draftsmith.scripts import cli
from draftsmith.scripts.engines.certify.verdicts import Judge
from draftsmith.train.cli import flags_of
from draftsmith.train.runs import save_model

NEW, END, SAMPLED = 16, 5, 2200
METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total {drafts}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total {drafts}
"""


@pytest.fixture(scope="module")
def model(tokenizer):
    model = tiny_llama(0, len(tokenizer), layers=1)
    model.generation_config.eos_token_id = END
    return model


@pytest.fixture(scope="module")
def files(tmp_path_factory, tokenizer, model):
    root = tmp_path_factory.mktemp("files")
    save_model(model, tokenizer, root / "target")
    lines = [{"prompt": f"def f{i}(x): return {'x' * i}"} for i in range(6)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


LOOKS = 4
"""The requests that ask which engine a server is."""


class Writer:
    """Writes texts as the target does, many of a prompt at a time."""

    def __init__(self, model):
        self.model, self.lock, self.ready, self.drawn = model, threading.Lock(), defaultdict(list), 0

    def __call__(self, body: dict) -> list[int]:
        prompt, temperature = tuple(body["prompt"]), body["temperature"]
        with self.lock:
            queue = self.ready[prompt, temperature]
            if not queue:
                rows = torch.tensor([prompt] * (32 if temperature else 1))
                options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
                out = autoregressive_generate(self.model, rows, max_new_tokens=NEW, seed=self.drawn, **options)
                self.drawn += len(rows)
                for row, counts in zip(out.sequences[:, len(prompt) :].tolist(), out.row_counts, strict=True):
                    queue.append(row[: counts.num_emitted_tokens])
            return queue.pop() if temperature else list(queue[0])


def streamed(body: dict, tokens: list[int], says_end: bool = True, **choice) -> tuple[int, dict, bytes]:
    """An answer in two parts, its usage, and the end."""
    reason, prompt = "stop" if END in tokens else "length", body["prompt"]
    tokens = tokens if says_end else [token for token in tokens if token != END]
    first = {"index": 0, "text": "", "token_ids": tokens[:3], "prompt_token_ids": prompt, "finish_reason": None}
    last = {"index": 0, "text": "", "token_ids": tokens[3:], "finish_reason": reason}
    parts = [{"choices": [first | choice]}, {"choices": [last | choice]}]
    parts.append({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}})
    lines = [*(f"data: {json.dumps(part)}\n\n" for part in parts), "data: [DONE]\n\n"]
    return 200, {"Content-Type": "text/event-stream"}, "".join(lines).encode()


@pytest.fixture
def writes(server, model):  # noqa: F811
    """Let the server write what a function makes of the target's texts: (its text, request, number) → tokens."""
    writer, drafted = Writer(model), iter(range(0, 10_000, 100))

    def let(changed=lambda tokens, body, number: tokens):
        def answer(path, body, number):
            if path == "/metrics":
                return 200, {}, METRICS.format(drafts=next(drafted)).encode()
            if not path.endswith("completions"):
                return 404, {}, b"none"
            return streamed(body, changed(writer(body), body, number - LOOKS))

        server.answer = answer
        return server

    return let


def unmetered(answer):
    """A server without counters."""
    return lambda path, body, number: answer(body, number - LOOKS) if "completions" in path else (404, {}, b"none")


def certify(files, server, output, *more):  # noqa: F811
    own = {"server": server.root, "target": files / "target", "prompts": files / "prompts.jsonl", "output": output}
    own |= {"max_new_tokens": NEW, "sampled_tokens": SAMPLED, "threads": 1}
    if "--no_target" in more:
        del own["target"]
    return cli.main(["certify", *flags_of(own), *(part for part in more if part != "--no_target")])


def completions(server):  # noqa: F811
    return [body for path, _, body in server.requests if path == "/v1/completions"]


def test_a_right_server_passes(files, writes, tmp_path, capsys):
    """A false alarm has probability 1e-3."""
    server = writes()  # noqa: F811
    assert certify(files, server, tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "6 texts at T=0; 138 texts, 2208 tokens at most, at each T of 1; 4 at once" in out
    assert "T=0: 6 of 6 texts identical" in out and "lossless, as far as tested" in out
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert found["schema"] == "draftsmith.certificate/1" and found["passed"] is True
    assert found["greedy"]["identical"] is True and found["greedy"]["prompts"] == 6
    (law,) = found["sampled"]
    assert law["texts"] == 138 and law["threshold"] == 1e-3 < law["p_value"] and law["impossible"] == 0
    assert len(law["tests"]) == 4
    assert found["servers"]["server"]["model"] == "tiny"
    assert found["servers"]["server"]["counters"]["num_drafts"] == 100
    asked = completions(server)
    assert len(asked) == 144 and server.busiest <= 4
    for body in asked:
        assert "seed" not in body and body["top_k"] == -1 and body["top_p"] == 1 and body["repetition_penalty"] == 1
        assert body["stop_token_ids"] == [END] and body["max_tokens"] == NEW
    assert [body["temperature"] for body in asked[:6]] == [0.0] * 6


def test_a_server_is_compared_with_a_plain_one(files, writes, tmp_path, capsys):
    """A false alarm has probability 1e-3. T=0 is the plain server's, and with the target that is all it is asked."""
    server = writes()  # noqa: F811
    flags = ["--plain-server", server.root, "--concurrency", "1"]
    assert certify(files, server, tmp_path / "out", *flags) == 0
    assert len(completions(server)) == 144 + 6
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert found["greedy"]["identical"]
    assert {of["counters"]["num_drafts"] for of in found["servers"].values()} == {100}
    server.answer = lambda path, body, number: (500, {}, b'{"error": {"message": "out of luck"}}')
    assert certify(files, server, tmp_path / "failed", *flags) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: server: expected an answer from") and "out of luck" in error


def test_texts_of_two_servers_are_told_apart(files, server, tmp_path, capsys):  # noqa: F811
    """Without the target: prompts go out as text. The plain server is the one without a key."""
    draws = random.Random(0)
    server.answer = unmetered(lambda body, number: streamed({"prompt": [1]}, draws.choices((1, 2), k=NEW)))
    flags = ["--no_target", "--plain-server", server.root, "--temperature", "0.5"]
    assert certify(files, server, tmp_path / "same", *flags) == 0
    found = json.loads((tmp_path / "same" / "certificate.json").read_text())
    assert set(found["sampled"][0]["tests"]) == {"two samples"} and found["target"] is None
    assert found["servers"]["plain_server"]["counters"] is None
    assert completions(server)[0]["prompt"].startswith("def f") and "stop_token_ids" not in completions(server)[0]
    server.requests.clear()
    first = 6 + 138  # are the server's under test
    server.answer = unmetered(
        lambda body, number: streamed({"prompt": [1]}, draws.choices((1, 2), (2 if number <= first else 1, 1), k=NEW))
    )
    assert certify(files, server, tmp_path / "other", *flags, "--temperature", "0,0.5") == 3
    out = capsys.readouterr().out
    assert "T=0: 0 of 6 texts identical" in out and "whether these are ties, the target (--target) would tell" in out
    assert "its texts are not the plain server's" in out


FAULTS = {"greedy": "uniform by", "behind the end": "texts continue after their end"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_server_fails(fault, files, writes, model, tmp_path, capsys):
    greedy = Writer(model)

    def changed(tokens, body, number):
        if body["temperature"] == 0:
            return tokens
        if fault == "greedy":
            return greedy(body | {"temperature": 0})
        return [*tokens, 7, 8][: body["max_tokens"]] if tokens[-1] == END else tokens

    assert certify(files, writes(changed), tmp_path / "out") == 3
    out = capsys.readouterr().out
    assert FAULTS[fault] in out and "T=0: 6 of 6 texts identical" in out and "not lossless" in out
    assert json.loads((tmp_path / "out" / "certificate.json").read_text())["passed"] is False


def test_a_server_may_leave_the_last_token_out(files, writes, model, tmp_path):
    """A false alarm has probability 1e-3."""
    server, writer = writes(), Writer(model)  # noqa: F811
    server.answer = unmetered(lambda body, number: streamed(body, writer(body), says_end=False))
    assert certify(files, server, tmp_path / "out") == 0
    assert Judge(None, None, [], [END]).greedy([([8], "stop")], [([8, END], "stop")], list).identical


def test_a_wrong_token_at_zero_is_named(files, writes, tmp_path, capsys):
    def changed(tokens, body, number):
        return [*tokens[:2], (tokens[2] + 1) % 90, *tokens[3:]] if number == 4 else tokens

    assert certify(files, writes(changed), tmp_path / "out", "--temperature", "0", "--concurrency", "1") == 3
    out = capsys.readouterr().out
    assert "T=0: 5 of 6 texts identical" in out and "token 2: " in out and "margin" in out


@pytest.mark.parametrize("own", [0, 6])
def test_without_the_target_a_plain_server_that_departs_from_itself_excuses_as_many(own, files, server, tmp_path):  # noqa: F811
    """As two servers in half precision do, whose rows meet others."""
    number = 0

    def answer(body, _):
        nonlocal number
        number += 1  # six of the server, six of the plain one, and six again
        departs = number <= 2 or 12 < number <= 12 + own
        return streamed({"prompt": [1]}, [2 if departs else 1] * NEW)

    server.answer = unmetered(answer)
    flags = ["--no_target", "--plain-server", server.root, "--temperature", "0", "--concurrency", "1"]
    assert certify(files, server, tmp_path / "out", *flags) == (0 if own else 3)
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())["greedy"]
    assert (found["departures"], found["prompts_identical"], found["passed"]) == (2, 4, bool(own))


def test_bad_input_is_told_in_one_line(files, writes, tmp_path, capsys):
    server = writes()  # noqa: F811

    def refused(*more):
        assert certify(files, server, tmp_path / "out", *more) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "target: expected the target or, as `plain_server`" in refused("--no_target")
    assert "drafter: expected none without" in refused("--no_target", "--plain-server", "http://x", "--draft", "d")
    assert "no_repeat_ngram_size: expected 0" in refused("--config", "{no_repeat_ngram_size: 2}")
    assert "sampled_tokens: expected at least 2000" in refused("--sampled_tokens", "100")
    assert "temperature: expected a finite number, 0 or at least 0.01" in refused("--temperature", "0.001")
    assert "min_p: expected 0 with top_p" in refused("--config", "{min_p: 0.1}", "--top-p", "0.9")
    assert "temperature: expected each number once" in refused("--temperature", "1,1")
    assert "concurrency: expected at least 1" in refused("--concurrency", "0")
    assert "server: expected a URL" in refused("--server", "nowhere")
    server.answer = lambda path, body, number: (400, {}, b'{"error": {"message": "no such thing"}}')
    assert "no such thing" in refused()
    server.answer = unmetered(lambda body, number: streamed(body, [1] * NEW, token_ids=None))
    assert "server: expected token ids" in refused()
    server.answer = unmetered(lambda body, number: streamed(body | {"prompt": [1]}, [1] * NEW, prompt_token_ids=[2]))
    assert "tokens as sent" in refused()
    server.answer = unmetered(lambda body, number: streamed(body, [1] * 4))
    assert "server: expected room for 16 tokens" in refused()
    server.answer = unmetered(lambda body, number: streamed(body, [300] * NEW))
    assert "server: http://127.0.0.1" in (line := refused()) and "300" in line


def test_where_texts_end_early_more_are_asked_for(files, server, tmp_path, capsys):  # noqa: F811
    server.answer = unmetered(lambda body, number: streamed(body, [1] * 9 + [END]))
    assert certify(files, server, tmp_path / "out", "--temperature", "1") == 3
    out = capsys.readouterr().out
    assert "asks for 138 texts" in out and "T=1: 2000 tokens in 200 texts, 6 of them different" in out


def test_a_target_that_cannot_write_texts_is_refused_before_any_is_asked_for(files, writes, tmp_path, capsys):
    """One whose state is outside of the library's cache; sampled text it can judge."""
    asked, target = writes(), tmp_path / "hybrid"
    shutil.copytree(files / "target", target, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = AutoConfig.from_pretrained(files / "target")
    tiny_model("recurrent-gemma", vocab_size=config.vocab_size).save_pretrained(target)
    assert certify(files, asked, tmp_path / "out", "--target", str(target)) == 2
    assert "target: expected" in capsys.readouterr().err.splitlines()[-1] and not completions(asked)
