"""Every shipped YAML builds the dataclass it is for."""

from dataclasses import fields
from pathlib import Path

import pytest
from pages import ROOT

from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DistillConfig
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.mtp.config import MtpTrainingConfig
from draftsmith.scripts.choose.config import ChooseConfig
from draftsmith.scripts.configs import GenerateConfig, ProfileConfig, TreeConfig
from draftsmith.scripts.doctor.command import DoctorConfig
from draftsmith.scripts.engines.certify.config import CertifyConfig
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.scripts.services.serve_draft.config import ServeDraftConfig
from draftsmith.scripts.tune.config import TuneConfig
from draftsmith.train.cli import parse_config
from draftsmith.train.data.generate import PrepareConfig
from draftsmith.train.teacher.cache_writer import CacheConfig

CONFIGS = ROOT / "configs"
FOLDERS = {
    "distill": DistillConfig,
    "medusa": MedusaTrainingConfig,
    "block": BlockTrainingConfig,
    "eagle": EagleTrainingConfig,
    "mtp": MtpTrainingConfig,
    "tree": TreeConfig,
    "prepare": PrepareConfig,
    "cache": CacheConfig,
    "certify": CertifyConfig,
    "choose": ChooseConfig,
    "doctor": DoctorConfig,
    "generate": GenerateConfig,
    "measure": MeasureConfig,
    "tune": TuneConfig,
    "profile": ProfileConfig,
    "serve-draft": ServeDraftConfig,
    "serve": CoordinatorConfig,
}
OF_FILES = {Path("measure/server.yaml"): MeasureServerConfig}
FOREIGN = {"accelerate", "cluster", "deepspeed"}  # read by those libraries, not by ours
FOREIGN_FILES = {
    Path("cluster/compose.yaml"),
    Path("serve/compose.yaml"),
    Path("serve/ray.yaml"),
}  # tested in tests/integration/test_services.py
FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.y*ml"))
OURS = [path for path in FILES if path.parts[0] not in FOREIGN and path not in FOREIGN_FILES]

DISTILL = "target: t\ndraft: d\ncompletions: [c]\n"
CACHE = "target: t\ncompletions: [c]\noutput: o\n"


def parse(cls, text: str, tmp_path: Path, *flags: str):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return parse_config(cls, ["--config", str(path), *flags])


def config_of(path: Path):
    return OF_FILES.get(path, FOLDERS[path.parts[0]])


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_file_lies_in_a_known_folder(path):
    assert len(path.parts) == 2 and path.parts[0] in FOLDERS.keys() | FOREIGN
    assert path.suffix == ".yaml"


@pytest.mark.parametrize("path", OURS, ids=str)
def test_it_parses(path):
    cls = config_of(path)
    # bf16 asks for a GPU, which machines that test need not have.
    flags = ["--training.use_cpu", "true"] if any(field.name == "training" for field in fields(cls)) else []
    assert isinstance(parse_config(cls, ["--config", str(CONFIGS / path), *flags]), cls)


def test_the_old_name_of_recomputation_is_heard(tmp_path):
    config = parse(DistillConfig, DISTILL + "training: {gradient_checkpointing: true}\n", tmp_path)
    assert config.training.activation_checkpointing
    assert not parse(DistillConfig, DISTILL, tmp_path).training.activation_checkpointing


@pytest.mark.parametrize(
    ("more", "best", "evaluated"),
    [
        ("", False, "no"),
        ("heldout: 0.1\n", True, "steps"),
        ("heldout: 0.1\ntraining: {save_strategy: epoch}\n", True, "epoch"),
        ("heldout: 0.1\ntraining: {save_strategy: best}\n", True, "steps"),
        ("heldout: 0.1\ntraining: {eval_strategy: steps, eval_steps: 7, save_strategy: epoch}\n", True, "steps"),
        ("heldout: 0.1\ntraining: {save_strategy: 'no'}\n", False, "no"),
        ("heldout: 0.1\ntraining: {load_best_model_at_end: false}\n", False, "no"),
    ],
)
def test_checkpoints_are_compared_where_there_is_held_out_text(more, best, evaluated, tmp_path):
    training = parse(DistillConfig, DISTILL + more, tmp_path).training
    assert training.load_best_model_at_end == best and training.eval_strategy == evaluated
    assert not best or (training.metric_for_best_model, training.greater_is_better) == ("mean_acceptance_length", True)


def test_what_the_library_refuses_is_one_line(tmp_path):
    with pytest.raises(InputError, match="save and eval strategy to match") as error:
        parse(DistillConfig, DISTILL + "training: {load_best_model_at_end: true, save_strategy: steps}\n", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", {path.parts[0]: path for path in OURS}.values(), ids=str)
def test_an_unknown_key_is_refused(path, tmp_path):
    """In one file of each command."""
    with pytest.raises(InputError, match="no_such_key") as error:
        parse(config_of(path), (CONFIGS / path).read_text() + "\nno_such_key: 1\n", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (CACHE + "k: much\n", "k"),
        ("target: t\noutput: o\n", "completions"),
        ("target: t\n\toutput: o\n", "config"),
        ("target: t\noutput: o\ncompletions: []\n", "completions: expected at least one directory"),
        (DISTILL + "training: {no_such_key: 1}\n", "no_such_key"),
        (DISTILL + "training: {max_steps: many}\n", r"^training\.max_steps: expected a whole number, found many$"),
        (DISTILL + "training: 5\n", "^training: expected fields and their values, found 5$"),
        (DISTILL + "training: {save_strategy: never}\n", "^training: expected one of 'no', .*, found 'never'$"),
        (DISTILL + "training: {fsdp_config: 5}\n",
         r"^training\.fsdp_config: expected fields and their values or text or null, found 5$"),
        (DISTILL + "heldout: {a: 1}\n", r"^heldout: expected a number or a list, found \{'a': 1\}$"),
        (DISTILL + "init: {layers: x}\n", r"^init\.layers: expected a whole number or a list or null, found x$"),
        (CACHE + "k: [1\n", r"^config: expected YAML in .*config\.yaml, line \d, found: "),
        ("- 1\n", r"^config: expected fields and their values in .*config\.yaml, found a list$"),
        (CACHE + "output: \x01\n", r"^config: expected YAML in UTF-8 in .*config\.yaml, found other"),
        (DISTILL + "training: {eval_strategy: steps, eval_steps: 1}\n", "heldout: expected completion directories"),
        (DISTILL + "training: {eval_on_start: true}\n", "directories for training.eval_on_start, or a share"),
        (DISTILL + "heldout: 1.5\n", "heldout: expected a value between 0 and 1, found 1.5"),
        (DISTILL + "source_weights: [1, 2]\n", "source_weights: expected one for each of 1 completions, found 2"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name_and_in_one_line(text, named, tmp_path):
    with pytest.raises(InputError, match=named) as error:
        parse(DistillConfig if text.startswith(DISTILL) else CacheConfig, text, tmp_path)
    assert "\n" not in str(error.value)


def test_what_few_runs_vary_has_no_flag(tmp_path):
    assert parse(DistillConfig, DISTILL, tmp_path, "--config={beta: 0.25}").beta == 0.25
    for flags in (["--beta", "0.25"], ["--beta=0.25"]):
        with pytest.raises(InputError, match=r"^beta: expected it in --config, in a file or as '{beta: VALUE}'"):
            parse(DistillConfig, DISTILL, tmp_path, *flags)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml"):
        parse_config(CacheConfig, ["--config", str(tmp_path / "nowhere.yaml")])


def test_numbers_are_numbers_and_flags_win(tmp_path):
    text = DISTILL + "beta: 1e-4\ntraining: {output_dir: out, learning_rate: 1e-4, weight_decay: 1, max_steps: 7}\n"
    config = parse(DistillConfig, text, tmp_path, "--training.max_steps", "9", "--config", "{beta: 0.25}")
    assert config.beta == 0.25
    assert isinstance(config.training.learning_rate, float) and config.training.learning_rate == 1e-4
    assert isinstance(config.training.weight_decay, float)
    assert (config.training.max_steps, config.training.output_dir) == (9, "out")
    assert parse(DistillConfig, text, tmp_path).beta == 1e-4


def test_what_is_held_out_is_a_share_or_directories(tmp_path):
    for flag, expected, directories in (("0.02", 0.02, []), ("[a, b]", ["a", "b"], ["a", "b"])):
        for config in (
            parse(DistillConfig, DISTILL, tmp_path, "--heldout", flag),
            parse(DistillConfig, f"{DISTILL}heldout: {flag}\n", tmp_path),
        ):
            assert (config.heldout, config.heldout_directories) == (expected, directories)


def test_sources_have_weights_and_are_named_once(tmp_path):
    flags = ["--completions", "[c, d]", "--config", "{source_weights: [1, 0.3]}"]
    assert parse(DistillConfig, DISTILL, tmp_path, *flags).source_weights == [1.0, 0.3]
    with pytest.raises(InputError, match=r"^completions: expected each directory once, found \./c again"):
        parse(DistillConfig, DISTILL, tmp_path, "--completions", "[c, d, ./c]")


def test_lists_of_numbers_are_read_from_either_form(tmp_path):
    text = "target: t\ndraft: d\nprompts: p\noutput: o\n"
    for more in ("draft_length: 1,4\ntemperature: 0,0.5\n", "draft_length: [1, 4]\ntemperature: [0, 0.5]\n"):
        config = parse(MeasureConfig, text + more, tmp_path)
        assert (config.draft_length, config.temperature) == ([1, 4], [0.0, 0.5])
    config = parse(MeasureConfig, text + "draft_length: 8\ntemperature: 1\n", tmp_path)
    assert (config.draft_length, config.temperature) == ([8], [1.0])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("target: a\nk: 1\ntarget: b\n", "target: expected it once in .*, found it in lines 1 and 3"),
        ("completions: [{a: 1, a: 2}]\n", "a: expected it once"),
        ("k: {<<: {a: 1}, <<: {b: 2}, c: 1, c: 2}\n", "c: expected it once"),
        ("target: &a [*a]\n", r"target: expected text, found \[\[\.\.\.\]\]"),
    ],
)
def test_a_key_twice_is_refused(text, named, tmp_path):
    (tmp_path / "twice.yaml").write_text(text)
    with pytest.raises(InputError, match=named) as error:
        parse_config(CacheConfig, [f"--config={tmp_path / 'twice.yaml'}"])
    assert "\n" not in str(error.value)


MEASURE = ["--target", "t", "--draft", "d", "--prompts", "p", "--output", "o"]
TREE = ["--target", "t", "--heads", "h", "--completions", "[c]"]
TRAIN = ["--target", "t", "--completions", "[c]", "--training.use_cpu", "true"]
PAIRS = ["--pairs", "[]"]
GENERATE = ["--target", "t", "--draft", "d", "--prompt", "p"]


@pytest.mark.parametrize(
    ("cls", "flags", "named"),
    [
        (MeasureConfig, [*MEASURE, "--draft-length", "4,8,4"], "draft_length: expected each number once, found 4"),
        (MeasureConfig, [*MEASURE, "--temperature", "0,-0.0"], "temperature: expected each number once, found -0.0"),
        (MeasureConfig, [*MEASURE, "--temperature", "nan"], "temperature: expected a finite number"),
        (MeasureConfig, [*MEASURE, "--draft-length", "1000"], "draft_length: expected at least 1 and at most 256"),
        (MeasureConfig, [*MEASURE, "--threads", "1000000"], "threads: expected at least 1 and at most 1024"),
        (MeasureConfig, [*MEASURE, "--seed", str(10**20)], "seed: expected a whole number below 2 to the power of 62"),
        (MeasureConfig, [*MEASURE, "--min-speedup", "-1"], "min_speedup: expected more than 0"),
        (TreeConfig, [*TREE, "--nodes", "1000000"], "nodes: expected at least 1 and at most 1024"),
        (EagleTrainingConfig, [*TRAIN, "--num-steps", "100000"], "num_steps: expected at most 256, found 100000"),
        (EagleTrainingConfig, [*TRAIN, "--config", "{decay: 1e300}"], "decay: expected at most 10, found 1e.300"),
        (CoordinatorConfig, ["--pairs", "[5]"], "pairs: expected fields and their values, found 5$"),
        (CoordinatorConfig, [*PAIRS, "--rules", "[{pair: 5}]"], r"rules\.pair: expected text or null, found 5$"),
        (CoordinatorConfig, [*PAIRS, "--log", "{path: [1]}"], r"log\.path: expected text, found \[1\]$"),
    ],
)  # fmt: skip
def test_numbers_that_no_run_can_use_are_refused(cls, flags, named):
    with pytest.raises(InputError, match=f"^{named}") as error:
        parse_config(cls, flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["a"], ["a"]),
        (["a,b:c"], ["a,b:c"]),
        (["[a, b]"], ["a", "b"]),
        (["a", "b"], ["a", "b"]),
        (["[a, b]", '["c,d"]'], ["a", "b", "c,d"]),
    ],
)
def test_a_field_of_several_texts_takes_one_or_a_list_or_the_flag_again(flags, found):
    argv = [part for flag in flags for part in ("--completions", flag)]
    assert parse_config(CacheConfig, ["--target", "t", "--output", "o", *argv]).completions == found


def test_a_flag_without_its_text_is_named():
    for argv in (["--completions"], ["--completions", "--output", "o"]):
        with pytest.raises(InputError, match=r"completions.*expected one argument"):
            parse_config(CacheConfig, ["--target", "t", *argv])
