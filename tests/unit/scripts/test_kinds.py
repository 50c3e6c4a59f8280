"""The list of kinds: names, fields, and what each says of itself."""

import json
import re

import pytest
from conftest import tiny_llama
from pages import ROOT

from draftsmith.decode import DraftModelProposer, PromptLookupProposer, Switch
from draftsmith.decode.errors import InputError
from draftsmith.scripts import cli
from draftsmith.scripts.configs import GenerateConfig, TreeConfig
from draftsmith.scripts.kinds import KINDS, drafter_specs, kind_named, kind_of, parse_drafter
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.train.cli import parse_config
from draftsmith.train.kinds.drafter import Drafter, Pair
from draftsmith.train.kinds.export import ExportOptions

CONFIGS = {
    "draft": {"model_type": "llama"},
    "parallel_draft": {"model_type": "llama", "pard_token": 7},
    "medusa": {"model_type": "medusa"},
    "eagle": {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]},
}


@pytest.fixture
def directories(tmp_path):
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def measured(*flags: str) -> list[str]:
    given = ["--target", "t", "--prompts", "p", "--output", "o"]
    return parse_config(MeasureConfig, [*given, *flags]).drafter


@pytest.mark.parametrize("name", CONFIGS)
def test_a_directory_says_its_kind(directories, name):
    assert kind_of(str(directories / name)).name == name
    assert parse_drafter(f"mine={directories / name}") == (
        "mine",
        kind_of(str(directories / name)),
        str(directories / name),
    )


def test_a_hybrids_argument_has_its_switch():
    (spec,) = drafter_specs(["hybrid:suffix:1+unigram@match=3,score=0.5,last=2"], [4])
    assert kind_named(spec.kind).turns(spec) == (Switch(3, 0.5), 2)


UNREAD = {
    "P-EAGLE": {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"]},
    "P-EAGLE ": {"model_type": "llama", "architectures": ["PEagleDraftModel"]},
    "speculators' mtp": {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"]},
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize(
    "argv",
    [
        ("measure", "--prompts", "p.txt", "--output", "o", "--drafter"),
        ("generate", "--prompt", "p", "--drafter"),
        ("doctor", "--drafter"),
        ("export", "--output", "o", "--format", "vllm", "--drafter"),
        ("export", "--output", "o", "--import_from"),
    ],
    ids=lambda argv: argv[0] + argv[-1],
)
def test_kinds_of_other_tools_that_are_not_read_are_named(name, argv, pair_dirs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("p")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(UNREAD[name]))
    assert cli.main([*argv, "./theirs", "--target", str(pair_dirs[0])]) == 2
    err = capsys.readouterr().err
    assert re.search(rf"(drafter|import_from): expected .*EAGLE-3 heads, .* in ./theirs, found {name.strip()}$", err)
    assert err.count("\n") == 1


def test_names_kinds_and_arguments(directories):
    draft = str(directories / "draft")
    for text, expected in (
        ("prompt_lookup", (None, "prompt_lookup", None)),
        ("short=prompt_lookup:2-5", ("short", "prompt_lookup", "2-5")),
        ("suffix:4", (None, "suffix", "4")),
        (f"draft:{directories / 'parallel_draft'}", (None, "draft", str(directories / "parallel_draft"))),
        (f"a=run_ahead:{draft}", ("a", "run_ahead", draft)),
    ):
        name, kind, argument = parse_drafter(text)
        assert (name, kind.name, argument) == expected
    specs = drafter_specs([draft, f"draft:{directories / 'parallel_draft'}", "prompt_lookup", f"mine={draft}"])
    both = [f"{directories.name}/draft", f"{directories.name}/parallel_draft"]  # of one kind: told apart by their paths
    assert [spec.name for spec in specs] == [*both, "prompt_lookup", "mine"]
    own = drafter_specs(["mtp", "mtp:runs/a", "mtp:runs/b"]), drafter_specs(["mtp:runs/a", "mtp"])
    assert [[spec.name for spec in specs] for specs in own] == [["mtp", "a", "b"], ["a", "mtp"]]


@pytest.mark.parametrize(
    ("texts", "refusal"),
    [
        (["oracle"], "drafter: expected a directory, a hub id or one of .*prompt_lookup.*, found oracle"),
        (["medusa"], "drafter: expected medusa:DIR, found medusa without a directory"),
        (["/nowhere"], "drafter: expected a model directory or a hub id, found nothing at /nowhere"),
        (["a=prompt_lookup", "a=lookahead"], "drafter: expected each name once, found a again"),
    ],
)
def test_what_is_no_drafter_is_refused(texts, refusal):
    with pytest.raises(InputError, match=refusal):
        drafter_specs(texts)


def test_older_flags_are_aliases(tmp_path):
    for kind in KINDS:
        for flag in kind.flags:
            value = "true" if kind.switch else "x"
            expected = [kind.name if kind.switch else f"{kind.name}:x"]
            assert measured(f"--{flag.replace('_', '-')}", value) == expected
    assert measured("--draft", '["a", "b"]', "--medusa", "h") == ["draft:a", "draft:b", "medusa:h"]
    file = tmp_path / "config.yaml"
    file.write_text("target: t\nprompts: p\noutput: o\ndraft: a\nprompt_lookup: true\n")
    assert parse_config(MeasureConfig, ["--config", str(file)]).drafter == ["draft:a", "prompt_lookup"]
    assert parse_config(MeasureConfig, ["--config", str(file), "--draft", "b"]).drafter == ["draft:b", "prompt_lookup"]
    assert parse_config(MeasureConfig, ["--config", str(file), "--drafter", "b"]).drafter == ["b"]
    assert measured("--drafter", "a", "--drafter=b", "--prompt_lookup") == ["a", "b", "prompt_lookup"]
    heads = ["--target", "t", "--completions", "[c]", "--heads", "h"]
    assert parse_config(TreeConfig, heads).drafter == ["h"]
    assert parse_config(GenerateConfig, ["--target", "t", "--prompt", "p", "--medusa", "h"]).drafter == ["medusa:h"]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.stored and not kind.formats], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("asked", ["export", "served", "import_from"])
def test_a_kind_without_files_says_why(kind, asked):
    with pytest.raises(InputError, match=f"drafter: expected one that can be exported, found {kind.title}: "):
        getattr(kind, asked)(ExportOptions(), "directory")


FOLDERS = ("decode", "train", "distill", "medusa", "scripts")
MOST = 3
# Keys and files of servers are their own, such as `parallel_drafting`; masks are "in parallel".
EAGLE = r"(?<!speculative[-_])(?<!spec_decode/)eagle(?!_aux_hidden_state_layer_ids)"
PARALLEL = r"parallel[ _-]?drafts?\b|paralleldraft|\bpard|parallel_(length|tree)|distill\.parallel"
NAMING = {"EAGLE": (EAGLE, "medusa/eagle"), "Medusa": ("medusa", "medusa"), "parallel": (PARALLEL, "distill/parallel")}


@pytest.mark.parametrize("kind", NAMING)
def test_few_files_outside_its_folder_name_a_kind(kind):
    pattern, own = NAMING[kind]
    sources = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    naming = [
        str(path.relative_to(ROOT))
        for path in sources
        if not path.is_relative_to(ROOT / own)
        and path != ROOT / "scripts/kinds.py"
        and re.search(pattern, path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert len(naming) <= MOST, naming


def test_a_drafters_positions_do_not_limit_the_text_and_what_it_leaves_out_is_said(capsys):
    target, draft = tiny_llama(0, 97), tiny_llama(1, 97)
    draft.config.max_position_embeddings = 24
    drafters = [
        Drafter("short", "draft", None, None, DraftModelProposer(draft), model=draft),
        Drafter("copies", "prompt_lookup", None, None, PromptLookupProposer()),
    ]
    pair = Pair(target, None, "float32", drafters)
    pair.check_positions(500, 12)
    with pytest.raises(InputError, match=r"^max_new_tokens: .* within the target's 512 positions, found 501 \+ 12 tok"):
        pair.check_positions(501, 12)
    assert pair.holds(24) and not pair.holds(25)
    pair.warn_undrafted([10, 30], [25, 45])
    assert not capsys.readouterr().err.count("copies")
    pair.warn_undrafted([10, 30], [28, 45])
    assert capsys.readouterr().err == "short: drafted none of 18 of 33 tokens, past its 24 positions\n"
