"""`draftsmith generate` on a tiny pair: the text, its colours on a terminal, and the summary."""

import io
import json
import os
import re
import shutil
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from bpe import train_bpe
from conftest import perturbed, tiny_llama
from native_layers import qwen_names, save_with_mtp
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from trained_parallel import as_parallel
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from unit.decode.proposers.test_renumbered import permuted

from draftsmith.decode import Counts, DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.decode.speculative import Round
from draftsmith.medusa import BlockDrafter, MedusaHeads
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.scripts import cli as commands
from draftsmith.scripts import generate as module
from draftsmith.scripts import kinds
from draftsmith.scripts.configs import GenerateConfig
from draftsmith.scripts.generate import STYLES, Detokenizer, Progress, generate, kinds_of, main
from draftsmith.train import cli
from draftsmith.train.cli import flags_of
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model

PROMPT = "def f(x):\n    return"
NEW = 24
COLOURS = {"2": "dim", "32": "green", "4;31": "red underline", "36": "cyan", "1": "bold", "0": ""}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tokenizer):
    """A target and a close draft that write printable ASCII: the rows of all other tokens in their heads are zero."""
    root = tmp_path_factory.mktemp("pair")
    printable = [
        i for i in range(len(tokenizer)) if re.fullmatch(r"[ -~\n]+", tokenizer.decode([i], skip_special_tokens=True))
    ]
    others = torch.ones(len(tokenizer), dtype=torch.bool)
    others[printable] = False
    target = tiny_llama(0, len(tokenizer))
    for name, model in {"target": target, "draft": perturbed(target, 0.05), "wild": target}.items():
        model.generation_config.eos_token_id = None
        if name != "wild":
            model.lm_head.weight.data[others] = 0
        else:  # any bytes: most of what it writes is no UTF-8
            model = tiny_llama(0, len(tokenizer))
        save_model(model, tokenizer, root / name)
    draft = AutoModelForCausalLM.from_pretrained(root / "draft")
    save_model(as_parallel(draft, 0, 4), tokenizer, root / "parallel")
    MedusaHeads.of_target(target, 2).save_pretrained(root / "heads")
    EagleHeads.of_target(target).save_pretrained(root / "eagle")
    BlockDrafter.of_target(target, 1).save_pretrained(root / "block")
    shutil.copytree(root / "target", root / "layered")
    save_with_mtp(target, MtpHeads.of_target(target), qwen_names, root / "layered", num_mtp_layers=1)
    return root


def flags(root: Path, **options: object) -> list[str]:
    given = {"target": root / "target", "drafter": root / "draft", "prompt": PROMPT, "max_new_tokens": NEW}
    given |= {"dtype": "float32"} | options
    return flags_of(given)


@cache
def loaded(path: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    return load_tokenizer(path), load_model(path)


def decoded(root: Path, target: str = "target", tree=None, **options: object):
    """Decode as the command should; return the text, the output and the rounds."""
    (tokenizer, model), (_, draft) = loaded(root / target), loaded(root / "draft")
    model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    rounds: list[Round] = []
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    output = speculative_generate(
        model, DraftModelProposer(draft, tree), ids, observer=rounds.append,
        **({"max_new_tokens": NEW, "do_sample": False} | options),
    )  # fmt: skip
    return tokenizer.decode(output.sequences[0], skip_special_tokens=True), output, rounds


def ran(capsys, argv: list[str], code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert cli.run(lambda: main(argv)) == code
    return capsys.readouterr()


def config_of(root: Path, **options: object) -> GenerateConfig:
    fields = {"max_new_tokens": NEW, "dtype": "float32"} | options
    return GenerateConfig(str(root / "target"), PROMPT, str(root / "draft"), **fields)


def terminal() -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False, width=20,
        legacy_windows=False, _environ={},
    )  # fmt: skip


def styled(console: Console) -> list[tuple[str, str]]:
    """Return the characters of a terminal and their styles."""
    cells, style = list[tuple[str, str]](), ""
    for code, character in re.findall(r"\x1b\[([\d;]*)m|([^\x1b])", console.file.getvalue(), re.DOTALL):
        style = COLOURS[code] if code else style
        cells += [(character, style)] if character else []
    return cells


def silent() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80, _environ={})


@pytest.mark.parametrize("temperature", [0, 1])
def test_piped_text_is_the_decoders_and_the_summary_is_apart(pair, capsys, temperature):
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.9} if temperature else {}
    text, output, rounds = decoded(pair, draft_length=3, seed=5, **sampling)
    options = {"temperature": temperature, "top_k": 20, "top_p": 0.9, "seed": 5, "draft_length": 3}
    out, err = ran(capsys, flags(pair, **options))
    assert out == text + "\n" and "\x1b" not in out + err
    counts = output.counts
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    first, second, rule = err.splitlines()
    assert first.startswith(f"{NEW} tokens in {len(rounds)} rounds, τ {counts.mean_acceptance_length():.2f}, ")
    share = f"({counts.draft_acceptance_rate():.0%} at γ = 3)"
    accepted = f"{counts.num_accepted_tokens} of {counts.num_draft_tokens} drafted accepted {share}"
    kinds = [kind for round in rounds for kind in kinds_of(round)]
    others = [f"{kinds.count(k)} {k}" for k in ("corrected", "bonus", "undrafted") if k in kinds]
    assert second == ", ".join([accepted, *others])
    assert rule == "rule exact: lossless"


def test_a_terminal_colours_each_token_by_its_origin(pair, tokenizer):
    text, _, rounds = decoded(pair, draft_length=3)
    expected = [(c, "dim") for c in PROMPT]
    for round in rounds:
        for token, kind in zip(round.tokens, kinds_of(round), strict=True):
            expected += [(c, STYLES[kind]) for c in tokenizer.decode([token])]
    assert {style for _, style in expected} >= {"dim", "green", "red underline", "cyan"}
    assert "".join(c for c, _ in expected) == text
    console = terminal()
    assert generate(config_of(pair, draft_length=3), console, silent()) == 0
    assert [cell for cell in styled(console) if cell[0] != "\n"] == [cell for cell in expected if cell[0] != "\n"]
    assert "".join(character for character, _ in styled(console)) == text + "\n"


def test_a_character_has_the_colour_of_the_token_that_completes_it(tokenizer):
    prompt, smiley = tokenizer("x = ")["input_ids"], tokenizer("😀")["input_ids"]
    assert len(smiley) == 4
    console = terminal()
    progress = Progress(console, Detokenizer(tokenizer, prompt))
    progress.begin()
    progress(Round(0, smiley[:2], Counts.of_round(2, 2, 2), False, False))
    progress(Round(0, smiley[2:], Counts.of_round(2, 1, 2), False, False))
    half = tokenizer("é")["input_ids"][:1]  # cut by the text's end: what there is appears
    progress(Round(0, half, Counts.of_round(1, 1, 1), False, True))
    assert styled(console)[4:] == [("😀", "red underline"), ("\ufffd", "green")]


def test_a_models_text_does_not_steer_the_terminal():
    console, pipe = terminal(), Console(file=io.StringIO(), force_terminal=False)
    for screen in (console, pipe):
        Progress(screen, None).write("a\x1b[31m\r\x07\x7f\x9b", "accepted")
    assert "".join(character for character, _ in styled(console)) == "a␛[31m␍␇␡\ufffd"
    assert pipe.file.getvalue() == "a\x1b[31m\r\x07\x7f\x9b"  # who pipes gets what the model wrote


def test_rounds_are_kinds():
    def kinds(accepted: int, drafted: int, emitted: int) -> list[str]:
        bonus = emitted > accepted == drafted > 0
        return kinds_of(Round(0, list(range(emitted)), Counts.of_round(drafted, accepted, emitted), bonus, False))

    assert kinds(2, 4, 3) == ["accepted", "accepted", "corrected"]
    assert kinds(0, 4, 1) == ["corrected"]
    assert kinds(2, 2, 3) == ["accepted", "accepted", "bonus"]
    assert kinds(2, 2, 2) == ["accepted", "accepted"]  # the text ended inside the draft
    assert kinds(0, 0, 1) == ["undrafted"]


TEXTS = ["plain", "naïve café", "你好，世界", "😀👩‍👩‍👧", "a\n\tb  c", "é", "\ufffd stands here", "end \ufffd"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_hold_half_characters_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    for split in range(1, len(ids)):
        if tokenizer.decode(ids[:split]).endswith("\ufffd"):
            continue  # no prompt ends in half a character
        detokenizer = Detokenizer(tokenizer, ids[:split])
        pieces = [detokenizer.push(token) for token in ids[split:]]
        assert "\ufffd" in text or "\ufffd" not in "".join(pieces)
        assert detokenizer.prompt + "".join(pieces) + detokenizer.flush() == text


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Spaces in front of words, the first one stripped, and bytes for what the vocabulary lacks, as in Llama 2."""
    words = ["▁", "▁the", "▁cat", "s", "▁▁", "\n", ","]
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{i:02X}>": i + 2 for i in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


@pytest.mark.parametrize(
    "tokens",
    [
        ["▁the", "▁cat", "s", ",", "▁the", "▁cat"],
        ["▁the", "▁", "▁cat", "▁▁", "s", "\n", "▁▁", "▁cat"],
        ["▁cat", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xE4>", "<0xBD>", "<0xA0>", "s", "</s>"],
        ["▁cat", "<0xF0>", "<0x9F>", "s", "▁the"],
    ],
)
def test_stripped_spaces_and_fallback_bytes_join_to_the_text(tokens):
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert tokenizer.unk_token_id not in ids
    detokenizer = Detokenizer(tokenizer, ids[:1])
    pieces = [detokenizer.push(token) for token in ids[1:]]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert detokenizer.prompt + "".join(pieces) + detokenizer.flush() == text and " cat" in " " + text
    assert all(piece == "\ufffd\ufffds" or "\ufffd" not in piece for piece in pieces)


def test_bytes_that_are_no_utf8_come_out_as_the_tokenizer_decodes_them(pair, capsys):
    text, _, _ = decoded(pair, target="wild", draft_length=2)
    assert "\ufffd" in text.removeprefix(PROMPT)
    out, _ = ran(capsys, flags(pair, target=pair / "wild", draft_length=2))
    assert out == text + "\n"


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colour_there_are_no_control_codes(pair, environ):
    console = Console(file=io.StringIO(), force_terminal=True, width=20, _environ=environ)
    assert generate(config_of(pair, max_new_tokens=8), console, silent()) == 0
    text, _, _ = decoded(pair, max_new_tokens=8)
    assert console.file.getvalue() == text + "\n"


def test_the_prompt_comes_from_standard_input(pair, capsys, monkeypatch):
    expected, _ = ran(capsys, flags(pair))
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert ran(capsys, flags(pair, prompt="-"))[0] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert "prompt: expected UTF-8 on standard input" in ran(capsys, flags(pair, prompt="-"), 2)[1]


def retokenized(root: Path, name: str, tokenizer: PreTrainedTokenizerFast, new: list[int] | None = None) -> Path:
    """Save a draft under another tokenizer; one of the same tokens, but for their ids, is as good as the pair's own."""
    model = tiny_llama(1, len(tokenizer))
    if new is not None:
        order = torch.tensor(new).argsort()
        own = load_model(root / "draft").state_dict()
        model.load_state_dict({k: w[order] if len(w) == len(new) else w for k, w in own.items()})
    save_model(model, tokenizer, root / name)
    return root / name


@pytest.mark.parametrize("options", [{}, {"temperature": 1}])
def test_a_draft_with_other_ids_does_what_the_draft_does(pair, capsys, tokenizer, options):
    expected = ran(capsys, flags(pair, **options))
    draft = retokenized(pair, "permuted", *permuted(tokenizer))
    out, err = ran(capsys, flags(pair, drafter=f"draft:{draft}", **options))
    assert out == expected[0]
    counts = [re.sub(r"[\d.]+ tokens/s", "", text) for text in (err, expected[1])]
    assert counts[0] == counts[1] and "drafted accepted" in err


def test_a_draft_with_another_tokenizer_is_refused(pair, capsys):
    draft = retokenized(pair, "another", train_bpe(TEXTS, 280))
    out, err = ran(capsys, flags(pair, drafter=f"draft:{draft}"), 2)
    assert out == "" and err.startswith(f"error: draft {draft}: expected the target's tokens and merges, under any ids")


DRAFTERS = {"parallel_draft": "parallel", "draft": "draft", "renumbered": "draft", "run_ahead": "draft"}
DRAFTERS |= {"medusa": "heads", "eagle": "eagle", "block": "block"}
UNTRAINED = ("prompt_lookup", "suffix", "lookahead", "unigram", "mtp", "none")


def test_all_kinds_are_tried_here():
    assert {*DRAFTERS, "hybrid", *(name.partition(":")[0] for name in UNTRAINED)} == {
        *(kind.name for kind in kinds.KINDS), kinds.NONE,
    }  # fmt: skip


@pytest.mark.parametrize("drafter", [*DRAFTERS, *UNTRAINED, "hybrid"])
def test_each_kind_writes_the_targets_text(pair, capsys, drafter):
    text, compare, target = decoded(pair)[0], drafter != "none", "layered" if drafter == "mtp" else "target"
    if drafter in DRAFTERS:
        drafter = f"{drafter}:{pair / DRAFTERS[drafter]}"
    if drafter == "hybrid":
        drafter = f"hybrid:suffix:1+{pair / 'draft'}@match=1"
    out, err = ran(capsys, flags(pair, drafter=drafter, target=pair / target, compare=compare))
    assert out == text + "\n"
    assert err.splitlines()[0].startswith(f"{NEW} tokens in ")
    if compare:
        assert re.search(r"plain decoding: [\d.]+ tokens/s, so \d+\.\d\d× as fast here; the texts are identical$", err)
    else:
        assert f"{NEW} rounds, τ 1.00" in err and "accepted" not in err


def test_a_parallel_draft_drafts_the_tree_of_its_config(pair, tmp_path, capsys):
    """No deeper than γ: one of two tokens, of which a round accepts one at most."""
    shutil.copytree(pair / "parallel", tmp_path / "branched")
    path = tmp_path / "branched" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parallel_tree": [[0], [1], [0, 0]]}))
    options = {"drafter": tmp_path / "branched", "draft_length": 1}
    out, err = ran(capsys, flags(pair, **options))
    assert out == decoded(pair)[0] + "\n"
    rounds, drafted = (int(re.search(words, err)[1]) for words in (r"in (\d+) rounds", r"of (\d+) drafted"))
    assert rounds < NEW and drafted in (2 * rounds, 2 * rounds - 2)


def test_none_draws_what_plain_decoding_draws(pair, capsys):
    tokenizer, target = loaded(pair / "target")
    target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    plain = autoregressive_generate(target, ids, max_new_tokens=NEW, do_sample=True, top_k=0, seed=9)
    out, _ = ran(capsys, flags(pair, drafter="none", temperature=1, seed=9))
    assert out == tokenizer.decode(plain.sequences[0], skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(("rule", "temperature"), [("typical", 0), ("typical", 1), ("threshold", 1), ("cascade", 1)])
def test_a_lossy_rule_says_how_far_it_departs(pair, capsys, rule, temperature):
    text, output, _ = decoded(pair, rule=rule, do_sample=temperature > 0, top_k=0)
    out, err = ran(capsys, flags(pair, rule=rule, temperature=temperature, compare=True))
    assert out == text + "\n"
    departure = output.departure
    if temperature:
        said = f"a token's distribution is {departure.mean_total_variation():.3f} away from the target's"
        assert err.endswith("the texts are two samples, not to be identical\n")
    else:
        said = f"{departure.argmax_disagreement():.1%} of the tokens are not the target's argmax"
        assert "the texts are identical" in err or re.search(r"part at token \d+ \(the rule is lossy\)", err)
    assert f"rule {rule}: lossy, {said}" in err


def test_an_interrupt_leaves_the_text_and_sums_up(pair, capsys, monkeypatch, tokenizer):
    _, _, rounds = decoded(pair, rule="typical")
    seen = []

    def interrupt(round: Round) -> list[str]:
        seen.append(round)
        if len(seen) == 4:
            signal.raise_signal(signal.SIGINT)
        return kinds_of(round)

    monkeypatch.setattr(module, "kinds_of", interrupt)
    out, err = ran(capsys, flags(pair, compare=True, rule="typical"), 130)
    written = [token for round in rounds[:3] for token in round.tokens]
    assert seen == rounds[:4] and out == PROMPT + tokenizer.decode(written) + "\n"
    emitted = sum(len(round.tokens) for round in seen)
    assert err.startswith(f"{emitted} tokens in 4 rounds") and err.splitlines()[0].endswith("interrupted")
    assert "not known of an interrupted text" in err and "plain decoding" not in err
    assert "Traceback" not in err


def test_a_reader_that_has_enough_ends_it(pair, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.run(lambda: main(flags(pair))) == 141
        monkeypatch.undo()
    assert "Traceback" not in capsys.readouterr().err


def test_a_chat_template_is_used_if_asked_for(pair, tmp_path, capsys, tokenizer):
    for name in ("target", "draft"):
        save_model(load_model(pair / name), tokenizer, tmp_path / name)
        path = tmp_path / name / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        settings["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
        path.write_text(json.dumps(settings))
    out, _ = ran(capsys, flags(tmp_path, chat=True, prompt="Hi", max_new_tokens=4))
    assert out.startswith("<user>Hi\n<assistant>")
    assert ran(capsys, flags(tmp_path, prompt="Hi", max_new_tokens=4))[0].startswith("Hi")
    assert "chat: expected a tokenizer with a chat template, found none in" in ran(capsys, flags(pair, chat=True), 2)[1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drafter": "oracle"}, "drafter: expected a directory, a hub id or one of parallel_draft, medusa, eagle,"),
        ({"drafter": "medusa:nowhere"}, "Medusa heads: expected a model directory"),
        ({"rule": "cascade", "drafter": "prompt_lookup"}, "for cascade, found prompt_lookup"),
        ({"compare": True, "drafter": "none"}, "compare: expected a drafter to compare with plain"),
        ({"prompt": ""}, "prompt: expected some text, found an empty string"),
        ({"max_new_tokens": 512}, "max_new_tokens: expected prompt and text within the target's 512 positions, found"),
        ({"drafter": "draft:/nowhere"}, "draft: expected a model directory or a hub id, found nothing at /nowhere"),
        ({"prompts": "p"}, "prompts"),
    ],
)
def test_bad_input_is_refused_in_one_line(pair, capsys, options, named):
    out, err = ran(capsys, flags(pair, **options), 2)
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert named in err


def test_draftsmith_has_the_command_and_the_shipped_config_runs(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    argv = ["generate", "--config", "configs/generate/tiny.yaml", "--max_new_tokens", "12"]
    assert commands.main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("def read(self, path):\n") and err.startswith("12 tokens in ")
    assert commands.main([]) == 0
    assert "  generate    " in capsys.readouterr().out
