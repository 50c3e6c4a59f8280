"""Completions from a server: what it is asked, what its answers become, and how a run goes on after a kill."""

import json
import signal
from pathlib import Path

import pytest
from fake_server import COUNT, OTHER_END, backed, older_sglang, plain, refusal, rows, sglang, vllm
from gemma import IMAGE, gemma_tokenizer

from draftsmith.decode.errors import InputError
from draftsmith.scripts.prepare import main
from draftsmith.train.cli import flags_of
from draftsmith.train.data import generate as completions
from draftsmith.train.data.generate import prepare
from draftsmith.train.endpoint.client import ServedCompletion as Served
from draftsmith.train.endpoint.completions import Completion, Vocabulary, to_completion

pytest_plugins = ["server_fixtures"]


@pytest.mark.parametrize(("shape", "path"), [(vllm, "/v1"), (vllm, "/v1/completions"), (sglang, "/v1/")])
def test_completions_are_those_of_the_target_in_process(
    shape, path, remote, server, greedy, remote_tokenizer, in_process, monkeypatch
):
    backed(server, greedy, shape, remote_tokenizer)
    monkeypatch.setattr(completions, "load_model", None)
    cfg = remote(endpoint=server.root + path)
    summary = prepare(cfg)
    assert rows(cfg) == in_process
    assert {row["finish_reason"] for row in in_process} == {"stop", "length"}
    assert {row["input_ids"][-1] for row in in_process if row["finish_reason"] == "stop"} >= {OTHER_END}
    assert (summary.written, summary.uncertain, summary.padded, summary.untrainable) == (COUNT, 0, 0, [])
    assert len(server.asked) == COUNT
    manifest = json.loads((Path(cfg.output) / "manifest.json").read_text())
    assert manifest["source"] == {"answers": "target", "endpoint": server.root + path, "model": "tiny"}
    assert "dtype" not in manifest["settings"]


def test_text_is_tokenized_again_and_what_may_differ_is_counted(
    remote, server, greedy, remote_tokenizer, in_process, caplog, capsys
):
    backed(server, greedy, older_sglang, remote_tokenizer)
    summary = prepare(remote())
    pairs = list(zip(rows(remote()), in_process, strict=True))
    differing = sum(ours != theirs for ours, theirs in pairs)
    assert 0 < differing <= summary.uncertain < COUNT  # random bytes are no text, and some of it tokenizes otherwise
    assert all(ours["finish_reason"] == theirs["finish_reason"] for ours, theirs in pairs)
    assert all(
        ours["input_ids"][-1] in (remote_tokenizer.eos_token_id, OTHER_END)
        for ours, _ in pairs
        if ours["finish_reason"] == "stop"
    )
    backed(server, greedy, plain, remote_tokenizer)  # it does not even say which of the two ends it was
    stops = sum(row["finish_reason"] == "stop" for row in in_process)
    assert prepare(remote("plain")).uncertain >= max(stops, summary.uncertain)
    assert caplog.text.count("gives no token ids, so its text is tokenized again") == 2  # once a run
    cfg = remote("printed")
    flags = {name: getattr(cfg, name) for name in ("target", "prompts", "output", "endpoint", "max_new_tokens")}
    main(flags_of(flags))
    assert "completions may differ from what the target wrote" in capsys.readouterr().out


def test_text_that_tokenizes_to_as_many_tokens_is_certain(remote, server, remote_tokenizer):
    text = "return self"
    ids = remote_tokenizer(text)["input_ids"]
    server.answer = lambda path, body, number: older_sglang(body, [*ids, remote_tokenizer.eos_token_id], "stop", text)
    summary = prepare(remote())
    assert summary.uncertain == 0
    assert all(
        row["input_ids"][row["prompt_length"] :] == [*ids, remote_tokenizer.eos_token_id] for row in rows(remote())
    )
    more = [*ids, 1, remote_tokenizer.eos_token_id]
    server.answer = lambda path, body, number: older_sglang(body, more, "stop", text)
    assert prepare(remote("longer")).uncertain == COUNT


def test_every_setting_is_sent_and_nothing_is_left_to_the_server(remote, server, remote_prompts, remote_tokenizer):
    prepare(remote(temperature=0.7, top_k=5, top_p=0.9, seed=3))
    texts = [json.loads(line)["prompt"] for line in remote_prompts.read_text().splitlines()]
    asked = server.asked
    assert sorted(body["prompt"] for body in asked) == sorted(remote_tokenizer(text)["input_ids"] for text in texts)
    seeds = {body.pop("seed") for body in asked}
    assert len(seeds) == COUNT
    assert all(0 <= seed < 2**31 for seed in seeds)
    for body in asked:
        del body["prompt"]
        assert body == {
            "model": "tiny",
            "max_tokens": 12,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [remote_tokenizer.eos_token_id, OTHER_END],
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "return_token_ids": True,
        }
    assert all("Authorization" not in headers for _, headers, _ in server.requests)
    server.requests.clear()
    # the seed is the prompt's: in another order and batch it is the same
    prepare(remote("other", temperature=0.7, seed=3, shard_size=5))
    assert {body["seed"] for body in server.asked} == seeds
    assert {body["top_k"] for body in server.asked} == {-1}
    server.requests.clear()
    server.answer = lambda path, body, number: vllm(body, [65], "length")
    prepare(remote("greedy"))
    assert all("seed" not in body and body["temperature"] == 0 for body in server.asked)
    server.requests.clear()
    prepare(remote("mixed", temperatures=[0.0, 1.2]))
    heats = [body["temperature"] for body in server.asked]
    assert sorted(heats) == [0.0] * COUNT + [1.2] * COUNT
    assert all(("seed" in body) == (body["temperature"] > 0) for body in server.asked)
    assert sorted(row["temperature"] for row in rows(remote("mixed"))) == pytest.approx(sorted(heats))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Served("", "stop", None, [5, 1], None, 2), Completion([5, 1], "stop")),  # the end is listed
        (Served("", "stop", 2, [5], None, 1), Completion([5, 2], "stop")),  # it is not, but the server says which
        (Served("", "stop", None, [5], None, 1), Completion([5, 1], "stop", uncertain=True)),  # or does not
        (Served("", "stop", 3, [5], None, 2), Completion([5, 3], "length")),  # or a stop of its own
        (Served("", "stop", 3, [5, 3], None, 2), Completion([5, 3], "length")),
        (Served("", "stop", "\n", [5], None, 1), Completion([5], "length")),
        (Served("", "stop", None, [], None, 0), Completion([1], "stop", uncertain=True)),
        (Served("", "stop", None, [5, 0], None, 2), Completion([5, 0], "stop")),  # servers know the tokenizer's end too
        (Served("", "length", None, [5, 6], None, 2), Completion([5, 6], "length")),
        (Served("", "length", None, [5, 2, 6, 1], None, 4), Completion([5, 2], "stop")),  # it went on past the end
        (Served("", "length", None, [5, 300, 6], None, 3), Completion([5], "length", padded=True)),
        (Served("", "stop", None, [5, 1, 300], None, 3), Completion([5, 1], "stop")),
        (Served("", "length", None, [300], None, 1), Completion([], "length", padded=True)),
    ],
)
def test_a_completion_ends_with_the_first_end_of_sequence_token(answer, expected, remote_tokenizer):
    assert to_completion(answer, [4], Vocabulary(remote_tokenizer, 290, 320, [1, 2]), "prompt 'p'") == expected


@pytest.mark.parametrize(
    ("change", "uncertain"),
    [
        (lambda ids, end: (ids, None), False),
        (lambda ids, end: ([*ids, end], None), False),  # the end is listed, and not in the text
        (lambda ids, end: (ids, len(ids) + 1), False),  # the end is counted, and not listed
        (lambda ids, end: (ids, len(ids) + 2), True),
        (lambda ids, end: (ids[:2] + ids[3:], None), True),
        (lambda ids, end: (ids[:2] + ids[3:], len(ids)), True),
        (lambda ids, end: ([*ids, ids[0], ids[1]], None), True),
    ],
)
def test_ids_that_are_not_the_answers_text_or_number_are_told(change, uncertain, remote_tokenizer):
    text, end = "return self.value + 1", remote_tokenizer.eos_token_id
    ids, count = change(remote_tokenizer(text, add_special_tokens=False).input_ids, end)
    vocabulary = Vocabulary(remote_tokenizer, len(remote_tokenizer), len(remote_tokenizer), [end])
    assert to_completion(Served(text, "stop", None, ids, None, count), [65, 66], vocabulary, "p").uncertain is uncertain


def test_text_that_spells_a_token_without_a_logit_is_cut_there():
    """The target wrote it in pieces; ids of a server that names it are another model's."""
    tokenizer = gemma_tokenizer()
    size = len(tokenizer) - 1
    vocabulary, text = Vocabulary(tokenizer, size, size, [1]), f"def add{IMAGE}(a, b)"
    ids = tokenizer("def add", add_special_tokens=False).input_ids
    found = to_completion(Served(text, "length", None, None, None, None), [2], vocabulary, "p")
    assert (found.ids, found.finish_reason, found.padded) == (ids, "length", True)
    with pytest.raises(InputError, match=f"endpoint: expected ids below {size} for p, found {size}: does the server"):
        to_completion(Served("", "length", None, [5, size], None, 2), [2], vocabulary, "p")


def test_an_end_that_is_not_told_is_the_tokenizers(remote_tokenizer):
    answer = Served("", "stop", None, [5], None, 1)
    several = Vocabulary(remote_tokenizer, 290, 320, [OTHER_END, remote_tokenizer.eos_token_id])
    assert to_completion(answer, [4], several, "p") == Completion(
        [5, remote_tokenizer.eos_token_id], "stop", uncertain=True
    )
    single = Vocabulary(remote_tokenizer, 290, 320, [OTHER_END])
    assert to_completion(answer, [4], single, "p") == Completion([5, OTHER_END], "stop")
    with pytest.raises(InputError, match=r"^endpoint: expected at least one token for p, found none$"):
        to_completion(Served("", "length", None, [], None, 0), [4], several, "p")


def test_ids_that_pad_the_vocabulary_cut_a_completion_and_are_counted(remote, server, remote_tokenizer, capsys):
    padding = len(remote_tokenizer)
    server.answer = lambda path, body, number: vllm(body, [padding] if number == 1 else [65, padding + 1, 66], "length")
    cfg = remote()
    summary = prepare(cfg)
    assert summary.padded == COUNT
    first, *others = rows(cfg)
    assert summary.untrainable == [first["id"]]
    assert first["prompt_length"] == len(first["input_ids"])
    assert all(row["input_ids"][row["prompt_length"] :] == [65] for row in others)
    assert {row["finish_reason"] for row in rows(cfg)} == {"length"}
    assert prepare(cfg).untrainable == [first["id"]]  # of the kept samples too
    server.answer = lambda path, body, number: vllm(body, [320], "length")
    assert refusal(remote("other")) == (
        f"endpoint: expected ids below 320 for prompt {first['id']!r}, found 320: does the server run another model "
        "than --target?"
    )


def test_a_resume_asks_for_the_missing_batches_only(remote, server, greedy, remote_tokenizer, in_process, monkeypatch):
    backed(server, greedy, vllm, remote_tokenizer)
    real, written = completions.write_shard, []

    def interrupted(path, shard):
        real(path, shard)
        written.append(path.name)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(completions, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(remote())
    kept = {row["id"] for row in rows(remote())}
    assert len(kept) == 6
    server.requests.clear()
    summary = prepare(remote())
    assert (summary.kept, summary.written) == (6, 6)
    assert len(server.asked) == 6
    assert rows(remote()) == in_process
    server.requests.clear()
    prepare(remote(endpoint_model="tiny"))
    assert server.requests == []  # finished, and told the name: nobody is asked


def test_a_resume_knows_the_model_by_its_name_and_the_server_may_move(remote, server, remote_target):
    prepare(remote())
    begun = f"; {remote().output} was begun with other settings: give another --output, or remove it"
    moved = server.root.replace("127.0.0.1", "localhost")
    assert prepare(remote(endpoint=f"{moved}/v1")).kept == COUNT
    assert refusal(remote(endpoint_model="other")) == f"endpoint_model: expected 'tiny', found 'other'{begun}"
    assert refusal(remote(endpoint=None)) == f"endpoint_model: expected 'tiny', found None{begun}"
    assert refusal(remote(seed=1)) == f"seed: expected 0, found 1{begun}"
    server.models = ["tiny", "other"]
    assert refusal(remote()) == f"endpoint: expected one model at {server.root}/v1, found tiny, other"
    here = remote("here", endpoint=None, target=str(remote_target), limit=2)
    prepare(here)
    begun = f"; {here.output} was begun with other settings: give another --output, or remove it"
    there = remote("here", limit=2, endpoint_model="tiny")
    assert refusal(there) == f"endpoint_model: expected None, found 'tiny'{begun}"
