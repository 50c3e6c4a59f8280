"""Targets of families with recurrent states, chunks, experts or images: each command takes them, or says why not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import HIDDEN, tiny_model
from gemma import gemma_tokenizer, seeing_gemma, tiny_gemma
from safetensors.torch import load_file, save_file
from specimens import rotated
from transformers import AutoModelForImageTextToText, MambaConfig, MambaForCausalLM, Mistral3Config, Qwen2_5_VLConfig

from draftsmith.decode import DraftModelProposer, early_exit, speculative_generate
from draftsmith.decode.cache import NO_PROGRAMS, CachedModel, cached_numbers, state_bytes
from draftsmith.decode.cache.features import last_norm
from draftsmith.decode.cache.layers import Layer
from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as distill_command
from draftsmith.distill.draft_init import text_model
from draftsmith.medusa.block import __main__ as block_command
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.eagle import __main__ as eagle_command
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.heads import __main__ as medusa_command
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.scripts import pair
from draftsmith.scripts.cli import main
from draftsmith.scripts.pair import NOT_HERE
from draftsmith.train.cli import flags_of
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.models import empty_model, load_model
from draftsmith.train.options import LoraOptions
from draftsmith.train.runs import save_model
from draftsmith.train.teacher.target_ends import read_ends

NOT_ROLLED_BACK = ["gpt-neo"]
IN_CHAINS = ["qwen3-5", "qwen3-next", "lfm2", "granite-hybrid", "nemotron-h", "mamba2"]
EAGER = [*IN_CHAINS, "deepseek-v32", "llama4"]
DECODED = [*EAGER, "bloom", "gemma4", "mixtral", "qwen3-moe", "deepseek-v3", "gemma4-moe", "gemma3-images"]
TARGETS = [*NOT_ROLLED_BACK, *DECODED]
NO_LAYERS = "target: expected a model whose decoder has its layers in `layers`"
REFUSALS = {
    **{("carve", family): "init: expected weights that fit the carved config" for family in ("llama4", "deepseek-v3")},
    ("plan of carving", "gemma4-moe"): "init: expected weights that fit the carved config",  # the last one is full
    **{(name, "gemma4"): "target: expected layers with keys and embeddings" for name in ("carve", "plan of carving")},
    **{(name, family): NO_LAYERS for name in ("features", "eagle", "block") for family in ("gpt-neo", "bloom")},
}
"""How a command refuses a family; all others work."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def place(root, tokenizer):
    """Make the directory of a family's target, with completions that it did not write; return it."""

    def made(name: str) -> Path:
        path = root / name
        if not path.exists():
            if name == "gemma3-images":
                save_model(seeing_gemma(tiny_gemma()), gemma_tokenizer(), path / "target")
            else:
                model = tiny_model(name, vocab_size=len(tokenizer))
                model.generation_config.eos_token_id = tokenizer.eos_token_id
                save_model(model, tokenizer, path / "target")
            records = [{"prompt": f"x = {i}", "completion": " + 1\nprint(x)\nreturn x"} for i in range(4)]
            (path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            given = ["--answers", "given", "--output", str(path / "given")]
            assert main(["prepare", *prompted(path), *given]) == 0
        return path

    return made


def learned(place: Path, output: str) -> list[str]:
    """Flags of a training run of one step."""
    values = {"target": place / "target", "completions": f"[{place / 'given'}]", "target_dtype": "float32"}
    training = {"output_dir": place / output, "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": "true"}
    training |= {"report_to": "[]", "save_strategy": "no", "disable_tqdm": "true"}
    values |= {f"training.{name}": value for name, value in training.items()}
    return flags_of(values)


def cached(place: Path, output: str, features: bool) -> list[str]:
    kept = ["--features", str(features).lower(), "--output", str(place / output), "--dtype", "float32"]
    return ["cache", "--target", str(place / "target"), "--completions", f"[{place / 'given'}]", *kept]


def planned(place: Path, recipe: str, **fields: object) -> list[str]:
    config = {"target": str(place / "target"), "completions": ["none"], "target_dtype": "float32"} | fields
    file = place / f"{recipe}.json"
    file.write_text(json.dumps(config | {"training": {"output_dir": "out"}}))
    return ["plan", recipe, "--config", str(file), *GPUS]


def prompted(place: Path) -> list[str]:
    return ["--target", str(place / "target"), "--prompts", str(place / "prompts.jsonl")]


GPUS = ["--gpus", "1", "--gpu-memory", "80", "--max_length", "16"]
WORK = {
    "prepare": lambda place: main(
        ["prepare", "--output", str(place / "written"), "--max_new_tokens", "3", *prompted(place)]
    ),
    "cache": lambda place: main(cached(place, "cache", False)),
    "features": lambda place: main(cached(place, "features", True)),
    "carve": lambda place: distill_command.main([*learned(place, "carved"), "--init.layers", "1"]),
    "medusa": lambda place: medusa_command.main([*learned(place, "medusa"), "--num_heads", "2"]),
    "eagle": lambda place: eagle_command.main(learned(place, "eagle")),
    "block": lambda place: block_command.main([*learned(place, "block"), "--block_size", "3"]),
    "joint": lambda place: medusa_command.main([*learned(place, "joint"), "--num_heads", "2", "--backbone", "lora"]),
    "plan of carving": lambda place: main(planned(place, "distill", init={"layers": 1})),
    "plan of heads": lambda place: main(planned(place, "medusa")),
}


def refusal(work: Callable[[], int | None], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says in its one line; "" where it works."""
    try:
        code = work()
    except InputError as error:  # `accelerate launch` shows it as a line
        assert "\n" not in str(error)
        return str(error)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (code or 0, len(errors)) in ((0, 0), (2, 1))
    return errors[0].removeprefix("error: ") if errors else ""


@pytest.mark.parametrize(
    ("name", "family"),
    [  # what is refused, and each task with every fourth family
        (name, family)
        for i, name in enumerate(WORK)
        for j, family in enumerate(TARGETS)
        if (name, family) in REFUSALS or (i + j) % 4 == 0
    ],
)
def test_what_needs_forwards_alone_takes_every_target(name, family, place, capsys):
    said, expected = refusal(lambda: WORK[name](place(family)), capsys), REFUSALS.get((name, family), "")
    assert said.startswith(expected) and bool(said) == bool(expected), said


@pytest.mark.parametrize(
    ("family", "adapted", "left"),
    [("deepseek-v3", "mlp.shared_experts.up_proj", ".experts."), ("nemotron-h", "mixer.in_proj", "mixer.out_proj")],
)
def test_adapters_go_on_linear_maps_that_nothing_reads_past(family, adapted, left):
    model = tiny_model(family)
    kind = model.config.model_type
    add_lora(model, LoraOptions(r=2))
    names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert any(adapted in name for name in names) and not any(left in name for name in names)
    assert model.config.model_type == kind


def test_maps_that_mambas_kernels_read_get_no_adapters():
    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    add_lora(model, LoraOptions(r=2))
    names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert names == ["backbone.layers.0.mixer.in_proj.lora_A.default.weight"]


def decoding(name: str, place: Path) -> list[str]:
    flags = [name, "--target", str(place / "target"), "--dtype", "float32"]
    flags += ["--temperature", "0", "--max_new_tokens", "4"]
    if name == "generate":
        return [*flags, "--prompt", "x = 1", "--drafter", "prompt_lookup"]
    flags += ["--prompts", str(place / "prompts.jsonl"), "--output", str(place / name)]
    if name == "certify":
        return [*flags, "--server", "http://127.0.0.1:9"]
    return [*flags, "--drafter", "prompt_lookup"]


@pytest.mark.parametrize("family", NOT_ROLLED_BACK)
@pytest.mark.parametrize("name", ["measure", "generate", "tune", "profile", "certify"])
def test_what_decodes_refuses_a_target_without_rollback_before_its_weights_are_read(
    name, family, place, capsys, monkeypatch
):
    monkeypatch.setattr(pair, "load_model", lambda *args, **kwargs: pytest.fail("the weights are not needed"))
    said = refusal(lambda: main(decoding(name, place(family))), capsys)
    assert said.startswith("target: expected ") and said.endswith(f"; {NOT_HERE}")


@pytest.mark.parametrize("name", ["choose", "align"])
def test_what_chooses_refuses_it_before_a_text_is_written(name, place, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("".join(f"x = {i}\n" for i in range(100)))
    flags = ["--target", str(place("gpt-neo") / "target"), "--prompts", str(tmp_path / "prompts.txt"), "--budget", "1h"]
    flags += ["--output", str(tmp_path / "out")]
    said = refusal(lambda: main([name, *flags]), capsys)
    assert said.startswith("target: expected ") and said.endswith(f"; {NOT_HERE}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["qwen3-5", "deepseek-v32", "bloom", "gemma4-moe", "gemma3-images"])
def test_measure_takes_the_others(family, place, tmp_path, capsys):
    fast = ["--costs", "none", "--compiled", "false", "--threads", "1", "--output", str(tmp_path)]
    assert refusal(lambda: main([*decoding("measure", place(family)), *fast]), capsys) == ""


def test_a_profile_of_such_a_target_says_that_it_is_eager(place, capsys):
    assert main([*decoding("profile", place("qwen3-5")), "--compiled", "true"]) == 0
    assert capsys.readouterr().err.count(NO_PROGRAMS) == 1
    assert json.loads((place("qwen3-5") / "profile/profile.json").read_text())["compiled"] is False


@pytest.mark.parametrize("name", ["generate", "measure", "tune", "profile"])
def test_states_that_are_not_recognised_end_in_one_line(name, place, capsys, monkeypatch):
    """As where a family's mixer shows its state in another way."""
    monkeypatch.setattr("draftsmith.decode.cache.stepwise.recurrent_mixers", lambda model: [])
    flags = decoding(name, place("qwen3-5"))
    flags[flags.index("prompt_lookup")] = "unigram"  # which always drafts
    fast = ["--costs", "none", "--compiled", "false", "--threads", "1"] if name == "measure" else []
    said = refusal(lambda: main([*flags, *fast]), capsys)
    assert said.startswith("layer 0 of qwen3_5_text: expected a recurrent state after each of ") and "training" in said


@pytest.mark.parametrize("family", [*NOT_ROLLED_BACK, "llama4", "gemma3-images"])
def test_the_doctor_says_what_works_without_rollback(family, place, capsys):
    assert main(["doctor", "--target", str(place(family) / "target"), "--dtype", "float32"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "rollback: " in line)
    assert line.startswith("!") and line.endswith(f"→ {NOT_HERE}") if family in NOT_ROLLED_BACK else line[0] == "✓"


def rollback(place: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What the doctor says of a target's rollback and memory."""
    assert main(["doctor", "--target", str(place / "target"), "--dtype", "float32"]) == 0
    lines = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    return {name.lstrip("✓! "): text for name, _, text in lines}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3-5", "chains; 1 of 2 layers keep states, so no trees and no compiled programs"),
        ("mamba2", "chains; 2 of 2 layers keep states, so no trees and no compiled programs"),
        ("deepseek-v32", "chains and trees, but no compiled programs"),
        ("bloom", "chains; its attention has ALiBi, so no trees and no compiled programs"),
        ("mixtral", "chains and trees"),
    ],
)
def test_the_doctor_says_how_a_target_is_decoded(family, expected, place, capsys):
    said = rollback(place(family), capsys)
    assert said["rollback"] == expected
    held = state_bytes(tiny_model(family))
    assert f"states: {held / 1024:.1f} KiB a row, K + 2 kept in a round" in said["memory"] if held else True
    assert ("states" in said["memory"]) == bool(held)


@pytest.mark.parametrize("family", IN_CHAINS)
def test_memory_counts_what_a_round_keeps(family):
    """The states of a row in all layers, before a block of K + 1 tokens and after each of them."""
    model, k = tiny_model(family), 3
    cached = CachedModel(model, 1, max_length=16, block=k + 1, rollback=0)
    cached.prefill_texts([torch.arange(3, 9)])
    cached.feed(torch.arange(3, 4 + k)[None], [5])
    kept = [tensor for layer in cached._states for tensors in layer._kept.values() for tensor in tensors]
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept) == (k + 2) * state_bytes(model)
    keys = [t for layer in cached._layers if isinstance(layer, Layer) and layer.is_initialized for t in layer.tensors]
    assert sum(t.shape[1] * t.shape[3] for t in keys) == cached_numbers(model)


@pytest.fixture
def heads_with_trees(place):
    """Drafters with a searched tree in their config, on a target with states."""
    model, path = load_model(place("qwen3-5") / "target"), place("qwen3-5")
    choices = [[0], [1], [0, 0]]
    for name, heads, key in (
        ("tree-medusa", MedusaHeads.of_target(model, 2), "medusa_choices"),
        ("tree-eagle", EagleHeads.of_target(model), "eagle_tree"),
        ("tree-block", BlockDrafter.of_target(model, 0, block_size=4), "block_tree"),
    ):
        setattr(heads.config, key, choices)
        heads.save_pretrained(path / name)
    return path


@pytest.mark.parametrize("name", ["medusa", "eagle", "block"])
def test_searched_trees_become_chains_where_states_follow_one_path(name, heads_with_trees, tmp_path, capsys):
    place, fast = heads_with_trees, ["--costs", "none", "--threads", "1", "--output", str(tmp_path)]
    flags = [*decoding("measure", place)[:-2], "--drafter", str(place / f"tree-{name}"), "--draft_length", "2"]
    assert main([*flags, *fast]) == 0
    err = capsys.readouterr().err
    assert err.count(f"{name}: chains, not its tree of 3 tokens: the target cannot follow a tree") == 1
    assert err.count(NO_PROGRAMS) == 1


@pytest.mark.parametrize(("flags", "expected"), [(["--drafter", "lookahead"], "drafter: lookahead: expected chains")])
def test_trees_that_are_asked_for_are_refused_before_weights_are_read(flags, expected, place, capsys, monkeypatch):
    monkeypatch.setattr(pair, "load_model", lambda *args, **kwargs: pytest.fail("the weights are not needed"))
    base = ["generate", "--target", str(place("lfm2") / "target"), "--prompt", "x = 1", "--max_new_tokens", "4"]
    said = refusal(lambda: main([*base, *flags]), capsys)
    assert said == f"{expected}, which is all that the target can follow, found a tree"


@pytest.mark.parametrize(("family", "drafter"), rotated(IN_CHAINS, ["suffix", "unigram", "hybrid:suffix+unigram"]))
def test_drafters_without_files_draft_chains(family, drafter, place, capsys):
    base = ["generate", "--target", str(place(family) / "target"), "--prompt", "x = 1", "--max_new_tokens", "6"]
    assert (
        refusal(lambda: main([*base, "--dtype", "float32", "--temperature", "0", "--drafter", drafter]), capsys) == ""
    )


def test_no_tree_is_searched_for_a_target_with_states(heads_with_trees, capsys):
    place = heads_with_trees
    flags = ["--target", str(place / "target"), "--drafter", str(place / "tree-medusa"), "--completions", "[none]"]
    said = refusal(lambda: main(["tree", *flags]), capsys)
    assert said.startswith("target: expected one that verifies trees, found qwen3_5_text")


def test_heads_have_positions_and_widths_of_their_own_where_the_target_has_none():
    nemotron, mamba = tiny_model("nemotron-h"), tiny_model("mamba2")
    del mamba.config.num_attention_heads, mamba.config.max_position_embeddings
    for model in (nemotron, mamba):
        config = EagleHeads.of_target(model).config
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (config.num_attention_heads, config.head_dim, config.max_position_embeddings) == (1, HIDDEN, 2**17)


def test_a_draft_without_rollback_learns_no_parallel_drafting(place, capsys):
    target = place("qwen3-5")
    flags = [*learned(target, "parallel"), "--draft", str(target / "target"), "--parallel", "2"]
    said = refusal(lambda: distill_command.main(flags), capsys)
    assert said.startswith("parallel draft: expected layers with attention alone, found Qwen3_5ForCausalLM")


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda size: tiny_model("bert-generation", vocab_size=size), "BertGenerationDecoder with is_decoder = False"),
        (
            lambda size: tiny_gemma(use_bidirectional_attention=True),
            "Gemma3ForCausalLM with use_bidirectional_attention",
        ),
    ],
)
def test_encoders_are_refused_as_they_are_loaded(build, found, tokenizer, tmp_path):
    save_model(build(len(tokenizer)), tokenizer, tmp_path)
    for load in (load_model, empty_model):
        with pytest.raises(InputError, match=f"^target: expected causal attention, found {found}"):
            load(tmp_path, field="target")


@pytest.mark.parametrize("family", [name for name in TARGETS if name not in ("gpt-neo", "bloom")])
def test_the_ends_of_a_target_have_its_last_norm(family, place):
    path = place(family) / "target"
    target, seen = load_model(path), list[torch.Tensor]()
    last_norm(target).register_forward_hook(lambda *args: seen.append(args[-1]))
    assert torch.equal(last_hidden(target, input_ids=torch.arange(3, 9)[None]), seen[-1])
    ends = read_ends(str(path), str(target.dtype).removeprefix("torch."))
    (weight,) = (p for _, p in last_norm(ends).named_parameters())
    assert torch.equal(weight, last_norm(target).weight)


def test_a_measure_without_drafters_is_refused_in_one_line(tmp_path, pipeline, capsys):
    (tmp_path / "prompts.txt").write_text("def f(x):\n")
    flags = ["--target", str(pipeline / "target"), "--drafter", "none", "--prompts", str(tmp_path / "prompts.txt")]
    flags += ["--temperature", "0", "--max-new-tokens", "4", "--compiled", "false", "--costs", "none"]
    assert main(["measure", *flags, "--output", str(tmp_path / "report")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: drafter: expected one to measure, found none"


EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
EYES |= {"image_size": 8, "patch_size": 4, "head_dim": 16}
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None}


@pytest.fixture(params=["mistral3", "qwen2_5_vl"])
def seeing(request, tmp_path):
    """A tiny model with images, of a family whose whole model alone is in the library's list; and its directory."""
    torch.manual_seed(0)
    if request.param == "mistral3":
        config = Mistral3Config(text_config=TEXT | {"model_type": "mistral"}, vision_config=EYES, image_token_index=60)
    else:
        eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 32}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        config = Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=eyes)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_a_model_that_sees_images_decodes_text_as_generate_does(seeing):
    model, path = seeing
    target, prompts = load_model(path, field="target"), torch.arange(1, 13).view(2, 6)
    options = {"max_new_tokens": 12, "do_sample": False}
    proposer = DraftModelProposer(early_exit(target, 1))
    written = speculative_generate(target, proposer, prompts, draft_length=3, **options).sequences
    for prompt, text in zip(prompts, written, strict=True):
        assert torch.equal(text, model.generate(prompt[None], **options)[0])


def test_drafts_are_carved_out_of_the_text_part_of_a_model_that_sees_images(seeing):
    model, _ = seeing
    if model.config.model_type == "qwen2_5_vl":  # its rotation is no other family's
        with pytest.raises(InputError, match=r"target: expected a family with a text model .* found Qwen2_5_VL"):
            text_model(model)
        return
    kept, ids = text_model(model), torch.arange(1, 9)[None]
    assert type(kept).__name__ == "MistralForCausalLM" and torch.equal(kept(ids).logits, model(ids).logits)


def test_a_saved_model_that_sees_images_keeps_its_processor(seeing, tokenizer, tmp_path):
    _, path = seeing
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        (path / name).write_text("{}")
    save_model(load_model(path, field="target"), tokenizer, tmp_path / "trained")
    assert len([*(tmp_path / "trained").glob("*process*_config.json")]) == 3


def test_a_missing_tensor_of_a_model_that_sees_images_is_refused(seeing):
    _, path = seeing
    weights = load_file(path / "model.safetensors")
    lost = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, path / "model.safetensors")
    with pytest.raises(
        InputError, match=r"target: expected all weights of .*, found none of .*1\.mlp\.up_proj"
    ) as error:
        load_model(path, field="target")
    assert "\n" not in str(error.value)
