"""Sampling as commands say it, and the dtype that `auto` stands for."""

from dataclasses import fields

import pytest
import torch
from transformers import LlamaConfig

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.distribution_test import prepared_sampler
from draftsmith.decode.options import Filters, Sampling
from draftsmith.scripts.cli import config_class
from draftsmith.train.cli import parse_config
from draftsmith.train.models import resolve_dtype
from draftsmith.train.options import checked_url

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
    assert torch.equal(ours.probabilities(logits, contexts), theirs.probabilities(logits, contexts))


def test_filters_take_a_temperature():
    filters = Filters(top_k=3, min_p=0.1)
    assert filters.at(0.5) == Sampling(temperature=0.5, top_k=3, min_p=0.1)
    # What is not used is left out: it would cost a call a token.
    assert Sampling().generate_kwargs() == {"do_sample": False}
    assert set(Sampling(temperature=1.0).generate_kwargs()) == {"do_sample", "temperature", "top_k", "top_p"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1.0}, "temperature: expected a finite number, at least 0, found -1.0"),
        ({"top_k": -1}, "top_k: expected at least 0, found -1"),
        ({"top_p": 0.0}, "top_p: expected more than 0 and at most 1, found 0.0"),
        ({"min_p": 1.0}, "min_p: expected at least 0 and less than 1, found 1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a finite number, more than 0, found 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: expected a finite number, more than 0, found inf"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: expected at least 0, found -1"),
    ],
)
def test_bad_sampling_is_named(settings, named):
    with pytest.raises(InputError) as error:
        Sampling(**settings)
    assert str(error.value) == named


@pytest.mark.parametrize("command", ["prepare", "doctor", "measure", "generate", "tune", "profile"])
def test_every_command_with_prompts_is_told_what_their_template_gets(command, tmp_path):
    needed = {"target": "T", "prompts": "P", "output": "O", "drafter": "unigram", "prompt": "hello", "chat": "true"}
    needed |= {"threshold_levels": "[0.3]"}
    cls = config_class(command)
    flags = [part for name in (f.name for f in fields(cls)) if name in needed for part in (f"--{name}", needed[name])]
    asked = ["--chat_template_kwargs", '{"enable_thinking": false}', "--system_prompt", "Be brief."]
    config = parse_config(cls, [*flags, *asked, "--max_prompt_tokens", "9"])
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
