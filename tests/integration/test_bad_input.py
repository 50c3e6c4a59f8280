"""What users get wrong, at every command that has the door: one line that names it, and exit code 2."""

import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gemma import IMAGE, gemma_tokenizer, save_gemma, tiny_gemma

from draftsmith.medusa import MedusaHeads
from draftsmith.scripts import cli
from draftsmith.train.cli import flags_of
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.data.shards import COLUMNS

COUNT = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pair, heads, prompts, and what the target completed at T=0.

    Of a tiny Gemma 3 and its tokenizer, one of whose tokens has no logit: nothing minds it until a text has it.
    """
    root = tmp_path_factory.mktemp("made")
    for name, shape in {"target": {}, "draft": {"layers": 1}, "other": {"seed": 3}}.items():
        save_gemma(root / name, **shape)
    MedusaHeads.of_target(tiny_gemma(), 2).save_pretrained(root / "heads")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(COUNT)))
    paths = (str(root / name) for name in ("target", "prompts.jsonl", "completions"))
    prepare(PrepareConfig(*paths, max_new_tokens=8, temperature=0.0, dtype="float32", batch_size=2, shard_size=2))
    return root


@pytest.fixture
def command(made, tmp_path, capfd):
    """Run a command with fields over those that work; return its exit code and what it printed to standard error."""

    def run(name: str, **fields: object) -> tuple[int, str]:
        output = tmp_path / "out"
        given = {"target": made / "target", "dtype": "float32"}
        drafts = {"draft": made / "draft"}
        decodes = {"prompts": made / "prompts.jsonl", "output": output, "max_new_tokens": 4, "limit": 2}
        given |= {
            "generate": drafts | {"prompt": "def f(x):", "max_new_tokens": 4},
            "measure": drafts | decodes | {"costs": "none", "compiled": "false"},
            "tune": drafts | decodes | {"levels": '{"threshold": [0.1]}'},
            "profile": drafts | decodes,
            "doctor": drafts,
            "prepare": {"prompts": made / "prompts.jsonl", "output": output, "endpoint": "http://127.0.0.1:9/v1"},
            "certify": {"server": "http://127.0.0.1:9", "output": output / "certificate.json"},
            "tree": {"heads": made / "heads", "completions": f"[{made / 'completions'}]", "nodes": 4, "output": output},
            "export": {"heads": made / "heads", "format": "vllm", "output": output, "dtype": None},
        }[name]
        given |= fields
        capfd.readouterr()
        code = cli.main([name, *flags_of({k: v for k, v in given.items() if v is not None})])
        return code, capfd.readouterr().err

    return run


def refused(command, name: str, named: str, **fields: object) -> None:
    """Require that a command names what is wrong with a field, and says nothing else."""
    code, err = command(name, **fields)
    lines = [line for line in err.splitlines() if line and not line.startswith("dtype: ")]
    assert code == 2 and len(lines) == 1, err
    assert lines[0].startswith(f"error: {named}"), err


LOADING = ("generate", "measure", "tune", "profile", "doctor", "tree")
WRITING = ("measure", "tune", "profile", "tree", "export")


@pytest.mark.parametrize("name", LOADING)
def test_a_damaged_target_is_refused(command, made, tmp_path, name):
    target = shutil.copytree(made / "target", tmp_path / "target")
    os.truncate(target / "model.safetensors", 1000)
    refused(command, name, "target: ", target=target)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("name", WRITING)
def test_an_output_that_cannot_be_is_refused_before_the_work(command, tmp_path, monkeypatch, name):
    (tmp_path / "file").write_text("")
    refused(command, name, "output: ", output=tmp_path / "file", **({} if name == "export" else {"target": "nowhere"}))
    refused(command, name, "output: ", output=tmp_path / "file" / "below")


def test_a_file_of_findings_that_cannot_be_is_refused_before_the_work(command, tmp_path):
    (tmp_path / "file").write_text("")
    refused(command, "doctor", "json: expected a directory to write in", json=tmp_path / "file" / "below")
    refused(command, "doctor", "json: expected a file or nothing at", json=tmp_path)


@pytest.mark.parametrize("name", ["generate", "measure", "tune", "profile"])
def test_a_text_past_the_models_positions_is_refused(command, name):
    refused(command, name, "max_new_tokens: expected prompt and text within the target's 512", max_new_tokens=510)


@pytest.mark.parametrize("name", ["measure", "tune", "profile", "doctor"])
def test_prompts_that_cannot_be_are_refused(command, tmp_path, name):
    prompts = tmp_path / "prompts.jsonl"
    for text, found in (("[" * 10_000, "nested too deeply"), ('{"prompt": "a", "category": "\\ud800"}', "surrogate")):
        prompts.write_text(text)
        code, err = command(name, prompts=prompts)
        assert code == 2 and err.count("error: ") == 1 and f"error: {prompts}:1: " in err and found in err, err


NO_LOGIT = len(gemma_tokenizer(image=False))
BEYOND = f"expected tokens below the model's vocabulary of {NO_LOGIT}, found '{IMAGE}', which its tokenizer numbers "


@pytest.mark.parametrize("name", ["prepare", "generate", "measure", "tune", "profile", "doctor", "certify"])
def test_a_prompt_with_a_token_that_has_no_logit_is_refused_before_the_weights_are_read(
    command, made, tmp_path, monkeypatch, name
):
    """Such a token cannot be written, so that nothing else minds it. `prepare` looks before a server is asked."""
    target = shutil.copytree(made / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n' * 2 + f'{{"id": "picture", "prompt": "{IMAGE}?"}}\n')
    given, named = (
        {"target": target, "prompts": prompts, "limit": 3},
        f"{prompts}:3: prompt 'picture': {BEYOND}{NO_LOGIT}",
    )
    if name == "generate":
        given, named = {"target": target, "prompt": IMAGE}, f"prompt 'prompt': {BEYOND}{NO_LOGIT}"
    elif name == "doctor":
        given, named = {"prompts": prompts}, f"samples: 1 cannot be used; {named}"
    elif name == "tune":  # which reads the pair first
        given["target"] = made / "target"
    refused(command, name, named, **given)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ messages[0]['content'] + 3 }}", "TypeError: can only concatenate str"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ raise_exception('no system role') }}", "no system role"),
    ],
)
def test_a_chat_template_that_fails_is_refused(command, made, tmp_path, template, found):
    target = shutil.copytree(made / "target", tmp_path / "target")
    (target / "chat_template.jinja").write_text(template)
    named = f"prompt 'prompt': expected messages that the chat template renders, found: {found}"
    refused(command, "generate", named, target=target, chat="true")
    if "TypeError" not in found:
        return
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    named = f"{tmp_path}/chat.jsonl:1: prompt '0': expected messages that the chat template renders, found: {found}"
    refused(command, "measure", named, target=target, prompts=tmp_path / "chat.jsonl")
    named = f"samples: 1 cannot be used; {named}"
    refused(command, "doctor", named, target=target, prompts=tmp_path / "chat.jsonl")


def manifest(**fields: object):
    """Change a manifest; None takes a field out."""

    def change(directory):
        file = directory / "manifest.json"
        content = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return change


def samples(**columns):
    """Change columns of the first shard's samples: what a function of the sample returns."""

    def change(directory):
        file = directory / "shard-00000.parquet"
        rows = pq.ParquetFile(file).read().to_pylist()
        rows = [row | {name: of(row) for name, of in columns.items()} for row in rows]
        pq.write_table(pa.Table.from_pylist(rows, schema=COLUMNS), file)

    return change


def emptied(directory) -> None:
    for file in directory.glob("*.parquet"):
        pq.write_table(COLUMNS.empty_table(), file)


def copied(number: int):
    return lambda directory: shutil.copy(directory / "shard-00000.parquet", directory / f"shard-0000{number}.parquet")


def as_directory(directory) -> None:
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").mkdir()


FAULT = r"expected samples as draftsmith prepare writes them, found "
COMPLETIONS = {
    "no shards": (manifest(shards=None), "shards: expected a value, found none"),
    "a deep nest": (lambda directory: (directory / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
    "a directory": (as_directory, "Is a directory"),
    "no samples": (emptied, "found shards without samples"),
    "an id beyond": (samples(input_ids=lambda row: [9999] * len(row["input_ids"])), FAULT + "token 9999 with a"),
    "no ids": (samples(input_ids=lambda row: None), FAULT + "nothing in place of input_ids"),
    "a short mask": (samples(loss_mask=lambda row: row["loss_mask"][1:]), FAULT + "a loss_mask of another length"),
    "an odd mask": (samples(loss_mask=lambda row: [7] * len(row["loss_mask"])), FAULT + "7 in loss_mask"),
    "no prompt": (samples(prompt_length=lambda row: 0), FAULT + "a prompt_length that is none of its tokens"),
    "a sample twice": (copied(1), "expected each sample once, found '"),
    "a shard too many": (copied(9), "expected 3 shards, as manifest.json says, found 4"),
}  # fmt: skip


@pytest.mark.parametrize("fault", COMPLETIONS)
def test_completions_that_prepare_did_not_write_are_refused(command, made, tmp_path, fault):
    damage, named = COMPLETIONS[fault]
    completions = shutil.copytree(made / "completions", tmp_path / "completions")
    damage(completions)
    readers = {"doctor": completions} | ({"tree": f"[{completions}]"} if fault in ("no shards", "no ids") else {})
    for name, given in readers.items():
        code, err = command(name, completions=given)
        last = err.splitlines()[-1]
        assert code == 2 and last.startswith(f"error: {completions}") and named in last and "Traceback" not in err, err


def test_completions_of_another_target_are_told_of(command, made, capfd):
    cli.main(["doctor", "--target", str(made / "target"), "--completions", str(made / "completions")])
    assert "✓ origin: written by this target" in capfd.readouterr().out
    cli.main(["doctor", "--target", str(made / "other"), "--completions", str(made / "completions")])
    assert f"! origin: written by {made / 'target'}, another target" in capfd.readouterr().out.replace("\n", " ")
    code, err = command("tree", target=made / "other")
    assert code == 2 and "expected in" in err and "what" in err and "wrote at temperature 0" in err


def test_a_shard_that_is_missing_is_told_of(made, tmp_path, caplog):
    completions = shutil.copytree(made / "completions", tmp_path / "completions")
    (completions / "shard-00001.parquet").unlink()
    assert len(load_completions(str(completions))) == 4
    assert f"{completions}: unfinished, 2 of 3 shards are there" in caplog.text
