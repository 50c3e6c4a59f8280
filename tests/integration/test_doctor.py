"""`draftsmith doctor`: a line a check, the loss masks, and the exit code."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TEXTS, tiny_llama
from families import tiny_model
from gemma import gemma_tokenizer, save_gemma, tiny_gemma
from listening import LOADING, listened
from rich.cells import cell_len
from rich.console import Console
from safetensors.torch import load_file, save_file
from trained_parallel import as_parallel
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from unit.decode.proposers.test_renumbered import permuted, with_merges
from unit.train.data.chat.test_masks import CHATML, QWEN3, THOUGHT, assistant, byte_level, user

from draftsmith.decode import DraftModelProposer, clock
from draftsmith.decode.cache import cached_numbers
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import drafting_seconds
from draftsmith.decode.planning.costs import RoundCosts
from draftsmith.distill.parallel.kind import ParallelDraft
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.block.formats import export as block_export
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.checks import learning_rate
from draftsmith.medusa.eagle.formats import export as eagle_export
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.heads.formats import export as heads_export
from draftsmith.scripts import cli
from draftsmith.scripts.doctor import checks as pair_checks
from draftsmith.scripts.doctor import costs as pair_costs
from draftsmith.scripts.doctor.command import main
from draftsmith.scripts.doctor.loss_masks import MaskedSample, Samples, bracketed, check_masks, coloured, show
from draftsmith.train.data.corpus import train_bpe
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.kinds import costs as round_costs
from draftsmith.train.kinds.costs import TimedDrafter
from draftsmith.train.kinds.drafter import DrafterSpec, Loading
from draftsmith.train.kinds.findings import SYMBOLS, Finding, report
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model

pytestmark = pytest.mark.usefixtures("in_this_process")


def check(capsys, target, draft=None, **options) -> tuple[int, dict[str, str], str, str]:
    """Run the command; return its exit code, the line of each check, the rest of the output and the error line.

    Whatever the fault, what is not well has a way out, and the code is 2 just where something cannot be used.
    """
    given = {"target": target, "dtype": "float32"} | ({"draft": draft} if draft else {}) | options
    capsys.readouterr()  # what saving the models said
    code = main([part for name, value in given.items() for part in (f"--{name}", str(value))])
    out, err = capsys.readouterr()
    head, _, rest = out.partition("\n\n")
    lines = {}
    for line in head.splitlines():
        name, _, said = line[2:].partition(": ")
        lines[name] = f"{line[0]} {said}"
        assert line[0] in "✓!✗" and ("→" in said) == (line[0] != "✓"), line
    assert (code == 2) == any(line[0] == "✗" for line in lines.values())
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
    monkeypatch.setattr(pair_costs, "load_model", lambda *args, **kwargs: pytest.fail("the weights are not needed"))
    code, lines, rest, err = check(capsys, *pair_dirs)
    assert (code, err) == (0, "")
    assert list(lines) == [
        "target", "draft", "sizes", "tokenizers", "vocabulary", "rollback", "positions", "dtype", "chat template",
        "special tokens", "memory",
    ]  # fmt: skip
    assert lines["target"].startswith("✓ LlamaForCausalLM, 2 layers, ") and lines["target"].endswith("stored as F32")
    assert lines.pop("sizes").startswith("! the draft has")  # of two tiny models neither is far smaller
    assert lines.pop("chat template").startswith("! none in the target's tokenizer: prompts are plain text → ")
    assert all(line.startswith("✓ ") and "→" not in line for line in lines.values()), lines
    assert rest.strip() == "9 ✓, 2 !, 0 ✗"


def test_the_target_alone_can_be_checked(chat, capsys):
    code, lines, _, _ = check(capsys, chat)
    assert code == 0 and list(lines) == [
        "target", "vocabulary", "rollback", "positions", "dtype", "chat template", "special tokens", "memory",
    ]  # fmt: skip
    assert lines["chat template"] == "✓ turns are found by rendering each in its own context"
    assert "texts end with '<|endoftext|>' (0), '<|im_end|>'" in lines["special tokens"]
    assert all(line.startswith("✓ ") for line in lines.values())


def test_a_model_that_is_not_there_is_an_error_and_the_other_is_checked_still(pair_dirs, tmp_path, capsys):
    for target, draft, role in ((pair_dirs[0], tmp_path / "no", "draft"), (tmp_path / "no", pair_dirs[1], "target")):
        code, lines, rest, err = check(capsys, target, draft)
        said = f"expected a model directory or a hub id, found nothing at {tmp_path / 'no'}"
        assert code == 2 and lines[role].startswith(f"✗ {said} → ")
        assert err == f"error: {role}: {said}\n"
        assert lines["rollback"].startswith("✓") and "tokenizers" not in lines
        assert rest.strip().endswith("1 ✗")
    code, lines, _, err = check(capsys, tmp_path / "no", tmp_path / "no")
    assert code == 2 and set(lines) == {"target", "draft"} and err.startswith("error: target: ")


def other_tokenizer(path, tokenizer):
    train_bpe(["Something else altogether, and longer than that"], 300).save_pretrained(path)


@pytest.mark.parametrize(
    ("damage", "name", "expected"),
    [
        (lambda path, tokenizer: permuted(tokenizer)[0].save_pretrained(path), "tokenizers",
         "! the same pieces under other ids: "),
        (other_tokenizer, "tokenizers", "✗ "),
        (lambda path, tokenizer: with_merges(tokenizer, 5).save_pretrained(path), "tokenizers",
         "! the same 300 tokens with the same ids, but text is split into them otherwise → "),
        (lambda path, tokenizer: rebuild(path, vocab_size=320), "vocabulary",
         "! target 300 logits, draft 320 logits for 300 tokens: prepare writes no padding, and a draft "
         "without a row for it reads another token → fine here, but vLLM's draft_model refuses unequal vocab_size: "
         "resize_token_embeddings(320)"),
        (lambda path, tokenizer: rebuild(path, vocab_size=256), "vocabulary",
         "✗ draft: expected a vocabulary of at least 300 for its tokenizer, found 256 → "),
        (lambda path, tokenizer: rewrite(path, max_position_embeddings=128), "positions",
         "! target 512, draft 128 → keep prompt and text within 128 tokens"),
        (lambda path, tokenizer: rewrite(path, max_position_embeddings=1024), "positions", "✓ target 512, draft 1024"),
        (lambda path, tokenizer: rebuild(path, num_hidden_layers=9), "sizes", "! the draft has "),
        (lambda path, tokenizer: rewrite(path, model_type="no_such"), "draft", "✗ expected a "),
        (lambda path, tokenizer: (path / "config.json").write_text("{"), "draft", "✗ expected a "),
        (lambda path, tokenizer: rewrite(path, hidden_size="wide"), "draft", "✗ expected a causal LM in "),
        (lambda path, tokenizer: (path / "model.safetensors").unlink(), "draft",
         "✗ LlamaForCausalLM, 1 layer, 28.5 K parameters, but no weights in "),
        (lambda path, tokenizer: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "draft",
         "! LlamaForCausalLM, 1 layer, 28.5 K parameters, in pickled weights → "),
        (lambda path, tokenizer: (path / "model.safetensors").write_bytes(b"no"), "draft",
         "✗ LlamaForCausalLM, 1 layer, 28.5 K parameters; expected whole weights in "),
        (lambda path, tokenizer: rewrite(path, num_hidden_layers=2), "draft",
         "✗ LlamaForCausalLM, 2 layers, 37.8 K parameters, but 9 tensors are not what its config.json "
         "says, the first model.layers.1.input_layernorm.weight: expected (32,), found none → "),
        (lambda path, tokenizer: rewrite(path, intermediate_size=8), "draft",
         "✗ LlamaForCausalLM, 1 layer, 23.1 K parameters, but 3 tensors are not what its config.json "
         "says, the first model.layers.0.mlp.down_proj.weight: expected (32, 8), found (32, 64) → "),
        (lambda path, tokenizer: restore(path, lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}),
         "draft", "✗ LlamaForCausalLM, 1 layer, 28.5 K parameters, but 1 tensors are not what its "
         "config.json says, the first model.norm.weight: expected (32,), found none → "),
        (lambda path, tokenizer: restore(path, lambda t: {k: v.to(torch.int8) for k, v in t.items()}), "draft",
         "✗ LlamaForCausalLM, 1 layer, 28.5 K parameters, but model.embed_tokens.weight in I8"),
        (lambda path, tokenizer: rewrite(path, "generation_config.json", eos_token_id=7), "special tokens",
         "✓ texts end with '<|endoftext|>' (0), padding is '<|pad|>'; the draft's would end with [7], which does"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_draft_is_said_in_its_line(damage, name, expected, pair_dirs, tokenizer, capsys):
    damage(pair_dirs[1], tokenizer)
    code, lines, _, err = check(capsys, *pair_dirs)
    assert lines[name].startswith(expected), lines[name]
    assert code == (2 if expected.startswith("✗") else 0)
    assert err.count("\n") == (code == 2) and err.startswith(f"error: {name}: " if code else "")


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        (lambda: tiny_model("recurrent-gemma", vocab_size=300), "rollback",
         "draft: expected a state in the library's cache, which can drop rejected tokens, found RecurrentGemma"),
        (lambda: tiny_model("gpt-neo", vocab_size=300), "rollback",
         "draft: expected full or sliding attention layers, found local ones in GPTNeoForCausalLM"),
        (lambda: T5ForConditionalGeneration(T5Config(
            vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)), "draft",
         "expected a causal LM in "),
    ],
)  # fmt: skip
def test_architectures_that_cannot_draft_are_refused(model, name, expected, pair_dirs, tokenizer, tmp_path, capsys):
    save_model(model(), tokenizer, tmp_path / "other")
    code, lines, _, err = check(capsys, pair_dirs[0], tmp_path / "other")
    assert code == 2 and lines[name].startswith(f"✗ {expected}") and err.startswith(f"error: {name}: {expected}")


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


def test_chat_templates_are_compared(chat, tmp_path, capsys):
    tokenizer = load_tokenizer(chat)
    for template, expected in (
        (CHATML, ", the same in both"),
        (None, "; none in the draft, which does not matter: the target's is used"),
        (QWEN3, "; another one in the draft, which does not matter: the target's is used"),
    ):
        tokenizer.chat_template = template
        save_model(tiny_llama(0, len(tokenizer)), tokenizer, tmp_path / "draft")
        code, lines, _, _ = check(capsys, chat, tmp_path / "draft")
        assert code == 0
        assert lines["chat template"] == f"✓ turns are found by rendering each in its own context{expected}"


def test_the_smallest_acceptance_solves_for_the_break_even():
    free, dear = {1: 1.0, 5: 1.0}, {1: 1.0, 5: 5.0}
    assert RoundCosts(free, 0.25).break_even_acceptance(4) == pytest.approx(
        0.5188, abs=1e-4
    )  # 1 + α + α² + α³ + α⁴ > 2
    assert RoundCosts(free, 0.0).break_even_acceptance(4) == pytest.approx(0.0, abs=1e-9)
    assert RoundCosts(free, 0.99).break_even_acceptance(4) == pytest.approx(0.996, abs=1e-3)
    assert RoundCosts(free, 1.01).break_even_acceptance(4) is None
    assert RoundCosts(dear, 0.0).break_even_acceptance(4) is None


def test_costs_are_measured_on_request(pair_dirs, heads, capsys, monkeypatch):
    with listened() as heard:
        code, lines, _, _ = check(capsys, *pair_dirs, medusa=heads, costs="true")
    heard.require("reading configs and tokenizers", "comparing target and drafters", "costs", *LOADING)
    assert code == 0 and list(lines)[-4:] == ["costs, B = 1", "heads, B = 1", "costs, B = 8", "heads, B = 8"]
    for rows in (1, 8):
        for name, block, paying in (("costs", 5, "γ = 4 pays "), ("heads", 4, "a tree of 3 pays ")):
            line = lines[f"{name}, B = {rows}"]
            assert " ms after 64 tokens, " in line and f" t({block}) = " in line and paying in line
    rewrite(pair_dirs[1], vocab_size=8)  # what cannot work is not measured
    assert "costs, B = 1" not in check(capsys, *pair_dirs, costs="true")[1]


def test_what_costs_mean_is_said(target, draft, monkeypatch):
    heads = MedusaHeads.of_target(target, 2)
    heads.config.medusa_choices = [[0], [1], [0, 0]]
    for verifying, drafting, state, text, remedy in (
        (1.0, 0.0, "ok", "t(1) = 1000.00 ms after 64 tokens, t(5) = 1.00 t(1), drafting c = 0.00 t(1) a token: "
         "γ = 4 pays from α = 0.00 on", ""),
        (1.0, 3.8, "warning", "c = 0.95 t(1) a token: γ = 4 pays from α = 0.98 on", "few drafts agree that often"),
        (1.0, 8.0, "warning", "γ = 4 pays at no α, for at α = 1 it is 0.56× as fast", "take a smaller draft, or"),
        (1.5, 0.25, "ok", "t(1) = 1000.00 ms after 64 tokens, t(4) = 1.50 t(1), drafting 0.25 t(1): a tree of 3 pays "
         "from τ = 1.75 on, of 3 at most", ""),
        (2.5, 0.25, "warning", "pays from τ = 2.75 on, of 3 at most", "search a smaller tree"),
        (2.5, 0.5, "warning", "pays at no τ: 3.00 is asked, and 3 the most", "search a smaller tree"),
    ):  # fmt: skip
        monkeypatch.setattr(round_costs, "measure", lambda *a, v=verifying, d=drafting: ({1: 1.0, 1 + a[4]: v}, d))
        chain = TimedDrafter(target, DraftModelProposer(draft), [target, draft])
        tree = TimedDrafter(target, MedusaProposer(heads), [target], "heads", tree=heads.tree)
        found = (tree if "τ" in text else chain).finding(2)
        assert (found.name, found.state) == ("heads, B = 2" if "τ" in text else "costs, B = 2", state)
        assert found.text.endswith(text) and found.remedy.startswith(remedy) and bool(found.remedy) == bool(remedy)


def test_a_parallel_draft_is_told_with_its_mask(pair_dirs, tmp_path, capsys):
    target, draft = pair_dirs
    shutil.copytree(draft, tmp_path / "parallel")
    pad = load_tokenizer(draft).pad_token_id
    rewrite(tmp_path / "parallel", pard_token=pad, parallel_length=4)
    _, lines, _, _ = check(capsys, target, tmp_path / "parallel")
    assert lines["parallel"] == f"✓ drafts 4 tokens in one forward (--parallel_draft), with token {pad} for a mask"
    rewrite(tmp_path / "parallel", parallel_tree=[[0], [1], [0, 0]])
    _, lines, _, _ = check(capsys, target, tmp_path / "parallel")
    assert lines["parallel"].endswith(f"with token {pad} for a mask, and a tree of 3, 2 deep")
    rewrite(tmp_path / "parallel", pard_token=50)
    code, lines, _, _ = check(capsys, target, tmp_path / "parallel")
    assert code == 0 and lines["parallel"].startswith("! ") and "which texts may contain" in lines["parallel"]
    rewrite(tmp_path / "parallel", pard_token=10**6)
    code, lines, _, _ = check(capsys, target, tmp_path / "parallel")
    assert code == 2 and "expected pard_token in the config, a token below" in lines["parallel"]
    tokenizer = load_tokenizer(draft)
    save_model(tiny_model("lfm2", vocab_size=len(tokenizer), pard_token=pad), tokenizer, tmp_path / "states")
    code, lines, _, _ = check(capsys, target, tmp_path / "states")
    assert code == 2 and lines["parallel"].startswith("✗ expected layers with attention alone, found Lfm2ForCausalLM")


def test_a_parallel_draft_costs_one_forward_a_round(target, tmp_path, monkeypatch):
    drafts = as_parallel(tiny_llama(1, target.config.vocab_size, layers=1), 0, 6)
    drafts.save_pretrained(tmp_path)
    monkeypatch.setattr(round_costs, "measure", lambda *a: ({1: 1.0, 1 + a[4]: 1.0}, 0.75))
    loading = Loading("target", tokenizer=None, dtype="float32", model=target)
    found = ParallelDraft().costs(DrafterSpec("parallel_draft", str(tmp_path)), loading)(1)
    assert "t(7) = 1.00 t(1), drafting 0.75 t(1) a round: γ = 6 pays from α = 0." in found.text


def test_a_draft_of_four_tokens_is_timed_as_four_forwards(target, draft, monkeypatch):
    """By a clock that ticks with the draft's forwards: all drafts but the first, which reads the text, are alike."""
    ticks = [0]
    hook = draft.register_forward_hook(lambda *args: ticks.__setitem__(0, ticks[0] + 1))
    monkeypatch.setattr(clock, "now", lambda device: ticks[0])
    for rows in (1, 3):
        texts = torch.ones(rows, 28, dtype=torch.long)
        assert drafting_seconds(target, DraftModelProposer(draft), texts, 20, 4)[0] == 4
    hook.remove()
    asked = []
    heads = MedusaHeads.of_target(target, 3)
    monkeypatch.setattr(
        heads, "logits", lambda i, h, *rest, logits=heads.logits: asked.append((i, len(h))) or logits(i, h, *rest)
    )
    drafting_seconds(target, MedusaProposer(heads), texts, 20, 3)
    assert asked == [(0, 3), (1, 3), (2, 3)] * 6  # all but the first, which has no hidden states


@pytest.mark.parametrize("family", ["llama", "falcon", "gemma3", "gpt-oss"])
def test_what_a_token_takes_in_the_cache_is_found_without_weights(family):
    config = tiny_model(family).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert cached_numbers(model) == cached_numbers(tiny_model(family)) > 0


def test_a_real_shape_takes_what_its_card_says_in_the_cache():
    shape = Path(__file__).parents[1] / "golden" / "configs" / "qwen3-8b.json"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape))
    assert cached_numbers(model) == 36 * 2 * 8 * 128  # layers, keys and values, their heads and width
    assert cached_numbers(tiny_model("mamba")) == 0


def test_memory_is_compared_with_what_is_free(pair_dirs, heads, capsys, monkeypatch):
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
        (total - 1, {"costs": "true"},
         f"! … they do not fit → find a device with more than {whole}, or take a smaller target, or --dtype bfloat16"),
    ):  # fmt: skip
        monkeypatch.setattr(pair_costs, "free_memory", lambda device, free=free: free)
        code, lines, _, _ = check(capsys, *pair_dirs, medusa=heads, **options)
        first, _, rest = expected.partition("…")
        assert code == 0 and lines["memory"].startswith(first) and rest in lines["memory"], lines["memory"]
        assert ("costs" in lines) == ("costs" in options)  # not measured where it would not fit
    monkeypatch.undo()
    assert pair_costs.free_memory(torch.device("cpu")) > 2**20


def test_quantised_weights_take_what_their_files_take(pair_dirs, capsys):
    rewrite(pair_dirs[1], quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    stored = (pair_dirs[1] / "model.safetensors").stat().st_size
    assert f"draft {stored / 1024:.1f} KiB" in check(capsys, *pair_dirs, dtype="float64")[1]["memory"]


def test_dtypes_are_compared_with_what_is_stored(pair_dirs, tokenizer, capsys, monkeypatch):
    for native, stored, dtype, expected in (
        (False, "float32", "float32", "✓ stored: target in F32, draft in F32; to run in float32"),
        (True, "float32", "float64", "✓ … to run in float64, exactly but in more memory"),
        (True, "bfloat16", "float32", "! stored: target in F32, draft in BF16; target and draft differ → here both run "
         "in float32; for a server, save the draft in the target's dtype"),
        (True, "bfloat16", "float16", "! … float16 rounds target and draft; target and draft differ → "),
        (False, "float32", "bfloat16", "! … this cpu computes bfloat16 by way of float32; bfloat16 rounds target and "
         "draft → compare --dtype float32 by --costs true; fine where it is served so; --dtype float32 keeps every "
         "number"),
    ):  # fmt: skip
        monkeypatch.setattr(pair_checks, "bfloat16_is_native", lambda device, native=native: native)
        save_model(tiny_llama(1, len(tokenizer), layers=1).to(getattr(torch, stored)), tokenizer, pair_dirs[1])
        code, lines, _, _ = check(capsys, *pair_dirs, dtype=dtype)
        first, _, rest = expected.partition("…")
        assert code == 0 and lines["dtype"].startswith(first) and rest in lines["dtype"], lines["dtype"]
    monkeypatch.undo()
    x86 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    assert pair_checks.bfloat16_is_native(torch.device("cpu")) == x86


def save_heads(path, tokenizer, choices=((0,), (1,), (0, 0)), **shape):
    """Heads for the target of `pair_dirs`, whose default tree needs both of them."""
    config = {"num_heads": 2} | {key: shape.pop(key) for key in ("num_heads", "token_map") if key in shape}
    target = tiny_llama(0, **{"vocab_size": len(tokenizer)} | shape)
    heads = MedusaHeads.of_target(target, base_model_name_or_path="t", **config)
    heads.config.medusa_choices = [list(choice) for choice in choices]
    heads.save_pretrained(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tokenizer):
    """The target that `save_heads` makes heads for."""
    path = tmp_path_factory.mktemp("plain") / "target"
    save_model(tiny_llama(0, len(tokenizer)), tokenizer, path)
    return path


@pytest.fixture
def heads(tmp_path, tokenizer):
    save_heads(tmp_path / "heads", tokenizer)
    return tmp_path / "heads"


def test_heads_that_fit_are_said_to(plain, heads, capsys):
    rewrite(heads, base_model_name_or_path=f"{plain}/")
    code, lines, _, _ = check(capsys, plain, medusa=heads)
    assert code == 0 and list(lines)[:2] == ["target", "medusa"] and "draft" not in lines
    assert lines["medusa"] == "✓ 2 heads, 1 block each, 21.2 K parameters, stored as F32"
    assert lines["heads"] == "✓ made for this target's hidden size 32 and 300 logits; draft a tree of 3, 2 deep"


@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("vllm", "✓ they name no tree, so that each reader takes its own default; vLLM reads them as they are, and "),
        ("fasterdecoding", "✓ they name no tree, so that each reader takes its own default; vLLM reads them as "),
    ],
)
def test_heads_of_any_tool_are_read_and_what_they_leave_unsaid_is_told(format, said, plain, heads, tmp_path, capsys):
    ours = MedusaHeads.from_pretrained(heads)
    if format != "vllm":
        ours = MedusaHeads.of_target(load_model(plain, device="cpu"), 2, medusa_fc_bias=True)
    ours.config.base_model_name_or_path = str(plain)
    heads_export.FORMATS.write(ours, tmp_path / "theirs", format)
    code, lines, _, _ = check(capsys, plain, drafter=str(tmp_path / "theirs"))
    assert code == 0 and lines["medusa"].startswith(f"✓ {format}'s files: 2 heads, 1 block each, "), lines
    assert "made for this target's hidden size 32 and 300 logits" in lines["heads"]
    assert lines["medusa readers"].startswith(said), lines
    next((tmp_path / "theirs").glob("m*.*t*")).write_bytes(b"no")
    code, lines, _, _ = check(capsys, plain, drafter=str(tmp_path / "theirs"))
    assert code == 2 and lines["medusa"].startswith("✗ "), lines


@pytest.mark.parametrize(
    ("damage", "name", "expected"),
    [
        (lambda path, tokenizer: save_heads(path, tokenizer, hidden=64), "heads",
         "✗ expected heads with the target's hidden_size 32, found 64 → "),
        (lambda path, tokenizer: save_heads(path, tokenizer, vocab_size=320), "heads",
         "✗ expected heads with the target's vocab_size 300, found 320 → "),
        (lambda path, tokenizer: save_heads(path, tokenizer, ((0,), (1,), (2,), (0, 0)), token_map=torch.arange(2)),
         "heads", "✗ tree: expected at most 2 siblings, as many as the heads have tokens, found 3 → "),
        (lambda path, tokenizer: save_heads(path, tokenizer, ((0,), (1,))), "heads",
         "! made for this target's hidden size 32 and 300 logits; draft a tree of 2, 1 deep; trained on t, which "
         "should be the same model; 1 of 2 heads are deeper and not used → "),
        (lambda path, tokenizer: rewrite(path, medusa_choices=[[0], [0, 0], [0, 0, 0]]), "medusa",
         "✗ tree: expected a depth between 1 and the 2 heads, found 3 → search one that they can draft: "),
        (lambda path, tokenizer: rewrite(path, medusa_choices=7), "medusa",
         "✗ medusa_choices: expected lists of ranks, found 7"),
        (lambda path, tokenizer: rewrite(path, num_heads=3), "medusa",
         "✗ 3 heads, 1 block each, 31.9 K parameters, but 2 tensors are not what its config.json says, the first "
         "blocks.2.layers.0.weight: expected (32, 32), found none → "),
        (lambda path, tokenizer: rewrite(path, num_heads=1, medusa_choices=None), "medusa", "✗ 1 head, 1 block each, "),
        (lambda path, tokenizer: rewrite(path, hidden_size=16), "medusa", "✗ 2 heads, "),
        (lambda path, tokenizer: rewrite(path, num_heads=0), "medusa", "✗ num_heads: expected at least 1, found 0 → "),
        (lambda path, tokenizer: (path / "config.json").write_text("{"), "medusa", "✗ expected Medusa heads in "),
        (lambda path, tokenizer: (path / "config.json").unlink(), "medusa",
         "✗ expected a directory of Medusa heads with config.json, found none in "),
        (lambda path, tokenizer: path.rename(path.parent / "gone"), "medusa",
         "✗ expected a directory of Medusa heads with config.json, found none in "),
        (lambda path, tokenizer: (path / "model.safetensors").unlink(), "medusa", "✗ 2 heads, "),
        (lambda path, tokenizer: (path / "model.safetensors").write_bytes(b"no"), "medusa", "✗ 2 heads, "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_heads_is_said_in_its_line(damage, name, expected, plain, heads, tokenizer, capsys):
    damage(heads, tokenizer)
    code, lines, _, err = check(capsys, plain, medusa=heads)
    assert lines[name].startswith(expected), lines[name]
    assert code == (2 if expected.startswith("✗") else 0)
    assert err.count("\n") == (code == 2) and err.startswith(f"error: {name}: " if code else "")


def save_eagle(path, tokenizer, tree=None, token_map=None, **shape):
    """EAGLE-3 heads for the target of `plain`."""
    target = tiny_llama(0, **{"vocab_size": len(tokenizer)} | shape)
    heads = EagleHeads.of_target(target, token_map, base_model_name_or_path="t")
    if tree is not None:
        heads.config.eagle_tree = [list(choice) for choice in tree]
    heads.save_pretrained(path)


def repeat_token(path):
    """Name the first token of a cut vocabulary twice."""
    restore(path, lambda tensors: tensors | {"d2t": tensors["d2t"] - torch.tensor([0, 1] + [0] * 38)})


def test_eagle_heads_that_fit_are_said_to(plain, tmp_path, tokenizer, capsys):
    heads = tmp_path / "eagle"
    save_eagle(heads, tokenizer, ((0,), (1,), (0, 0)), torch.arange(40))
    code, lines, _, _ = check(capsys, plain, eagle=heads, context=20)
    assert code == 0 and list(lines)[:2] == ["target", "eagle"]
    assert lines["eagle"].startswith("✓ EAGLE-3 heads, features after layers 1, ") and "stored as F32" in lines["eagle"]
    assert lines["eagle heads"] == (
        "✓ made for this target's hidden size 32 and 300 logits; draft a tree of 3, 2 deep of 40 tokens; trained on t, "
        "which should be the same model"
    )
    numbers = 2 * 2 * 8  # keys and values, heads, width
    assert f"a token in the cache: {2 * numbers * 4} B + {numbers * 4} B" in lines["memory"]


@pytest.mark.parametrize(
    ("damage", "name", "expected"),
    [
        (lambda path, tokenizer: save_eagle(path, tokenizer, hidden=64), "eagle heads",
         "✗ expected heads with the target's hidden_size 32, found 64 → "),
        (lambda path, tokenizer: save_eagle(path, tokenizer, layers=6), "eagle heads",
         "✗ eagle_aux_hidden_state_layer_ids: expected ascending depths between 1 and the target's 2 layers"),
        (lambda path, tokenizer: save_eagle(path, tokenizer, ((0,), (1,), (2,)), torch.arange(2)), "eagle heads",
         "✗ tree: expected at most 2 siblings, as many as the heads have tokens, found 3 → "),
        (lambda path, tokenizer: rewrite(path, eagle_tree=7), "eagle heads",
         "✗ eagle_tree: expected lists of ranks, found 7 → "),
        (lambda path, tokenizer: rewrite(path, max_position_embeddings=64), "eagle heads", "! made for this target's "),
        (lambda path, tokenizer: rewrite(path, draft_vocab_size=41), "eagle",
         "✗ EAGLE-3 heads, features after layers 1, "),
        (lambda path, tokenizer: rewrite(path, num_hidden_layers=2), "eagle",
         "✗ HEADS: expected a config of EAGLE-3 heads, found: num_hidden_layers: expected 1, found 2 → "),
        (lambda path, tokenizer: repeat_token(path), "eagle", "✗ d2t: expected different ids below 300, found others"),
        (lambda path, tokenizer: (path / "model.safetensors").write_bytes(b"no"), "eagle", "✗ EAGLE-3 heads, "),
        (lambda path, tokenizer: (path / "config.json").unlink(), "eagle", "✗ EAGLE-3 heads: expected a model "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_eagle_heads_is_said_in_its_line(damage, name, expected, plain, tmp_path, tokenizer, capsys):
    save_eagle(tmp_path / "eagle", tokenizer, token_map=torch.arange(40))
    damage(tmp_path / "eagle", tokenizer)
    code, lines, _, _ = check(capsys, plain, eagle=tmp_path / "eagle")
    assert lines[name].startswith(expected.replace("HEADS", str(tmp_path / "eagle"))), lines[name]
    assert code == (2 if expected.startswith("✗") else 0)


def test_eagle_heads_are_timed_as_chains_or_trees(plain, tmp_path, tokenizer, capsys):
    for tree, said in ((None, "drafting c = "), (((0,), (1,), (0, 0)), "a tree of 3 pays")):
        save_eagle(tmp_path / "eagle", tokenizer, tree)
        code, lines, _, _ = check(capsys, plain, eagle=tmp_path / "eagle", costs="true", batch_size=1)
        assert code == 0 and said in lines["eagle, B = 1"]


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({}, "eagle run", "✓ heads of "),
        (
            {"training": {"learning_rate": 5e-5}},
            "learning rate",
            "✓ 5e-05 for heads 32 wide: narrow ones take up to 1e-2",
        ),
        ({"target": "other"}, "eagle run", "! heads of "),
        ({"layer_ids": [3]}, "eagle run", "✗ layer_ids: expected ascending depths between 1 and the target's 2 layers"),
        ({"draft_vocabulary": 301}, "eagle run", "✗ draft_vocabulary: expected at most 300, found 301 → "),
        ({"num_steps": 0}, "eagle run", "✗ num_steps: expected at least 1, found 0 → "),
    ],
)
def test_a_training_run_of_eagle_heads_is_checked(fields, name, expected, plain, tmp_path, capsys):
    values = {"target": str(plain), "completions": ["c"]} | fields
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    code, lines, _, _ = check(capsys, plain, eagle_run=tmp_path / "run.yaml")
    assert lines[name].startswith(expected), lines[name]
    assert code == (2 if expected.startswith("✗") else 0)


def test_how_heads_begin_is_told_before_they_are_trained(tmp_path, capsys):
    gemma = save_gemma(tmp_path / "gemma", gemma_tokenizer(image=False), layers=2)
    run = {"target": str(gemma), "completions": ["c"], "layer_ids": [1]}
    lines = []
    for fields in ({}, {"init": "last_layer"}):
        (tmp_path / "run.yaml").write_text(json.dumps(run | fields))
        lines.append(check(capsys, gemma, eagle_run=tmp_path / "run.yaml")[1]["eagle run"])
    reason = "the target's last layer has post_feedforward_layernorm.weight, which Llama's does not have"
    assert lines[0].startswith("✓ ") and lines[0].endswith(f"4 steps, begun at random, because {reason}")
    assert lines[1].startswith("✗ init: expected auto or random") and reason in lines[1]
    heads = EagleHeads.of_target(tiny_gemma(layers=2), layer_ids=[1], rope_parameters={"rope_theta": 1e4})
    heads.save_pretrained(tmp_path / "heads")
    (tmp_path / "run.yaml").write_text(json.dumps({**run, "layer_ids": [], "heads": str(tmp_path / "heads")}))
    found = check(capsys, gemma, eagle_run=tmp_path / "run.yaml")[1]["rope theta"]
    assert found.startswith("! earlier heads rotate by a rope_theta of 10000, the target's last layer by 1e+06")


def test_learning_rates_of_wide_heads_are_compared_with_usual_ones():
    assert [learning_rate(rate, 4096).state for rate in (1e-6, 1e-4, 1e-2)] == ["warning", "ok", "warning"]


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        # the EAGLE authors' and AngelSlim's name no depths
        ({"eagle_config": None}, "eagle layers",
         "✓ features after layers 2, 4, 5 of 8, the authors' default, for the config names none; vLLM and SGLang take"),
        # SpecForge's, for SGLang: behind one layer more
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, "eagle layers",
         "! features after layers 2, 4, 5, as SGLang takes them; vLLM takes those after layers 1, 3, 4 → put eagle_"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}}, "eagle heads",
         "✗ eagle_aux_hidden_state_layer_ids: expected ascending depths between 1 and the target's 8 layers"),
        ({"eagle_config": None, "rope_theta": 5e5}, "eagle",
         "✗ EAGLE/config.json: rope_theta: expected the same wherever the config says it, found 10000.0 in rope_para"),
    ],
)  # fmt: skip
def test_what_eagle_heads_of_other_tools_leave_to_chance_is_told(change, name, expected, tmp_path, tokenizer, capsys):
    target = tiny_llama(0, len(tokenizer), layers=8)
    save_model(target, tokenizer, tmp_path / "target")
    eagle_export.FORMATS.write(EagleHeads.of_target(target, torch.arange(40)), tmp_path / "eagle", "vllm")
    forget(tmp_path / "eagle", "eagle_aux_hidden_state_layer_ids")
    rewrite(tmp_path / "eagle", **change)
    restore(tmp_path / "eagle", lambda tensors: {k: v for k, v in tensors.items() if k != "t2d"})
    code, lines, _, _ = check(capsys, tmp_path / "target", drafter=f"eagle:{tmp_path / 'eagle'}")
    assert name == "eagle" or lines["eagle"].startswith("✓ EAGLE-3 heads, "), lines["eagle"]
    assert lines[name].startswith(expected.replace("EAGLE", str(tmp_path / "eagle"), 1)), lines[name]
    assert code == (2 if expected.startswith("✗") else 0)


def save_block(path, tokenizer, token_map=None, **shape):
    """A block drafter for the target of `plain`; its mask is the tokenizer's token for padding."""
    torch.manual_seed(0)
    shape = {"markov_rank": 4, "block_size": 3, "layer_ids": [0]} | shape
    target = tiny_llama(0, **{"vocab_size": len(tokenizer)} | shape.pop("target", {}))
    drafter = BlockDrafter.of_target(target, tokenizer.pad_token_id, token_map=token_map, **shape)
    drafter.save_pretrained(path)
    return drafter, target


def foreign_block(path, tokenizer, format="vllm", **shape):
    """The same as another tool leaves it."""
    drafter, target = save_block(path.parent / "own", tokenizer, **shape)
    block_export.FORMATS.write(drafter, path, format, target=target)


@pytest.mark.parametrize("format", ["own", "vllm", "speculators"])
def test_block_drafters_of_any_tool_that_fit_are_said_to(format, plain, tmp_path, tokenizer, capsys):
    foreign_block(tmp_path / "block", tokenizer, format, token_map=torch.arange(40))
    code, lines, _, _ = check(capsys, plain, drafter=f"block:{tmp_path / 'block'}")
    assert code == 0 and lines["block"].startswith("✓ DSpark drafter of 3 tokens, features after layers 1, ")
    assert lines["block drafter"] == (
        "✓ made for this target's hidden size 32 and 300 logits; draft chains of 40 tokens"
    )
    counted = {"vllm": "; its config counts from 0, by their outputs", "own": ""}.get(
        format, "; its config counts after how many layers"
    )
    assert lines["block layers"].startswith(f"✓ features after layers 1{counted}")
    assert lines["block mask"].endswith(", a token that texts do not hold")
    assert "by a rope_theta of 10000" in lines["block rotation"]
    assert lines["block slots"].startswith("✓ 3 slots, the anchor's guesses the next token: num_speculative_to")


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_a_copy_of_the_targets_embedding_must_equal_it_as_the_import_says(kind, plain, tmp_path, tokenizer, capsys):
    path = tmp_path / "heads"
    save_eagle(path, tokenizer) if kind == "eagle" else save_block(path, tokenizer)
    written = load_file(path / "model.safetensors")
    own = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    for name, copy, right in (
        ("embed_tokens.weight", own, True),
        ("model.embed_tokens.weight", own.bfloat16(), True),
        ("embed_tokens.weight", own + 0.01, False),
        ("embed_tokens.weight", own[:7], False),
    ):
        save_file(written | {name: copy.clone()}, path / "model.safetensors", metadata={"format": "pt"})
        code, lines, _, _ = check(capsys, plain, drafter=f"{kind}:{path}")
        assert (code == 0) == right and lines[f"{kind} files"].startswith(
            "✓" if right else "✗ expected the target's emb"
        )
        out = tmp_path / f"{name}-{right}-{len(copy)}"
        imported = cli.main(["export", "--target", str(plain), "--import_from", str(path), "--output", str(out)])
        assert (imported == 0) == right, capsys.readouterr()
        capsys.readouterr()


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_maps_of_a_whole_vocabulary_are_taken_if_the_import_takes_them(kind, plain, tmp_path, tokenizer, capsys):
    """SpecForge writes them in any case; they map each id to itself, or mean another vocabulary."""
    path, own_path, vocab_size = tmp_path / "heads", tmp_path / "own", len(tokenizer)
    SAVED[kind](own_path, tokenizer)
    export = ["export", "--target", str(plain), "--format", "speculators", "--output", str(path)]
    assert cli.main([*export, "--drafter", f"{kind}:{own_path}"]) == 0
    written, zeros = load_file(path / "model.safetensors"), torch.zeros(vocab_size, dtype=torch.int64)
    for own, maps, right in (
        (False, {"d2t": zeros, "t2d": torch.ones(vocab_size, dtype=torch.bool)}, True),
        (False, {"d2t": zeros}, True),
        (False, {"d2t": zeros + torch.arange(vocab_size).flip(0)}, False),
        (True, {"d2t": zeros}, False),  # files of our own are loaded, not imported
    ):
        at = own_path if own else path
        tensors = load_file(at / "model.safetensors") if own else written
        save_file(tensors | maps, at / "model.safetensors", metadata={"format": "pt"})
        code, lines, _, _ = check(capsys, plain, drafter=f"{kind}:{at}")
        assert (code == 0) == right, lines
        out = tmp_path / f"{right}-{len(maps)}"
        imported = cli.main(["export", "--target", str(plain), "--import_from", str(path), "--output", str(out)])
        assert own or (imported == 0) == right, capsys.readouterr()


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


SAVED = {
    "draft": lambda path, tokenizer: save_model(tiny_llama(0, len(tokenizer)), tokenizer, path),
    "medusa": lambda path, tokenizer: save_heads(path, tokenizer),
    "eagle": lambda path, tokenizer: save_eagle(path, tokenizer),
    "block": lambda path, tokenizer: save_block(path, tokenizer),
}


@pytest.mark.parametrize("kind", SAVED)
def test_files_in_the_hubs_cache_are_looked_at_as_those_of_a_directory(kind, plain, hub, tmp_path, tokenizer, capsys):
    SAVED[kind](path := tmp_path / "heads", tokenizer)
    lines = check(capsys, plain, drafter=f"{kind}:{path}")[1]
    files = [*hub(plain, "target").glob("*.safetensors"), *hub(path, "heads").glob("*.safetensors")]
    assert check(capsys, "org/target", drafter=f"{kind}:org/heads")[1] == lines
    for file in files:
        file.unlink()
    if kind != "block":
        code, lines, _, _ = check(capsys, "org/target", drafter=f"{kind}:org/heads")
        assert code == 0 and "not looked at" in lines["target"] and "not looked at" in lines[kind]


def test_promised_mtp_layers_of_the_hub_are_looked_for(hub, tmp_path, tokenizer, capsys):
    save_model(tiny_llama(0, len(tokenizer)), tokenizer, tmp_path / "target")
    rewrite(tmp_path / "target", num_mtp_layers=1)
    files = hub(tmp_path / "target", "target")
    assert "expected the tensors of 1 MTP layers in org/target" in check(capsys, "org/target", drafter="mtp")[1]["mtp"]
    (files / "model.safetensors").rename(files / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (files / "model.safetensors.index.json").write_text(json.dumps(index))
    code, lines, _, _ = check(capsys, "org/target", drafter="mtp")
    assert code == 0 and lines["mtp"].startswith("✓ 1 MTP layer") and "not looked at" in lines["mtp"]


DSPARK, DFLASH = {}, {"markov_rank": 0, "anchor_guesses": False}
DFLASH2 = DFLASH | {"selector_rank": 4, "conv_kernel_size": 2}
DOMINO = DFLASH | {"emb_dim": 4, "gru_hidden_dim": 5, "pure_draft_prefix_len": 1}


@pytest.mark.parametrize(
    ("shape", "format", "damage", "name", "expected"),
    [
        (DFLASH, "vllm", lambda path: rewrite(path, eagle_aux_hidden_state_layer_ids=[0]), "block layers",
         "✗ features after layers 1, by target_layer_ids; vLLM takes those after layers 0 → let eagle_aux"),
        (DFLASH, "vllm", lambda path: rewrite(path, dflash_config={"mask_token_id": 1}), "block layers",
         "! features after layers 2, those of DFlash's paper, for its config names none → put target_layer_ids there"),
        (DFLASH | {"layer_ids": [1]}, "vllm", lambda path: None, "block layers",
         "! features after layers 2, the last: the library's output_hidden_states are normed there, and what servers "),
        (DSPARK, "vllm", lambda path: rewrite(path, rope_theta=1e6), "block",
         "✗ BLOCK/config.json: rope_theta: expected the same wherever the config says it, found 10000.0 in rope_para"),
        (DSPARK, "vllm", lambda path: rewrite(path, mask_token_id=7), "block mask", "! "),
        (DSPARK, "vllm", lambda path: rewrite(path, mask_token_id=300), "block",
         "✗ BLOCK/config.json: mask_token_id: expected a token below 300, a row of the target's embedding, found 3"),
        (DSPARK, "speculators", lambda path: forget(path, "sample_from_anchor"), "block slots",
         "✗ 3 slots, the anchor's guesses the next token: num_speculative_tokens is to be 3, as trained; its "),
        (DFLASH2, "vllm", lambda path: None, "block slots",
         "✓ 3 slots, the anchor's guesses nothing: num_speculative_tokens is to be 2, as trained; vLLM 0.32 decodes"),
        (DOMINO, "sglang", lambda path: None, "block slots",
         "✓ 3 slots, the anchor's guesses nothing: num_speculative_tokens is to be 2, as trained; SGLang decodes with"),
        ({"markov_rank": 0}, "own", lambda path: None, "block slots", "! 3 slots, the anchor's guesses the next token"),
        ({"token_map": torch.arange(40)}, "vllm", lambda path: restore(
            path, lambda tensors: tensors | {"d2t": torch.arange(100, 300, 5)}), "block",
         "✗ d2t: expected different ids below 300, found others → "),
        (DSPARK, "vllm", lambda path: rewrite(path, layer_types=["sliding_attention"]), "block",
         "✗ BLOCK/config.json: use_sliding_window: expected true with layers of sliding_attention, found fal"),
        (DSPARK, "vllm", lambda path: rewrite(path, target_layer_ids=[2]), "block drafter",
         "✗ target_layer_ids: expected ascending depths between 1 and the target's 2 layers"),
        ({"target": {"hidden": 64}}, "vllm", lambda path: None, "block drafter",
         "✗ expected heads with the target's hidden_size 32, found 64 → "),
        (DSPARK, "vllm", lambda path: (path / "model.safetensors").write_bytes(b"no"), "block", "✗ DSpark drafter of "),
    ],
)  # fmt: skip
def test_what_files_of_block_drafters_leave_to_chance_is_told(
    shape, format, damage, name, expected, plain, tmp_path, tokenizer, capsys
):
    """The faults that servers meet in silence: they show in acceptance alone."""
    path = tmp_path / "block"
    foreign_block(path, tokenizer, format, **shape)
    damage(path)
    code, lines, _, _ = check(capsys, plain, drafter=f"block:{path}")
    assert lines[name].startswith(expected.replace("BLOCK", str(path))), lines[name]
    assert code == (2 if expected.startswith("✗") else 0)


def forget(path, name: str) -> None:
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({key: value for key, value in content.items() if key != name}))


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({}, "block run", "✓ a drafter of "),
        ({"training": {"learning_rate": 5e-5}}, "learning rate", "✓ 5e-05 for heads 32 wide: narrow ones take up to"),
        ({"layer_ids": [2]}, "block run", "✗ target_layer_ids: expected ascending depths between 1 and the target's 2"),
        ({"draft_vocabulary": 301}, "block run", "✗ draft_vocabulary: expected at most 300, found 301 → "),
        ({"mask_token": 300}, "block run", "✗ mask_token_id: expected a token below 300, a row of the target's embedd"),
        ({"block_size": 0}, "block run", "✗ block_size: expected at least 1"),
        ({"mask_token": 7}, "block mask", "! "),
    ],
)
def test_a_training_run_of_a_block_drafter_is_checked(fields, name, expected, plain, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(json.dumps({"target": str(plain), "completions": ["c"]} | fields))
    code, lines, _, _ = check(capsys, plain, block_run=tmp_path / "run.yaml")
    assert lines[name].startswith(expected), lines[name]
    assert code == (2 if expected.startswith("✗") else 0)


def test_texts_longer_than_the_models_read_are_told(pair_dirs, tmp_path, capsys):
    rewrite(pair_dirs[1], max_position_embeddings=8)
    source = chats(tmp_path, "import os", "import os\n" * 30)
    code, lines, _, _ = check(capsys, *pair_dirs, prompts=source)
    assert code == 0 and lines["lengths"].startswith("! 1 of 2 samples are longer than the draft's 8 positions, the ")
    assert check(capsys, pair_dirs[0], prompts=source)[1]["lengths"].endswith(" tokens at most, of the target's 512")
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
    told = {
        found["name"]: f"{SYMBOLS[found['state']]} {found['text']}"
        + (f" → {found['remedy']}" if found["remedy"] else "")
        for found in left["findings"]
    }
    assert told == lines
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


def test_a_terminal_gets_colours_and_a_hanging_indent():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=60, no_color=False)
    report(Finding("warning", "positions", "a long text " * 9, "a way out"), console)
    plain = Console(file=(whole := io.StringIO()), width=60)
    report(Finding("warning", "positions", "a long text " * 9, "a way out"), plain)
    rows = [row for row in file.getvalue().splitlines() if row]
    assert "\x1b[33m!" in rows[0] and len(rows) > 2 and rows[1].startswith(" " * 17)
    assert len(whole.getvalue().splitlines()) == 1 and "positions: a long text" in whole.getvalue()
    tokenizer = byte_level(gpt2=False)
    ids = tokenizer.encode(TEXTS[0])
    file.truncate(0)
    show(Samples([MaskedSample("x", ids, [0, 1] + [1] * (len(ids) - 2))]), 1, tokenizer, console)
    assert "\x1b[32m" in file.getvalue() and "⟦" not in file.getvalue()
    assert all(cell_len(symbol) == 1 for symbol in SYMBOLS.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"show_mask": -1}, "show_mask: expected at least 0, found -1"),
        ({"limit": 0}, "limit: expected at least 1, found 0"),
        ({"show_mask": 1}, "show_mask: expected samples to show in prompts or completions, found none"),
        ({"prompts": "a", "completions": "b"}, "completions: expected either prompts or completions, found both"),
        ({"costs": "true"}, "costs: expected a drafter to measure, found none"),
        ({"context": 0}, "context: expected at least 1, found 0"),
        ({"batch_size": "1,0"}, "batch_size: expected at least 1, found 0"),
        ({"batch_size": "one"}, "batch_size: expected numbers separated by commas, found 'one'"),
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
    code = main(["--target", str(target), *given, "--dtype", "float32", "--costs", "--batch_size", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and "✓ prompt_lookup: n-grams: no files to check" in lines
    for start in ("! sizes, draft: ", "! sizes, other: ", "✓ vocabulary: target 300 logits, other 300 logits"):
        assert any(line.startswith(start) for line in lines)
    assert "✓ positions: target 512, draft 512, other 512" in lines
    for name in ("costs", "other", "prompt_lookup"):
        assert any(line[2:].startswith(f"{name}, B = 1: t(1) = ") for line in lines)


def test_runs_of_any_recipe_are_checked(plain, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(json.dumps({"target": str(plain), "completions": ["c"]}))
    code, lines, _, _ = check(capsys, plain, run=f"medusa:{tmp_path / 'run.yaml'}")
    assert code == 0 and lines["medusa run"] == "✓ Medusa heads"
    for run, message in (
        ("lookahead:f", "a kind that is trained"),
        ("medusa", "run: expected KIND:FILE, found medusa"),
    ):
        with pytest.raises(InputError, match=message):
            check(capsys, plain, run=run)


def test_it_is_a_command(pair_dirs, tmp_path, capsys):
    assert "doctor" in cli.COMMANDS
    assert cli.main(["doctor", "--target", str(pair_dirs[0])]) == 0
    assert cli.main(["doctor", "--target", str(pair_dirs[0]), "--prompts", str(tmp_path / "no.jsonl")]) == 2
    assert capsys.readouterr().err.endswith("no.jsonl: expected a file of prompts, found nothing there\n")
