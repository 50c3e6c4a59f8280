"""Conversations with tools through the coordinator to a real vLLM, into its log, into a draft, and back.

The server is asked for the ids that it reads and writes. Every sample that a draft learns from must be these ids.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from agent import NAMES, SPELLED, SYSTEM, script, write_agent
from coordinating import coordinator
from engine import vllm_server
from templates import TOOLS

from draftsmith.scripts import cli
from draftsmith.scripts.services.coordinate.request_log import unstreamed_answer
from draftsmith.train.data.generate import load_completions
from draftsmith.train.models import load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PARSERS = (
    *("--served-model-name", "agent", "--reasoning-parser", "qwen3"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
STREAMED = ("bob", "dan")


def ask(url: str, messages: list[dict], variables: dict, stream: bool = False, **fields) -> dict:
    """Return an answer, whole."""
    body = {"model": "agent", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 64}
    body |= {"stream": stream, "chat_template_kwargs": variables}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = httpx2.post(f"{url}{CHAT}", json=body | fields, timeout=300)
    assert response.status_code == 200, response.text
    return unstreamed_answer(response.content, stream)


def converse(url: str, name: str) -> Iterator[tuple[list[dict], dict, dict]]:
    """Talk as an agent's client does, with two in a stream; yield each request's messages, variables and answer."""
    messages = [SYSTEM]
    for asked, variables, _ in script(name):
        messages.append(asked)
        if asked["role"] == "tool":
            messages[-1] = asked | {"tool_call_id": messages[-2]["tool_calls"][0]["id"]}
        answer = ask(url, messages, variables, name in STREAMED)
        yield list(messages), variables, answer
        message = answer["choices"][0]["message"]
        told = {"role": "assistant", "content": message["content"]}
        if message.get("reasoning"):
            told["reasoning_content"] = message["reasoning"]  # clients send either name
        if message.get("tool_calls"):
            told["tool_calls"] = message["tool_calls"]
        messages.append(told)


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    write_agent(folder)
    return folder


@pytest.fixture(scope="module")
def traffic(agent) -> tuple[list[dict], dict[str, list[tuple[list[dict], dict, dict]]]]:
    """The answers to three texts, and then all requests by conversation; `log.jsonl` is the coordinator's."""
    tokenizer = load_tokenizer(str(agent / "target"))
    first = [SYSTEM, script("ann")[0][0]]
    text = tokenizer.apply_chat_template(first, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    pair, log = {"name": "plain", "models": ["agent"]}, {"path": str(agent / "log.jsonl"), "token_ids": True}
    with ExitStack() as running:
        server = running.enter_context(vllm_server(agent / "target", agent / "vllm.log", None, *PARSERS))
        config = {"pairs": [pair | {"endpoints": [server.url]}], "log": log}
        url, _ = running.enter_context(coordinator(config, agent))
        bodies = [{"stream": True}, {"seed": 0, "temperature": 1.5}, {"stop": ["wants"]}]
        texts = []
        for body in bodies:
            body = {"model": "agent", "prompt": text, "temperature": 0, "max_tokens": 200} | body
            response = httpx2.post(f"{url}{TEXT}", json=body, timeout=300)
            texts.append(unstreamed_answer(response.content, "stream" in body))
        return texts, {name: list(converse(url, name)) for name in NAMES}


@pytest.fixture(scope="module")
def conversations(traffic) -> dict[str, list[tuple[list[dict], dict, dict]]]:
    return traffic[1]


def served(requests: list[tuple[list[dict], dict, dict]]) -> list[tuple[list[int], list[int]]]:
    """Return the ids of the prompts and of the answers."""
    return [(answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) for _, _, answer in requests]


def samples(directory: Path) -> dict[str, tuple[list[int], list[int]]]:
    return {row["id"]: (row["input_ids"], row["loss_mask"]) for row in load_completions(str(directory))}


def prepared(agent: Path, lines: list[dict], name: str, *flags: str) -> dict[str, tuple[list[int], list[int]]]:
    """Return the samples that `prepare` makes of lines of a log, by their ids."""
    log, output = agent / f"{name}.jsonl", agent / name
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"--target={agent / 'target'}", f"--prompts={log}", f"--output={output}"]
    assert cli.main(["prepare", *files, "--answers=given", *flags]) == 0
    return samples(output)


def logged(agent: Path) -> list[dict]:
    """Return the log's lines of chats, by conversation and turn."""
    lines = [json.loads(line) for line in (agent / "log.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["path"] == CHAT]
    names = [next(name for name in NAMES if name in line["request"]["messages"][1]["content"]) for line in lines]
    order = sorted(range(len(lines)), key=lambda n: (names[n], len(lines[n]["request"]["messages"])))
    return [lines[n] for n in order]


def without_ids(line: dict) -> dict:
    choices = [{k: v for k, v in choice.items() if k != "token_ids"} for choice in line["response"]["choices"]]
    return {**line, "response": {"choices": choices}}


def test_the_target_thinks_calls_and_answers(conversations):
    """Otherwise the tests below would show nothing."""
    for name, requests in conversations.items():
        messages = [answer["choices"][0]["message"] for _, _, answer in requests]
        assert [bool(message.get("tool_calls")) for message in messages] == [True, False, False, False], name
        assert [bool(message.get("reasoning")) for message in messages] == [True, True, True, False], name
        assert messages[3]["content"] == f"good bye, dear {name}"


@pytest.mark.parametrize("turns", ["first", "all"])
def test_what_is_learned_is_what_the_server_read_and_wrote(agent, conversations, turns):
    lines = logged(agent)
    learned = prepared(agent, lines, f"with-ids-{turns}", f"--turns={turns}")
    expected = [pair for requests in conversations.values() for pair in served(requests)]
    assert len(lines) == len(learned) == len(expected) == 16
    for n, (line, (prompt, answer)) in enumerate(zip(lines, expected, strict=True)):
        ids, mask = learned[line["id"] if turns == "first" else f"{line['id']}.{n % 4 + 1}"]
        assert ids == prompt + answer
        assert mask == [0] * len(prompt) + [1] * len(answer)


@pytest.mark.parametrize("turns", ["first", "all"])
def test_texts_alone_give_the_same_ids_unless_the_target_spelled_them_otherwise(agent, conversations, turns):
    """Of a request, and with all turns of each earlier turn that its conversation holds."""
    lines = [without_ids(line) for line in logged(agent)]
    learned = prepared(agent, lines, f"without-ids-{turns}", f"--turns={turns}")
    names = [name for name in conversations for _ in range(4)]
    seen = set[tuple[int, int]]()
    for sample, (ids, mask) in learned.items():
        number, _, turn = sample.partition(".")
        n = next(n for n, line in enumerate(lines) if line["id"] == number)
        turn = int(turn or n % 4 + 1)
        seen.add((n, turn))
        prompt, answer = served(conversations[names[n]])[turn - 1]
        assert ids[: len(prompt)] == prompt, (names[n], n, turn)
        if (names[n], turn) == (SPELLED, 4):
            assert ids[len(prompt) :] != answer and len(answer) > sum(mask[len(prompt) :])
            continue
        end = len(prompt) + len(answer)
        assert ids[len(prompt) : end] == answer, (names[n], n, turn)
        assert mask[len(prompt) :] == [1] * len(answer) + [0] * (len(ids) - end)
        earlier = [token for token, counts in zip(prompt, mask, strict=False) if counts]
        assert earlier in ([], served(conversations[names[n]])[turn - 2][1]), (names[n], n, turn)
    own = {(n, n % 4 + 1) for n in range(16)}
    # A call after a line break is written with two later, and thinking is dropped once the next question comes.
    again = {(n, 1) for n in (5, 6, 9, 10, 13, 14)} | {(n, 2) for n in (2, 6, 10, 14)}
    assert seen - own == (again if turns == "all" else set())


def test_a_draft_that_learned_from_the_log_drafts_for_the_same_server(agent, traffic, conversations):
    """`adapt` learns the server's ids and swaps; the server then starts with the draft, and says the same."""
    (agent / "current").symlink_to(agent / "draft", target_is_directory=True)
    flags = [f"--target={agent / 'target'}", f"--drafter={agent / 'current'}", f"--log=[{agent / 'log.jsonl'}]"]
    flags += [f"--output={agent / 'adapted'}", "--swap=true", "--newest=8", "--least=8", "--temperature=0"]
    flags += ["--learning={training: {num_train_epochs: 40, learning_rate: 0.003}}", "--max_new_tokens=64"]
    assert cli.main(["adapt", *flags]) == 0
    texts = [choice for answer in traffic[0] for choice in answer["choices"]]
    assert texts[0]["finish_reason"] == "stop" and texts[2]["stop_reason"] == "wants"
    ended = [text for text in texts[:2] if text["finish_reason"] == "stop"]  # the third was cut; the second is sampled
    expected = [(text["prompt_token_ids"], text["token_ids"]) for text in ended]
    chats = [pair for requests in conversations.values() for pair in served(requests)]
    learned = samples(agent / "adapted/step-0001/completions/learned")
    expected = [(prompt + answer, [0] * len(prompt) + [1] * len(answer)) for prompt, answer in expected + chats[:8]]
    assert sorted(learned.values()) == sorted(expected)
    newest = load_completions(str(agent / "adapted/step-0001/completions/newest-0"))  # the target answers here again
    asked = [row["input_ids"][: row["prompt_length"]] for row in newest]
    assert sorted(asked) == sorted(prompt for prompt, _ in chats[8:])
    assert (agent / "current").resolve() == (agent / "adapted/step-0001/drafter").resolve()
    drafting = {"method": "draft_model", "model": str(agent / "current"), "num_speculative_tokens": 4}
    counting = "--per-request-spec-decode-metrics", "summary"
    with vllm_server(agent / "target", agent / "drafting.log", drafting, *PARSERS, *counting) as server:
        accepted = 0
        for messages, variables, answer in conversations["ann"]:
            again = ask(server.url, messages, variables, return_token_ids=True)
            assert again["prompt_token_ids"] == answer["prompt_token_ids"]
            assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
            histogram = again["metrics"]["speculative_decoding"]["acceptance_histogram"]
            accepted += sum(n * count for n, count in enumerate(histogram))
    assert accepted > 0
