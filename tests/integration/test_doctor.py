"""`draftsmith doctor`: a line a check, the loss masks, and the exit code."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from gemma import gemma_tokenizer, save_gemma
from listening import listened
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from unit.decode.proposers.test_renumbered import permuted
from unit.train.data.chat.test_masks import CHATML, QWEN3, THOUGHT, assistant, byte_level, user

from draftsmith.decode.cache import cached_numbers
from draftsmith.decode.errors import InputError
from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.scripts import cli
from draftsmith.scripts.doctor import memory
from draftsmith.scripts.doctor.command import main
from draftsmith.scripts.doctor.findings import Finding
from draftsmith.scripts.doctor.loss_masks import MaskedSample, Samples, bracketed, check_masks, coloured
from draftsmith.train.cli import flags_of
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model


def check(capsys, target, draft=None, **options) -> tuple[int, dict[str, str], str, str]:
    """Run the command; return its exit code, the line of each check, the rest of the output and the error line.

    A warning has a way out, and the code is 2 just where something cannot be used.
    """
    given = {"target": target, "dtype": "float32"} | ({"draft": draft} if draft else {}) | options
    capsys.readouterr()  # what saving the models said
    code = main(flags_of(given))
    out, err = capsys.readouterr()
    head, _, rest = out.partition("\n\n")
    lines = {}
    for line in head.splitlines():
        name, _, said = line[2:].partition(": ")
        lines[name] = f"{line[0]} {said}"
        assert line[0] in "✓!✗" and ("→" in said or line[0] != "!"), line
    errors = [name for name, line in lines.items() if line[0] == "✗"]
    assert (code == 2) == bool(errors)
    assert not errors or err.splitlines()[-1].startswith(f"error: {errors[0]}: ")
    return code, lines, rest, err


def rewrite(path, name: str = "config.json", **values: object) -> None:
    """Change a directory's config, and not its weights."""
    content = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(content | values))


def rebuild(path, **values: object) -> None:
    """Change a directory's config, and give it random weights of that shape."""
    rewrite(path, **values)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)


def restore(path, change) -> None:
    """Write a directory's weights again, changed."""
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})


def chats(directory, *talks) -> str:
    path = directory / "chats.jsonl"
    records = ({"prompt": talk} if isinstance(talk, str) else {"messages": talk} for talk in talks)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A target that speaks ChatML, and the tokenizer it has."""
    tokenizer, path = byte_level(gpt2=True), tmp_path_factory.mktemp("chat") / "target"
    tokenizer.chat_template = CHATML
    model = tiny_llama(0, len(tokenizer))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    save_model(model, tokenizer, path)
    return path


def test_a_pair_that_works_is_said_to_without_loading_its_weights(pair_dirs, capsys, monkeypatch):
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("the weights are not needed")
    )
    with listened() as heard:
        code, lines, rest, _ = check(capsys, *pair_dirs)
    heard.require("reading configs and tokenizers", "comparing target and drafters")
    assert code == 0 and list(lines) == [
        "target", "draft", "vocabulary", "rollback", "positions", "dtype", "chat template", "special tokens", "memory",
    ]  # fmt: skip
    assert lines["target"].startswith("✓ LlamaForCausalLM, 2 layers, ") and lines["target"].endswith("stored as F32")
    assert lines.pop("chat template").startswith("! none in the target's tokenizer: prompts are plain text → ")
    assert all(line.startswith("✓ ") for line in lines.values()), lines
    assert rest.strip() == "8 ✓, 1 !, 0 ✗"


def test_the_target_alone_can_be_checked_and_what_is_not_there_is_an_error(chat, tmp_path, capsys):
    code, lines, _, _ = check(capsys, chat)
    names = ["target", "vocabulary", "rollback", "positions", "dtype", "special tokens", "memory"]
    assert code == 0 and list(lines) == names and all(line.startswith("✓ ") for line in lines.values())
    assert "texts end with '<|endoftext|>' (0), '<|im_end|>'" in lines["special tokens"]
    said = f"✗ expected a model directory or a hub id, found nothing at {tmp_path / 'no'}"
    for target, draft, role in ((chat, tmp_path / "no", "draft"), (tmp_path / "no", chat, "target")):
        _, lines, _, _ = check(capsys, target, draft)
        assert lines[role] == said and lines["rollback"].startswith("✓")


def without(name: str):
    return lambda path, tokenizer: restore(path, lambda tensors: {k: v for k, v in tensors.items() if k != name})


@pytest.mark.parametrize(
    ("damage", "name", "symbol", "words"),
    [
        (lambda path, tokenizer: permuted(tokenizer)[0].save_pretrained(path), "draft", "✗", "tokens that differ"),
        (lambda path, tokenizer: rebuild(path, vocab_size=320), "vocabulary", "!", "resize_token_embeddings(320)"),
        (lambda path, tokenizer: rebuild(path, vocab_size=256), "vocabulary", "✗", "at least 300"),
        (lambda path, tokenizer: rewrite(path, max_position_embeddings=128), "positions", "!", "within 128 tokens"),
        (lambda path, tokenizer: rewrite(path, max_position_embeddings=1024), "positions", "✓", "draft 1024"),
        (lambda path, tokenizer: rewrite(path, model_type="no_such"), "draft", "✗", "expected a "),
        (lambda path, tokenizer: rewrite(path, hidden_size="wide"), "draft", "✗", "expected a causal LM in "),
        (lambda path, tokenizer: (path / "model.safetensors").unlink(), "draft", "✗", "expected weights in "),
        (lambda path, tokenizer: (path / "model.safetensors").write_bytes(b"no"), "draft", "✗", "whole weights"),
        (lambda path, tokenizer: rewrite(path, num_hidden_layers=2), "draft", "✗", "found 9 others: model.layers.1."),
        (lambda path, tokenizer: rewrite(path, intermediate_size=8), "draft", "✗", "mlp.down_proj.weight of (32, 64)"),
        (without("model.norm.weight"), "draft", "✗", "found 1 others: model.norm.weight of none"),
        (lambda path, tokenizer: restore(path, lambda t: {k: v.to(torch.int8) for k, v in t.items()}), "draft", "✗",
         "model.embed_tokens.weight in I8"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_draft_is_said_in_its_line(damage, name, symbol, words, pair_dirs, tokenizer, capsys):
    damage(pair_dirs[1], tokenizer)
    _, lines, _, _ = check(capsys, *pair_dirs)
    assert lines[name].startswith(symbol) and words in lines[name], lines


def test_architectures_that_cannot_draft_are_refused(pair_dirs, tokenizer, tmp_path, capsys):
    t5 = T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    for model, name, words in (
        (tiny_model("recurrent-gemma", vocab_size=300), "rollback", "found RecurrentGemma"),
        (tiny_model("gpt-neo", vocab_size=300), "rollback", "found local ones in GPTNeoForCausalLM"),
        (T5ForConditionalGeneration(t5), "draft", "a causal LM in "),
    ):
        save_model(model, tokenizer, tmp_path / "other")
        _, lines, _, _ = check(capsys, pair_dirs[0], tmp_path / "other")
        assert lines[name].startswith("✗") and words in lines[name]
        shutil.rmtree(tmp_path / "other")


def test_ends_of_text_that_nothing_stops_at_are_warned_of(chat, tmp_path, capsys):
    tokenizer = load_tokenizer(chat)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = tiny_llama(0, len(tokenizer))
    for ids, template, expected in (
        (0, CHATML, f"! texts end with '<|endoftext|>' (0), padding is '<|pad|>', but not with '<|im_end|>' ({end}), "
         f"what ends an answer in the chat template → put [0, {end}] into generation_config.json as eos_token_id"),
        (end, CHATML, f"✓ texts end with '<|im_end|>' ({end}), padding is"),
        (end, None, f"! texts end with '<|im_end|>' ({end}), padding is '<|pad|>', but not with '<|endoftext|>' (0), "
         "the tokenizer's end of sequence → "),
        (None, None, "! texts end with '<|endoftext|>' (0) by the tokenizer alone, padding is '<|pad|>' → put eos_"),
        (end, CHATML.replace("m.content", "'gone'"), f"! texts end with '<|im_end|>' ({end}), padding is '<|pad|>'; "
         "sample 'Hello': messages[0].content: expected a chat template that writes it"),
    ):  # fmt: skip
        model.generation_config.eos_token_id = ids
        tokenizer.chat_template = template
        save_model(model, tokenizer, tmp_path / "target")
        code, lines, _, _ = check(capsys, tmp_path / "target")
        assert code == 0 and lines["special tokens"].startswith(expected), lines["special tokens"]


def test_a_parallel_draft_is_told_with_its_mask(pair_dirs, tmp_path, capsys):
    target, draft = pair_dirs
    shutil.copytree(draft, tmp_path / "parallel")
    pad, tokenizer = load_tokenizer(draft).pad_token_id, load_tokenizer(draft)
    rewrite(tmp_path / "parallel", pard_token=pad, parallel_length=4, parallel_tree=[[0], [1], [0, 0]])
    _, lines, _, _ = check(capsys, target, parallel_draft=tmp_path / "parallel")
    said = f"; drafts 4 tokens in one forward, with token {pad} for a mask, and a tree of 3, 2 deep"
    assert lines["parallel_draft"].endswith(said) and lines["parallel_draft"].startswith("✓")
    rewrite(tmp_path / "parallel", pard_token=10**6)
    _, lines, _, _ = check(capsys, target, tmp_path / "parallel")
    assert "expected pard_token in the config, a token below" in lines["draft"]
    save_model(tiny_model("lfm2", vocab_size=len(tokenizer), pard_token=pad), tokenizer, tmp_path / "states")
    _, lines, _, _ = check(capsys, target, tmp_path / "states")
    assert "expected layers with attention alone, found Lfm2ForCausalLM" in lines["draft"]


def test_what_a_token_takes_in_the_cache_is_found_without_weights():
    shape = Path(__file__).parents[1] / "golden" / "configs" / "qwen3-8b.json"
    for config, numbers in (
        *((tiny_model(name).config, cached_numbers(tiny_model(name))) for name in ("falcon", "gemma3", "gpt-oss")),
        (AutoConfig.from_pretrained(shape), 36 * 2 * 8 * 128),  # layers, keys and values, their heads and width
    ):
        with torch.device("meta"):
            assert cached_numbers(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)) == numbers > 0
    assert cached_numbers(tiny_model("mamba")) == 0


def test_memory_is_compared_with_what_is_free(pair_dirs, saved, capsys, monkeypatch):
    # The cache takes 2 layers × keys and values × 2 heads × 8 numbers in the target, half of that in the draft.
    numbers = {path: load_model(path).num_parameters() for path in pair_dirs}
    sizes = [4 * count for count in (*numbers.values(), 2 * (32 * 32 + 300 * 32))]
    total, each = sum(sizes), (64 + 32) * 4
    target, draft, medusa, one, whole = (f"{n / 1024:.1f} KiB" for n in (*sizes, total + 512 * each, total))
    eight = f"{(total + 8 * 512 * each) / 2**20:.1f} MiB"
    tight = total + 8 * 100 * each
    for free, options, expected in (
        (2**30, {}, f"✓ float32 weights: target {target}, draft {draft}, medusa {medusa}; a token in the cache: 256 B "
         f"+ 128 B; 512 tokens × batch size 1: {one}, 8: {eight}, of 1.0 GiB free (cpu)"),
        (tight, {"context": 100}, "✓ "),
        (tight, {"context": 101},
         "! … → texts that fit, in tokens: 800 at batch size 1, 100 at batch size 8 (--context to check them)"),
        (total - 1, {},
         f"! … they do not fit → find a device with more than {whole}, or take a smaller target, or --dtype bfloat16"),
    ):  # fmt: skip
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        code, lines, _, _ = check(capsys, *pair_dirs, medusa=saved["medusa"], **options)
        first, _, rest = expected.partition("…")
        assert code == 0 and lines["memory"].startswith(first) and rest in lines["memory"], lines["memory"]
    monkeypatch.undo()
    assert memory.free_memory(torch.device("cpu")) > 2**20
    rewrite(pair_dirs[1], quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    stored = (pair_dirs[1] / "model.safetensors").stat().st_size  # quantised weights take what their files take
    assert f"draft {stored / 1024:.1f} KiB" in check(capsys, *pair_dirs, dtype="float64")[1]["memory"]


@pytest.mark.parametrize(
    ("stored", "dtype", "rounded"),
    [("float32", "float64", ""), ("bfloat16", "float32", ""), ("bfloat16", "float16", "target and draft"),
     ("bfloat16", "bfloat16", "target")],
)  # fmt: skip
def test_dtypes_are_compared_with_what_is_stored(stored, dtype, rounded, pair_dirs, tokenizer, capsys):
    save_model(tiny_llama(1, len(tokenizer), layers=1).to(getattr(torch, stored)), tokenizer, pair_dirs[1])
    line = check(capsys, *pair_dirs, dtype=dtype)[1]["dtype"]
    name = {"float32": "F32", "bfloat16": "BF16"}[stored]
    said = f"stored: target in F32, draft in {name}; to run in {dtype}"
    assert line.startswith(f"! {said}, which rounds {rounded} → " if rounded else f"✓ {said}")


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tokenizer):
    """The target that `SAVED` makes heads for."""
    path = tmp_path_factory.mktemp("plain") / "target"
    save_model(tiny_llama(0, len(tokenizer)), tokenizer, path)
    return path


TREE = [[0], [1], [0, 0]]


def save_heads(path, tokenizer, **shape):
    config = {"num_heads": 2} | {key: shape.pop(key) for key in ("num_heads", "token_map") if key in shape}
    heads = MedusaHeads.of_target(tiny_llama(0, **{"vocab_size": len(tokenizer)} | shape), **config)
    heads.config.medusa_choices = TREE
    heads.save_pretrained(path)


def save_eagle(path, tokenizer, token_map=None, **shape):
    heads = EagleHeads.of_target(tiny_llama(0, **{"vocab_size": len(tokenizer)} | shape), token_map)
    heads.config.eagle_tree = TREE
    heads.save_pretrained(path)


def save_block(path, tokenizer, token_map=None, **shape):
    target, made = tiny_llama(0, **{"vocab_size": len(tokenizer)} | shape), {"markov_rank": 4, "block_size": 3}
    token = tokenizer.pad_token_id
    BlockDrafter.of_target(target, token, token_map=token_map, layer_ids=[0], **made).save_pretrained(path)


SAVED = {
    "draft": lambda path, tokenizer: save_model(tiny_llama(0, len(tokenizer)), tokenizer, path),
    "medusa": save_heads, "eagle": save_eagle, "block": save_block,
}  # fmt: skip


@pytest.fixture
def saved(tmp_path, tokenizer):
    """A drafter of each kind for `plain`, in its directory."""
    for kind, save in SAVED.items():
        save(tmp_path / "saved" / kind, tokenizer)
    return {kind: tmp_path / "saved" / kind for kind in SAVED}


def test_heads_that_fit_are_described(plain, saved, tmp_path, tokenizer, capsys):
    said = {
        "medusa": "2 heads, 1 block each, 21.2 K parameters, stored as F32; draft a tree of 3, 2 deep",
        "eagle": "EAGLE-3 heads on the target's features after layers 1, ",
        "block": "DSpark drafter of 3 tokens, token 1 for a mask, on the outputs of the target's layers 0, ",
    }
    for kind, words in said.items():
        code, lines, _, _ = check(capsys, plain, drafter=f"{kind}:{saved[kind]}", context=20)
        assert code == 0 and list(lines)[:2] == ["target", kind] and lines[kind].startswith(f"✓ {words}"), lines
    for kind, format in (("medusa", "vllm"), ("eagle", "vllm"), ("block", "speculators")):
        out = tmp_path / f"{kind}-out"
        flags = ["--target", str(plain), "--format", format, "--output", str(out)]
        assert cli.main(["export", "--drafter", f"{kind}:{saved[kind]}", *flags]) == 0
        lines = check(capsys, plain, drafter=f"{kind}:{out}")[1]
        assert lines[kind].startswith(f"✓ {said[kind][:15]}"), lines


def damaged(**fields):
    return lambda kind, path, tokenizer: rewrite(path, **fields)


def saved_as(**shape):
    return lambda kind, path, tokenizer: SAVED[kind](path, tokenizer, **shape)


HEADS, FEATURES = ("medusa", "eagle", "block"), ("eagle", "block")
FAULTS = {
    "another width": (HEADS, saved_as(hidden=64), "expected heads with the target's hidden_size 32, found 64"),
    "too wide a tree": (("medusa", "eagle"), saved_as(token_map=torch.arange(1)), "tree: expected at most 1 siblings"),
    "no tree": (("medusa",), damaged(medusa_choices=7), "medusa_choices: expected lists of ranks, found 7"),
    "too deep a tree": (("medusa",), damaged(medusa_choices=[[0], [0, 0], [0, 0, 0]]), "between 1 and the 2 heads"),
    "deeper features": (("eagle",), saved_as(layers=6), "expected ascending depths between 1 and the target's 2"),
    "two rotations": (FEATURES, damaged(rope_theta=1e6), "rope_theta: expected the same wherever the config says it"),
    "damage": (HEADS, lambda kind, path, _: (path / "model.safetensors").write_bytes(b"no"), "expected safetensors"),
    "no config": (HEADS, lambda kind, path, _: (path / "config.json").unlink(), "with config.json, found none"),
    "nothing": (HEADS, lambda kind, path, _: path.rename(path.parent / "gone"), "found nothing at "),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for name, (kinds, *_) in FAULTS.items() for kind in kinds])
def test_what_is_wrong_with_heads_is_said_in_its_line(kind, name, plain, tmp_path, tokenizer, capsys):
    SAVED[kind](path := tmp_path / "heads", tokenizer)
    _, damage, words = FAULTS[name]
    damage(kind, path, tokenizer)
    _, lines, _, _ = check(capsys, plain, drafter=f"{kind}:{path}")
    assert lines[kind].startswith("✗") and words in lines[kind], lines


@pytest.mark.parametrize(
    ("kind", "fields", "symbol", "words"),
    [
        ("medusa", {}, "✓", "Medusa heads, "),
        ("eagle", {"heads": "SAVED"}, "✓", "EAGLE-3 heads, "),
        ("eagle", {"layer_ids": [3]}, "✗", "layer_ids: expected ascending depths between 1 and the target's 2 layers"),
        ("eagle", {"draft_vocabulary": 301}, "✗", "draft_vocabulary: expected at most 300, found 301"),
        ("eagle", {"num_steps": 0}, "✗", "num_steps: expected at least 1, found 0"),
        ("block", {}, "✓", "block drafter, "),
        ("block", {"layer_ids": [2]}, "✗", "target_layer_ids: expected ascending depths between 1 and the target's 2"),
        ("block", {"mask_token": 300}, "✗", "mask_token_id: expected a token below 300"),
        ("draft", {"init": {"layers": 1}}, "✓", ""),
        ("mtp", {}, "✓", "MTP layers, "),
    ],
)
def test_a_training_run_is_checked_as_it_would_begin(kind, fields, symbol, words, plain, saved, tmp_path, capsys):
    fields = {name: str(saved[kind]) if value == "SAVED" else value for name, value in fields.items()}
    (tmp_path / "run.yaml").write_text(json.dumps({"target": str(plain), "completions": ["c"]} | fields))
    lines = check(capsys, plain, run=f"{kind}:{tmp_path / 'run.yaml'}")[1]
    assert lines[f"{kind} run"].startswith(symbol) and words in lines[f"{kind} run"], lines


def test_a_run_that_cannot_begin_as_it_says_is_an_error(tmp_path, capsys):
    gemma = save_gemma(tmp_path / "gemma", gemma_tokenizer(image=False), layers=2)
    run = {"target": str(gemma), "completions": ["c"], "layer_ids": [1], "init": "last_layer"}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    said = check(capsys, gemma, run=f"eagle:{tmp_path / 'run.yaml'}")[1]["eagle run"]
    assert said.startswith("✗ init: expected auto or random") and "post_feedforward_layernorm.weight" in said
    for given, message in (("lookahead:f", "a kind that is trained"), ("medusa", "run: expected KIND:FILE, found")):
        with pytest.raises(InputError, match=message):
            check(capsys, gemma, run=given)


@pytest.mark.parametrize("kind", FEATURES)
def test_other_tools_files_are_taken_as_the_import_takes_them(kind, plain, saved, tmp_path, tokenizer, capsys):
    """Copies of the target's embedding equal it; SpecForge's maps of a whole vocabulary map each id to itself."""
    path, size = tmp_path / "theirs", len(tokenizer)
    export = ["export", "--target", str(plain), "--format", "speculators", "--output", str(path)]
    assert cli.main([*export, "--drafter", f"{kind}:{saved[kind]}"]) == 0
    written, zeros = load_file(path / "model.safetensors"), torch.zeros(size, dtype=torch.int64)
    own = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    for added, right in (
        ({"embed_tokens.weight": own.bfloat16()}, True),
        ({"embed_tokens.weight": own + 1}, False),
        ({"d2t": zeros, "t2d": torch.ones(size, dtype=torch.bool)}, True),
        ({"d2t": zeros + torch.arange(size).flip(0)}, False),
    ):
        save_file(written | added, path / "model.safetensors", metadata={"format": "pt"})
        assert (check(capsys, plain, drafter=f"{kind}:{path}")[0] == 0) == right, added.keys()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that puts a directory into the hub's cache as `org/NAME`; nothing is downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)

    def put(directory: Path, name: str, commit: str = "a" * 40) -> Path:
        home = tmp_path / "hub" / f"models--org--{name}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(commit)
        return Path(shutil.copytree(directory, home / "snapshots" / commit))

    return put


@pytest.mark.parametrize("kind", SAVED)
def test_files_in_the_hubs_cache_are_looked_at_as_those_of_a_directory(kind, plain, hub, saved, capsys):
    lines = check(capsys, plain, drafter=f"{kind}:{saved[kind]}")[1]
    files = [*hub(plain, "target").glob("*.safetensors"), *hub(saved[kind], "heads").glob("*.safetensors")]
    found = check(capsys, "org/target", drafter=f"{kind}:org/heads")[1]
    assert found | {"memory": ""} == lines | {"memory": ""}  # what is free changes
    for file in files:
        file.unlink()
    code, lines, _, _ = check(capsys, "org/target", drafter=f"{kind}:org/heads")
    assert code == 0 and "not looked at" in lines["target"] and "not looked at" in lines[kind]


def test_promised_mtp_layers_of_the_hub_are_looked_for(hub, saved, capsys):
    rewrite(saved["draft"], num_mtp_layers=1)
    files = hub(saved["draft"], "target")
    assert "expected the tensors of 1 MTP layers in org/target" in check(capsys, "org/target", drafter="mtp")[1]["mtp"]
    (files / "model.safetensors").rename(files / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (files / "model.safetensors.index.json").write_text(json.dumps(index))
    code, lines, _, _ = check(capsys, "org/target", drafter="mtp")
    assert code == 0 and lines["mtp"].startswith("✓ 1 MTP layer") and "not looked at" in lines["mtp"]


def test_texts_longer_than_the_models_read_are_told(pair_dirs, tmp_path, capsys):
    rewrite(pair_dirs[1], max_position_embeddings=8)
    source = chats(tmp_path, "import os", "import os\n" * 30)
    code, lines, _, _ = check(capsys, *pair_dirs, prompts=source)
    assert code == 0 and lines["lengths"].startswith("! 1 of 2 samples are longer than the draft's 8 positions, the ")
    assert check(capsys, pair_dirs[0], prompts=source)[1]["lengths"].endswith(" tokens at most, of the target's 512")
    save_eagle(tmp_path / "eagle", load_tokenizer(pair_dirs[0]))
    rewrite(tmp_path / "eagle", max_position_embeddings=64)
    lines = check(capsys, pair_dirs[0], eagle=tmp_path / "eagle")[1]
    assert lines["positions"].startswith("! target 512, eagle 64 → keep")
    for context, expected in (
        (8, "✓ target 512, draft 8, for texts of 8"),
        (9, "! target 512, draft 8, for texts of 9 → keep prompt and text within 8 tokens"),
        (513, "✗ target 512, draft 8, for texts of 513 → --context 512 at most"),
    ):
        assert check(capsys, *pair_dirs, context=context)[1]["positions"].startswith(expected)


def test_findings_are_left_for_a_job_to_read(pair_dirs, tmp_path, capsys):
    rebuild(pair_dirs[1], vocab_size=256)
    _, lines, _, _ = check(capsys, *pair_dirs, json=tmp_path / "out" / "doctor.json")
    left = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert (left["schema"], left["exit_code"]) == ("draftsmith.doctor/1", 2)
    assert left["environment"]["dtype"] == "float32" and left["config"]["drafter"] == [f"draft:{pair_dirs[1]}"]
    told = {found["name"]: found["text"] for found in left["findings"]}
    assert told.keys() == lines.keys() and all(text in lines[name] for name, text in told.items())
    with pytest.raises(InputError, match="json: expected a file or nothing at"):
        main(["--target", str(pair_dirs[0]), "--json", str(tmp_path)])


def test_the_loss_masks_of_conversations_and_prompts_are_counted(chat, tmp_path, capsys):
    talk = [user("say hello"), assistant("hello world")]
    source = chats(tmp_path, talk, "a prompt", [user("a question")], talk)
    code, lines, rest, _ = check(capsys, chat, prompts=source, show_mask=2)
    tokenizer = load_tokenizer(chat)
    length, count = (
        len(tokenizer.apply_chat_template(talk, return_dict=False)),
        len(tokenizer.encode("hello world")) + 1,
    )
    assert code == 0
    assert lines["loss masks"] == (
        f"✓ {2 * count} of {2 * length} tokens count in 2 samples with an answer, 0 with an empty mask; "
        "2 more end with the user's turn, for the target to answer"
    )
    assert rest.startswith(
        f"sample '0': {length} tokens, {count} count in the loss\n<|im_start|>user↵\nsay hello<|im_end|>↵\n"
        "<|im_start|>assistant↵\n⟦hello world<|im_end|>⟧↵\n\nsample '1': "
    )
    assert "0 count in the loss\na prompt\n\n" in rest and "a question" not in rest
    assert "1 samples" in check(capsys, chat, prompts=source, limit=1)[1]["loss masks"]


def test_answers_that_the_template_rewrites_are_counted_or_refused(chat, tmp_path, capsys):
    tokenizer = load_tokenizer(chat)
    for template, code, name, expected in (
        (QWEN3, 0, "turns", "! 1 assistant turns in 1 samples do not count: the chat template writes them or"),
        (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), 2, "samples",
         f"✗ 1 cannot be used; {tmp_path}/chats.jsonl:1: sample '0"),
    ):  # fmt: skip
        tokenizer.chat_template = template
        save_model(tiny_llama(0, len(tokenizer)), tokenizer, tmp_path / "target")
        found, lines, _, err = check(capsys, tmp_path / "target", prompts=chats(tmp_path, THOUGHT))
        assert found == code and lines[name].startswith(expected), lines
        assert err.startswith("error: samples: 1 cannot be used" if code else "")


def test_empty_masks_are_counted_and_named_and_nothing_but_them_is_an_error():
    full, empty = MaskedSample("full", [1, 2], [0, 1]), MaskedSample("empty", [1, 2], [0, 0])
    prompt = MaskedSample("prompt", [1], [0], answered=False)
    said = "1 of 4 tokens count in 2 samples with an answer, 1 with an empty mask"
    remedy = "they train nothing: leave them out"
    assert list(check_masks(Samples([full, empty]))) == [Finding("warning", "loss masks", f"{said}: empty", remedy)]
    (finding,) = check_masks(Samples([empty, empty, prompt]))
    assert finding.state == "error" and "2 with an empty mask; 1 more end with" in finding.text
    (finding,) = check_masks(Samples([prompt]))
    assert finding.state == "ok"


def test_completions_are_shown_with_the_masks_they_were_written_with(pair_dirs, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("def add(a, b):\nimport os\n")
    source = PrepareConfig(str(pair_dirs[0]), str(tmp_path / "prompts.txt"), str(tmp_path / "out"), max_new_tokens=7)
    summary = prepare(source)
    code, lines, rest, _ = check(capsys, pair_dirs[0], completions=tmp_path / "out", show_mask=1)
    assert code == 0
    assert lines["loss masks"].startswith(f"✓ {summary.tokens} of ") and "in 2 samples" in lines["loss masks"]
    assert rest.count("sample '") == 1 and "\ndef add(a, b):⟦" in rest


def test_every_token_is_shown_once_in_its_colour_and_characters_stay_whole():
    tokenizer = byte_level(gpt2=False)
    text = "say é語🙂<|im_end|>\n\tdef\x1b[0m"
    ids = tokenizer.encode(text)
    for start in range(len(ids)):
        for stop in range(start, len(ids) + 1):
            mask = [int(start <= i < stop) for i in range(len(ids))]
            shown = coloured(MaskedSample("x", ids, mask), tokenizer)
            assert shown.plain == text.replace("\n", "↵\n").replace("\x1b", "␛")  # and the terminal is not steered
    mask = [1] * 3 + [0] * (len(ids) - 3)
    shown = coloured(MaskedSample("x", ids, mask), tokenizer)
    green = "".join(shown.plain[span.start : span.end] for span in shown.spans if "green" in str(span.style))
    assert green == tokenizer.decode(ids[:3]) and bracketed(shown).plain == f"⟦{green}⟧{shown.plain[len(green) :]}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"show_mask": -1}, "show_mask: expected at least 0, found -1"),
        ({"show_mask": 1}, "show_mask: expected samples to show in prompts or completions, found none"),
        ({"prompts": "a", "completions": "b"}, "completions: expected either prompts or completions, found both"),
        ({"batch_size": "1,0"}, "batch_size: expected at least 1, found 0"),
        ({"dtype": "int8"}, "dtype: expected one of float32, bfloat16, float16, float64, auto, found 'int8'"),
    ],
)
def test_bad_flags_are_refused(options, message, capsys):
    with pytest.raises(InputError) as error:
        check(capsys, "target", **options)
    assert message in str(error.value)


def test_several_drafters_of_any_kind_are_checked(pair_dirs, tmp_path, capsys):
    target, draft = pair_dirs
    shutil.copytree(draft, tmp_path / "other")
    given = ["--drafter", str(draft), "--drafter", f"other={tmp_path / 'other'}", "--drafter", "prompt_lookup"]
    code = main(["--target", str(target), *given, "--dtype", "float32", "--batch_size", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and "✓ prompt_lookup: n-grams: no files to check" in lines
    assert "✓ vocabulary: target 300 logits, other 300 logits" in lines
    assert "✓ positions: target 512, draft 512, other 512" in lines
