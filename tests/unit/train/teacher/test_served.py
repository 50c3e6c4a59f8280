"""A target on servers: its states, what is wrong with them, and servers that fail."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file, save_file
from state_server import Handler, StateServer, serving
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from draftsmith.decode.cache.features import last_norm
from draftsmith.decode.errors import InputError
from draftsmith.train.models import load_model
from draftsmith.train.teacher import served, served_check
from draftsmith.train.teacher.feature_shards import Layout, states_of
from draftsmith.train.teacher.served import ServedTarget, urls_of
from draftsmith.train.teacher.served_check import (
    check_states,
    compare_states,
    library_at_hand,
    require_files,
    require_served,
)
from draftsmith.train.teacher.target_ends import _ends as ends_of
from draftsmith.train.teacher.target_ends import _is_end as is_end
from draftsmith.train.teacher.target_ends import read_ends

LAYERS = [1, 2, 4]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    model = tiny_llama(0, layers=4)
    with torch.no_grad():  # a norm whose states a second norm would change
        model.model.norm.weight.copy_(torch.linspace(0.2, 3, 32))
    model.save_pretrained(folder := tmp_path_factory.mktemp("served"))
    return str(folder)


@pytest.fixture(scope="module")
def model(path):
    return load_model(path, device="cpu")


@pytest.fixture(scope="module")
def ends(path):
    return read_ends(path, "float32")


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(served, "FIRST_WAIT", 0.02)


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 97, (length,), generator=generator).tolist() for length in lengths]


TEXTS = texts(24, 64, 40, 56)
LAYOUT = Layout((1, 2), 32, "float32")


def asked(states: StateServer, *others: StateServer, ends=None, deadline: float = 30.0, given=TEXTS) -> list[dict]:
    """The states of texts from servers."""
    norm = None if ends is None else last_norm(ends)
    with serving(states, *others), ServedTarget([s.url for s in (states, *others)], norm, deadline=deadline) as target:
        return [row for _, (row,) in target.states(LAYOUT, given)]


def test_states_are_the_library_s(model, ends, path):
    rows = asked(StateServer(model, LAYERS, path), ends=ends, given=[*TEXTS, [5], [5, 6]])
    for row, ids in zip(rows, [*TEXTS, [5], [5, 6]], strict=True):
        (expected,) = states_of(model, LAYOUT, [ids])
        for name, states in expected.items():
            assert row[name].shape == states.shape and torch.allclose(row[name], states, atol=1e-5)


def test_servers_may_have_names_and_contexts_of_their_own(model, path):
    """A folder has another path on another machine, and less memory there takes shorter texts."""
    others = StateServer(model, LAYERS, path), StateServer(model, LAYERS, path, says={"max_model_len": 200}, name="b")
    with serving(*others) as servers, ServedTarget([one.url for one in servers]) as target:
        assert len(list(target.states(LAYOUT, TEXTS))) == len(TEXTS) and others[0].texts and others[1].texts
        assert target.served.max_model_len == 200


def test_a_server_that_rested_is_asked_whether_it_is_still_the_same(model, path, monkeypatch):
    """It may have been started again with another revision while no request was under way."""
    monkeypatch.setattr(served, "RESTART", 0.0, raising=False)
    with serving(one := StateServer(model, LAYERS, path)), ServedTarget([one.url]) as target:
        assert list(target.states(LAYOUT, TEXTS[:1]))
        one.says = {"commit": "another"}
        with pytest.raises(InputError, match="expected one target on all servers, found commit None"):
            list(target.states(LAYOUT, TEXTS[1:]))


def test_targets_whose_layers_stay_on_the_disk_have_the_same_states(model, ends, path):
    library = library_at_hand(path, "float32")
    assert sum(not weight.is_meta for weight in library.parameters()) < len(list(model.parameters()))
    ids = torch.tensor([TEXTS[0]])
    assert torch.allclose(library(ids).logits, model(ids).logits, atol=1e-6)
    assert library_at_hand(path, "float32", most=10) is None
    assert torch.equal(ends.lm_head.weight, model.lm_head.weight)
    assert ends.model.layers[0].mlp.up_proj.weight.is_meta


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4} | {
    **{"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8, "pad_token_id": 0},
    **{"bos_token_id": None, "eos_token_id": None},
}
FAMILIES = {
    "tied": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "scaled embeddings": Gemma2Config(**SMALL),
    "experts": Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "experts in one tensor": GptOssConfig(**SMALL, num_local_experts=4),
    "fp8": LlamaConfig(**SMALL),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_are_read_alone(family, tmp_path):
    """As the library loads them; the files of other layers need not be there."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    if family == "fp8":
        quantize(tmp_path, set(index.values()))
    dtype = "bfloat16" if family == "fp8" else "float32"
    expected = dict(ends_of(load_model(tmp_path, dtype=dtype, device="cpu")))
    kept = {file for name, file in index.items() if is_end(name, 2)}
    for file in set(index.values()) - kept:
        (tmp_path / file).unlink()
    assert len(kept) < len(set(index.values()))
    ends = read_ends(str(tmp_path), dtype)
    found = dict(ends_of(ends))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert (ends.lm_head.weight is ends.model.embed_tokens.weight) == ends.config.tie_word_embeddings
    assert not any(parameter.requires_grad for parameter in ends.parameters())
    assert str(ends.dtype) == f"torch.{dtype}" and ends.model.layers[0].input_layernorm.weight.is_meta


def quantize(folder: Path, files: set[str]) -> None:
    """Store the maps of a checkpoint in fp8, with one scale each."""
    for file in files:
        weights = load_file(folder / file)
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            scale = weights[name].abs().amax().view(1, 1) / 448
            weights |= {name: (weights[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        save_file(weights, folder / file, {"format": "pt"})
    names = {name: file for file in files for name in load_file(folder / file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


def faulty(model) -> dict[str, tuple[dict, str]]:
    """Faults of a server, and the line that names each."""
    norm = model.model.norm
    return {
        "after the norm": (
            {"fault": lambda states, ids: (torch.cat([states[:, :-1], norm(states[:, -1:])], 1), ids)},
            "before the last norm, found those after it",
        ),
        "not a number": (
            {"fault": lambda states, ids: (states.index_fill(0, torch.tensor([3]), torch.nan), ids)},
            "finite, found NaN",
        ),
        "other tokens": ({"fault": lambda states, ids: (states, ids[::-1])}, "tokens that were sent.* found those of"),
        "short": ({"fault": lambda states, ids: (states[:-1], ids)}, r"3, 32\) in float32, found \(\d+, 3, 32\)"),
        "another dtype": ({"fault": lambda states, ids: (states.half(), ids)}, "in float32, found .* in float16"),
        "rows of others": (
            {"fault": lambda states, ids: (states.roll(1, 0), ids)},
            "as the library computes them, found others",
        ),
        "another revision": (
            {"fault": lambda states, ids: (states + 0.2 * states.std() * torch.randn(states.shape), ids)},
            "as the library computes them, found others",
        ),
        "layers counted from 0": (
            {"layer_ids": [0, 1, 3], "says": {"layer_ids": LAYERS}},
            "found those after 0 layers",
        ),
        "one other layer": ({"layer_ids": [1, 3, 4], "says": {"layer_ids": LAYERS}}, "found those after 3 layers"),
        "another model's files": ({"says": {"files": {"config.json": "0"}}}, "whose config.json is another"),
        "another width": ({"says": {"hidden_size": 64}}, "hidden_size 32 at .*, found .* with 64"),
        "without the last layer": ({"layer_ids": [1, 2, 3]}, "after the layers 2, 4 .* found those after 1, 2, 3"),
    }


NAMES = list(faulty(tiny_llama(0)))


@pytest.mark.parametrize("fault", NAMES)
def test_what_is_wrong_is_named(model, ends, path, fault):
    options, line = faulty(model)[fault]
    server = StateServer(**{"model": model, "layer_ids": LAYERS, "path": path} | options)
    with serving(server), pytest.raises(InputError, match=line) as error, ServedTarget([server.url]) as target:
        require_served(target.served, server.url, model.config, [2])
        require_files(target.served, server.url, path)
        check_states(target, ends, TEXTS, library_at_hand(path, "float32"))
    assert "\n" not in str(error.value) and server.url in str(error.value)


@pytest.mark.parametrize("fault", ["after the norm", "rows of others", "another revision"])
def test_the_head_alone_names_them_too(model, ends, path, fault):
    options, _ = faulty(model)[fault]
    server = StateServer(model, LAYERS, path, **options)
    line = "found those after it" if fault == "after the norm" else "differ from the server's own log probabilities"
    with serving(server), ServedTarget([server.url]) as target, pytest.raises(InputError, match=line):
        check_states(target, ends, TEXTS, None)


def test_the_right_target_agrees(model, ends, path):
    server = StateServer(model, LAYERS, path)
    with serving(server), ServedTarget([server.url]) as target:
        assert require_files(target.served, server.url, path)
        (found,) = check_states(target, ends, TEXTS, library_at_hand(path, "float32"))
    assert found.nats < 1e-4 and max(found.shares.values()) < 1e-4 and set(found.shares) == set(LAYERS)


@pytest.mark.parametrize("trained", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("serves", ["float32", "bfloat16"])
def test_training_and_servers_may_hold_the_target_in_two_dtypes(serves, trained, path, monkeypatch):
    """And the states of another layer are found all the same. A model so small rounds little, so less is allowed."""
    monkeypatch.setitem(served_check.SHARES, torch.float32, 1e-4)
    monkeypatch.setitem(served_check.NATS, torch.float32, 1e-4)
    ends, model = read_ends(path, trained), load_model(path, device="cpu", dtype=serves)
    with serving(StateServer(model, LAYERS, path)) as (server,):
        compare_states([server.url], path, ends, TEXTS)
        server.layer_ids, server.says = [1, 3, 4], {"layer_ids": LAYERS}
        with pytest.raises(InputError, match="found those after 3 layers"):
            compare_states([server.url], path, ends, TEXTS)


def test_servers_must_be_of_one_target(model, path):
    other = StateServer(model, LAYERS, path, says={"dtype": "bfloat16"})
    with pytest.raises(InputError, match=r"one target on all servers, found dtype float32 at .*, bfloat16 at"):
        asked(StateServer(model, LAYERS, path), other)


@pytest.mark.parametrize("aborts", [False, True])
def test_the_work_of_a_server_that_ends_is_done_by_another(model, ends, path, aborts):
    """It dies; or, as vLLM does when it is told to end, it answers what it aborts without states."""
    ending, other = StateServer(model, LAYERS, path, dies_after=None if aborts else 3), StateServer(model, LAYERS, path)
    complete = ending.complete

    def abort(body: dict) -> dict | None:
        answer = complete(body)
        return answer if answer is None or len(ending.texts) < 3 else answer | {"kv_transfer_params": None}

    ending.complete = abort if aborts else complete
    given = texts(*range(10, 40))
    rows = asked(ending, other, ends=ends, given=given)
    assert len(other.texts) >= 20
    for row, ids in zip(rows, given, strict=True):
        assert torch.allclose(row["hidden"], states_of(model, LAYOUT, [ids])[0]["hidden"], atol=1e-5)


def revived(server: StateServer, **says: str) -> None:
    """Bring a server back soon after it has died; it says something else then."""

    def back() -> None:
        while server.alive:
            time.sleep(0.01)
        time.sleep(0.1)
        server.says, server.dies_after, server.alive = says, None, True

    threading.Thread(target=back, daemon=True).start()


def test_a_server_that_comes_back_is_asked_again(model, path, capsys):
    server = StateServer(model, LAYERS, path, dies_after=2)
    revived(server)
    assert len(asked(server)) == len(TEXTS)
    failed, *_, back = capsys.readouterr().err.splitlines()
    assert failed.endswith("; it is asked again until it answers") and back == f"teacher: {server.url} answers again"
    revived(other := StateServer(model, LAYERS, path, dies_after=2), vllm="0.33.0")
    with pytest.raises(InputError, match=r"one target on all servers, found vllm 0.32.0 at .* 0.33.0 at"):
        asked(other)


def test_an_answer_after_a_failure_may_be_another_target_s(model, path, monkeypatch):
    """A request that was sent before the failure does not clear its server."""
    monkeypatch.setattr(served, "FIRST_WAIT", 10.0)
    server, failed = StateServer(model, LAYERS, path), threading.Event()
    complete = server.complete

    def restarted(body: dict) -> dict | None:
        if len(body["prompt"]) == len(TEXTS[1]) - 1 and not failed.is_set():
            server.says = {"vllm": "0.33.0"}
            failed.set()
            return None
        failed.wait()
        time.sleep(0.2)
        return complete(body)

    server.complete = restarted
    with pytest.raises(InputError, match=r"one target on all servers, found vllm 0.32.0 at .* 0.33.0 at"):
        asked(server)


def test_no_server_within_the_deadline_is_one_line(model, path):
    with pytest.raises(
        InputError, match="an answer of any server within 1 s, found none: teacher: expected what it serves"
    ) as error:
        asked(StateServer(model, LAYERS, path, dies_after=0), deadline=1.0)
    assert "\n" not in str(error.value)


def test_requests_are_bounded(model, path, monkeypatch):
    monkeypatch.setattr(served, "TOKENS", 100)
    server, most = StateServer(model, LAYERS, path, pause=0.02), [0]
    complete = server.complete

    def counted(body: dict) -> dict | None:
        under_way.append(len(body["prompt"]))
        most[0] = max(most[0], sum(under_way))
        answer = complete(body)
        under_way.remove(len(body["prompt"]))
        return answer

    under_way: list[int] = []
    server.complete = counted
    asked(server, given=texts(*[30] * 12, 200))
    assert most[0] <= 200  # the long one alone


@pytest.mark.parametrize("name", ["notes.txt", "nul\0.safetensors"])
def test_a_name_that_is_no_file_of_states_is_not_fetched(model, path, name):
    server = StateServer(model, LAYERS, path)
    complete = server.complete
    server.complete = lambda body: complete(body) | {"kv_transfer_params": {"hidden_states_path": f"/a/{name}"}}
    with pytest.raises(InputError, match="hidden_states_path: expected"):
        asked(server, deadline=0.1)


def test_a_server_without_its_list_of_models_or_our_middleware_is_one_line(model, path, monkeypatch):
    listed, missing = Handler.do_GET, b'{"detail":"Not Found"}'
    failing = lambda self: self.reply(b"{}", 503) if self.path == "/v1/models" else listed(self)  # noqa: E731
    for answer, message in (
        (failing, r"expected a list of models from .* found 503"),
        (lambda self: self.reply(missing, 404), r"found 404 Not Found; docs/teachers.md says how to start it"),
    ):
        monkeypatch.setattr(Handler, "do_GET", answer)
        with pytest.raises(InputError, match=message):
            asked(StateServer(model, LAYERS, path))


def test_nothing_of_a_target_stays_open(model, path):
    server = StateServer(model, LAYERS, path)

    def opened() -> int:
        until = time.monotonic() + 10
        while any(thread.name == "teacher" for thread in threading.enumerate()) and time.monotonic() < until:
            time.sleep(0.01)
        return sum("socket" not in os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists())

    asked(server)
    before = opened()
    for _ in range(3):
        asked(server)
    assert opened() <= before


def test_a_fast_server_does_more_than_a_slow_one(model, path, monkeypatch):
    monkeypatch.setattr(served, "REQUESTS", 2)
    slow, fast = StateServer(model, LAYERS, path, pause=0.2), StateServer(model, LAYERS, path)
    asked(slow, fast, given=texts(*[20] * 40))
    assert 0 < len(slow.texts) < 20 and len(slow.texts) + len(fast.texts) == 40


@pytest.fixture
def hanging(model, path):
    """A server that takes requests and answers none."""
    server, over = StateServer(model, LAYERS, path), threading.Event()
    server.complete = lambda body: server.texts.append(tuple(body["prompt"])) or (over.wait() and None)
    yield server
    over.set()


def test_the_work_of_a_server_that_hangs_is_done_by_another(model, path, hanging):
    other = StateServer(model, LAYERS, path)
    with serving(hanging, other), ServedTarget([hanging.url, other.url], timeout=1) as target:
        assert len(list(target.states(LAYOUT, TEXTS))) == len(TEXTS)
    assert set(other.texts) == {tuple(ids[:-1]) for ids in TEXTS}  # on a busy machine some are asked for twice
    assert hanging.texts


def test_few_texts_are_asked_for_before_others_are_read(model, path, monkeypatch):
    monkeypatch.setattr(served, "AHEAD", 60 * LAYOUT.position_bytes)
    server, given = StateServer(model, LAYERS, path), texts(*[20] * 9, 200, 20)
    with serving(server), ServedTarget([server.url]) as target:
        rows = target.states(LAYOUT, given)
        assert next(rows)[0] == [0]
        while len(server.texts) < 3:
            time.sleep(0.01)
        assert [number for numbers, _ in rows for number in numbers] == list(range(1, 11))
    assert [len(text) for text in server.texts] == [len(ids) - 1 for ids in given]


def test_urls_are_listed():
    assert urls_of(["vllm:http://a,http://b", "vllm:http://c"]) == ["http://a", "http://b", "http://c"]
    refused = {value: "teacher: expected vllm:URL" for value in ("http://a", "vllm", "vllm:", "sglang:http://a")}
    refused |= {
        "vllm:http://a,http://a/v1": "each server once",
        "vllm:http://a,": r"expected a URL such as .*, found ''",
    }
    for value, message in refused.items():
        with pytest.raises(InputError, match=message):
            urls_of([value])
