"""Arguments: what is told of them, what is refused, and the lines of errors."""

from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from draftsmith.decode.errors import (
    SHARE,
    InputError,
    at_least,
    at_most,
    between,
    finite,
    less_than,
    more_than,
    one_of,
    require,
    require_some,
)
from draftsmith.decode.measurement.distribution_test import prepared_sampler
from draftsmith.decode.options import Sampling
from draftsmith.decode.validation import Amount, Count, Finite, ServerMessage, Share, parse, parse_json, read
from draftsmith.scripts.cli import config_class
from draftsmith.train.cli import parse_config
from draftsmith.train.models import resolve_dtype
from draftsmith.train.options import checked_url


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "expected"),
    [
        (at_least(1), [1, 2.5, [1, 2]], [0, "four", float("nan"), [1, 0]], "at least 1"),
        (more_than(0) & at_most(1), [0.1, 1], [0, 1.5], "more than 0 and at most 1"),
        (at_least(0) & less_than(1), [0, 0.9], [-1, 1], "at least 0 and less than 1"),
        (between(0, 1), [0.5], [0, 1], "a value between 0 and 1"),
        (SHARE, [0, 0.5, 1], [-0.1, 1.1], "a share between 0 and 1"),
        (finite(at_least(0)), [0, 1], [-1, float("inf"), float("nan")], "a finite number, at least 0"),
        (one_of(("a", "b")), ["a", ["b", "a"]], ["c", 1], "one of a, b"),
    ],
)
def test_a_range_holds_or_says_what_it_expected(allowed, good, bad, expected):
    for value in good:
        allowed.check("field", value)
    for value in bad:
        found = value[-1] if isinstance(value, list) else value
        with pytest.raises(InputError) as error:
            allowed.check("field", value)
        assert str(error.value) == f"field: expected {expected}, found {found!r}"


def test_fields_are_checked_by_name_and_none_is_left_out():
    config = SimpleNamespace(limit=None, size=0, paths=[])
    require(config, at_least(1), "limit")
    with pytest.raises(InputError, match=r"^inner\.size: expected at least 1, found 0$"):
        require(config, at_least(1), "limit", "size", prefix="inner.")
    with pytest.raises(InputError, match=r"^paths: expected at least one directory, found none$"):
        require_some(config, "paths", "directory")


SETTINGS = [
    {},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "top_k": 5},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "min_p": 0.1, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_sampler_is_what_generate_prepares(target, settings):
    sampling = Sampling(**settings)
    ours, theirs = sampling.sampler(), prepared_sampler(target, **sampling.generate_kwargs())
    assert ours.do_sample == theirs.do_sample == (sampling.temperature > 0)
    assert [type(p) for p in ours.processors] == [type(p) for p in theirs.processors]
    contexts = [torch.tensor([3, 4, 3, 5, 3])]
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0))
    assert torch.equal(p := ours.probabilities(logits, contexts), theirs.probabilities(logits, contexts))
    assert ours.do_sample or p.max() == 1  # one-hot


WRONG = {"temperature": [-1.0], "top_k": [-1], "top_p": [0.0], "min_p": [1.0], "no_repeat_ngram_size": [-1]}
WRONG |= {"repetition_penalty": [0.0, float("inf")]}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_bad_sampling_is_refused_by_name(field, value):
    with pytest.raises(InputError, match=f"^{field}: expected .*, found {value}$"):
        Sampling(**{field: value})


@pytest.mark.parametrize("command", ["prepare", "doctor", "measure", "generate", "tune"])
def test_every_command_with_prompts_is_told_what_their_template_gets(command, tmp_path):
    needed = {"target": "T", "prompts": "P", "output": "O", "drafter": "unigram", "prompt": "hello", "chat": "true"}
    cls = config_class(command)
    flags = [part for name in (f.name for f in fields(cls)) if name in needed for part in (f"--{name}", needed[name])]
    asked = ["--chat_template_kwargs", '{"enable_thinking": false}', "--system_prompt", "Be brief."]
    config = parse_config(cls, [*flags, *asked, "--config={max_prompt_tokens: 9}"])
    assert config.template == {"system_prompt": "Be brief.", "variables": {"enable_thinking": False}}
    assert config.encoding == config.template | {"max_tokens": 9}
    file = tmp_path / "config.yaml"
    file.write_text("chat_template_kwargs: {enable_thinking: false, style: plain}")
    variables = {"enable_thinking": False, "style": "plain"}
    assert parse_config(cls, [*flags, "--config", str(file)]).chat_template_kwargs == variables


@pytest.mark.parametrize(
    ("stored", "device", "fast", "chosen"),
    [
        ("bfloat16", "cpu", True, "bfloat16"),
        ("bfloat16", "cpu", False, "float32"),
        ("bfloat16", "cuda", True, "bfloat16"),
        ("bfloat16", "cuda", False, "float32"),
        ("float16", "cpu", True, "float32"),
        ("float16", "cuda", False, "float16"),
        ("float64", "cpu", False, "float64"),
        (None, "cpu", True, "float32"),
    ],
)
def test_auto_is_the_stored_dtype_where_it_is_fast(tmp_path, monkeypatch, capsys, stored, device, fast, chosen):
    LlamaConfig(dtype=stored).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: fast)
    assert resolve_dtype("auto", tmp_path, device=torch.device(device)) == chosen
    line = capsys.readouterr().err
    assert line.startswith(f"dtype: {chosen}; {tmp_path} is stored in {stored or 'float32'}") and line.count("\n") == 1
    assert ("no fast arithmetic" in line) == (chosen != (stored or "float32"))
    assert resolve_dtype("bfloat16", "not looked at") == "bfloat16"


@pytest.mark.parametrize("url", ["http://127.0.0.1:80\n", "http://[::1]x:80", "http://a:1\x00", f"http://{'ü' * 80}"])
def test_a_url_that_cannot_be_asked_is_refused(url):
    with pytest.raises(InputError, match="server: expected a URL such as"):
        checked_url(url, "server")


def test_the_root_of_a_server_is_what_lies_before_v1():
    assert checked_url("http://127.0.0.1:8000/v1/", "server") == "http://127.0.0.1:8000"


DEEP = "[" * 1000 + "]" * 1000


class Part(ServerMessage):
    ids: list[Count] | None = None


@dataclass(frozen=True)
class Record:
    count: Count
    number: Finite = 0.0
    parts: tuple[Part, ...] = ()
    seconds: Amount = 0.0
    share: Share = 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it: expected JSON, found: EOF while parsing"),
        ('{"count": ' + DEEP + "}", "it: expected JSON, found: nested too deeply"),
        ('{"count": 1' + "0" * 400 + "}", "it: count: expected at most 9.0072e+15, found 10000"),
        ('{"count": "\\ud800"}', "it: expected JSON, found: "),
        ("[]", "it: expected an object, found []"),
        ("{}", "it: count: expected a value, found none"),
        ('{"count": "3"}', "it: count: expected a whole number, found '3'"),
        ('{"count": NaN}', "it: count: expected a whole number, found nan"),
        ('{"count": -1}', "it: count: expected at least 0, found -1"),
        ('{"count": 1, "number": 1e999}', "it: number: expected a finite number, found inf"),
        ('{"count": 1, "number": "1"}', "it: number: expected a number, found '1'"),
        ('{"count": 1, "share": 1.25}', "it: share: expected at most 1, found 1.25"),
        ('{"count": 1, "parts": [{}, {"ids": [1, null]}]}', "it: parts[1].ids[1]: expected a whole number, found None"),
    ],
)
def test_one_line_names_the_field_what_was_expected_and_found(text, message):
    with pytest.raises(InputError) as error:
        parse(Record, text, "it")
    assert str(error.value).startswith(message) and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_a_key_is_not_shown_not_even_half_of_it():
    with pytest.raises(InputError) as error:
        parse(Record, '{"count": "' + "x" * 50 + ' sk-secret"}', "it", secret="sk-secret")
    assert "sk" not in str(error.value) and "***" in str(error.value)


def test_a_file_is_named(tmp_path):
    path = tmp_path / "it.json"
    with pytest.raises(FileNotFoundError):
        read(Record, path)
    with pytest.raises(InputError, match=r"expected a file that can be read, found: Is a directory"):
        read(Record, tmp_path)
    path.write_bytes(b'{"count": "\xff"}')
    with pytest.raises(InputError, match="expected JSON, found: invalid unicode"):
        read(Record, path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5000, ""])
def test_whatever_is_wrong_with_json_is_one_error(text):
    with pytest.raises(ValueError, match=r"line 1 column \d+") as error:
        parse_json(text)
    assert "\n" not in str(error.value)
