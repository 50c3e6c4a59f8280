"""Every command with a tiny Gemma 3: many added tokens, and one behind all logits, as multimodal tokenizers have it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma import IMAGE
from pipelines import configured, eagle_configured, heads_configured, history, write_completions
from torch import Tensor
from transformers import GemmaTokenizer

from draftsmith.decode import autoregressive_generate, replay_acceptance, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as distill_command
from draftsmith.distill.config import DraftInit
from draftsmith.medusa.eagle import __main__ as eagle_command
from draftsmith.medusa.heads import __main__ as medusa_command
from draftsmith.scripts import cli
from draftsmith.scripts.doctor import loss_masks
from draftsmith.scripts.doctor.config import DoctorConfig
from draftsmith.scripts.pair import load_pair
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_tokenizer, vocabulary_size
from draftsmith.train.teacher.cache_config import CacheConfig
from draftsmith.train.teacher.cache_writer import make_cache

TALK = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "return x"}]


def conversations(path, count: int, **more: str) -> str:
    """Write conversations, and one more with what is given as an answer."""
    records = [{"id": f"c{i}", "messages": TALK} for i in range(count)]
    records += [{"id": name, "messages": [TALK[0], TALK[1] | {"content": text}]} for name, text in more.items()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prepare_given(target: str, prompts: str, output: str) -> None:
    prepare(PrepareConfig(target, prompts, output, answers="given", batch_size=2, shard_size=2))


def prepare_here(target: str, prompts: str, output: str) -> None:
    prepare(PrepareConfig(target, prompts, output, max_new_tokens=1, batch_size=2, shard_size=2))


def read_by_doctor(target: str, prompts: str, output: str) -> None:
    config = DoctorConfig(target=target, prompts=prompts)
    samples = loss_masks.read(config, load_tokenizer(target), vocabulary_size(target))
    assert samples.all and not samples.refused


@pytest.mark.parametrize("work", [prepare_given, prepare_here, read_by_doctor])
def test_what_a_tokenizer_makes_anew_each_time_is_asked_for_once_a_run(work, gemma_pipeline, tmp_path, monkeypatch):
    """Not once a conversation, batch or token: thousands of added tokens take milliseconds, a vocabulary a third of a
    second."""
    asked: list[str] = []
    added, vocabulary = GemmaTokenizer.added_tokens_decoder, GemmaTokenizer.get_vocab

    def get_vocab(self: Any) -> Any:
        asked.append("vocabulary")
        return vocabulary(self)

    def added_tokens(self: Any) -> Any:
        asked.append("added tokens")
        return added.fget(self)

    monkeypatch.setattr(GemmaTokenizer, "added_tokens_decoder", property(added_tokens))
    monkeypatch.setattr(GemmaTokenizer, "get_vocab", get_vocab)
    counts = []
    for count in (3, 12):
        prompts = conversations(tmp_path / f"{count}.jsonl", count)
        asked.clear()
        work(str(gemma_pipeline / "target"), prompts, str(tmp_path / f"out-{count}"))
        counts.append(sorted(asked))
    assert counts[0] == counts[1]
    assert counts[0].count("vocabulary") <= 4


def test_completions_with_a_token_that_has_no_logit_are_refused_by_cache_and_training(gemma_pipeline, tmp_path):
    rows = vocabulary_size(gemma_pipeline / "target")
    sample = {"id": "picture", "input_ids": [2, rows, 5], "labels": [IGNORED, rows, 5]}
    path, target = write_completions(tmp_path / "texts", [sample]), str(gemma_pipeline / "target")
    wrong = rf"^{path}.*: expected samples as draftsmith prepare writes them, found token {rows} with a vocabulary"
    with pytest.raises(InputError, match=wrong):
        make_cache(CacheConfig(target, [path], str(tmp_path / "cache")))
    with pytest.raises(InputError, match=wrong):
        distill_command.distill(configured(gemma_pipeline, tmp_path / "out", completions=[path]))


CARVED = {"draft": None, "init": DraftInit(layers=[0, 1])}
CUT = {"draft": None, "init": DraftInit(layers=1, draft_vocabulary=40)}
DEPTHS = {"layer_ids": [1, 2]}
DISTRIBUTIONS, FEATURES = {"k": 32}, {"features": True, "feature_dtype": "float32", **DEPTHS}
STATES = FEATURES | {"layer_ids": []}
RECIPES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any] | None]] = {
    "carved": ("draft", configured, CARVED, None),
    "carved, from a cache": ("draft", configured, CARVED | {"temperature": 1.0}, DISTRIBUTIONS),
    "given, cut vocabulary": ("draft", configured, {"init": DraftInit(draft_vocabulary=40)}, None),
    "parallel": ("parallel_draft", configured, CARVED | {"parallel": 3, "draft_length": 3}, None),
    "parallel, from states": ("parallel_draft", configured, {"parallel": 3}, STATES),
    "medusa": ("medusa", heads_configured, {"draft_vocabulary": 50}, None),
    "hydra": ("medusa", heads_configured, {"hydra": True, "lm_heads": "shared"}, None),
    "hydra, from states": ("medusa", heads_configured, {"hydra": True, "draft_vocabulary": 50}, STATES),
    "eagle": ("eagle", eagle_configured, DEPTHS, None),
    "eagle, from a cache": ("eagle", eagle_configured, DEPTHS | {"draft_vocabulary": 60}, FEATURES),
}
TRAIN = {
    configured: distill_command.distill,
    heads_configured: medusa_command.train_heads,
    eagle_configured: eagle_command.train_heads,
}
MODEL_FREE = {"prompt_lookup": {}, "lookahead": {}, "unigram": {}}
GAMMA, NEW = 3, 20


@pytest.fixture(scope="module")
def trained(gemma_pipeline, tmp_path_factory):
    """Return a function that trains by a recipe, once, and returns the directory and the losses."""
    root, done = tmp_path_factory.mktemp("trained"), dict[str, tuple[Path, list[float]]]()

    def train(name: str) -> tuple[Path, list[float]]:
        if name not in done:
            _, kind, options, cache = RECIPES[name]
            output = root / name.replace(" ", "-")
            if cache is not None:
                texts = [str(gemma_pipeline / each) for each in ("short", "long", "heldout")]
                cached = str(root / f"{name}-cache")
                make_cache(CacheConfig(str(gemma_pipeline / "target"), texts, cached, dtype="float32", **cache))
                options = options | {"teacher_cache": [cached]}
            training = {"num_train_epochs": 4, "eval_strategy": "epoch"}
            run = kind(gemma_pipeline, output, heldout=[str(gemma_pipeline / "heldout")], training=training, **options)
            done[name] = output, history(TRAIN[kind](run), "loss")
        return done[name]

    return train


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_learns(name, trained):
    """In twenty steps, on text that holds the tokens of the vocabulary, and whose tokenizer holds one more."""
    output, losses = trained(name)
    assert len(losses) == 20 and all(map(lambda loss: 0 < loss < 100, losses))
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert (output / "README.md").is_file()


def checked(gemma_pipeline: Path, spec: DrafterSpec) -> None:
    """Require the text of plain decoding and of the library at T=0, and of replay the decoder's rounds."""
    target = str(gemma_pipeline / "target")
    pair = load_pair(target, load_tokenizer(target), [spec], "float32")
    drafter = pair.drafter
    rows = load_completions(str(gemma_pipeline / "heldout"))
    prompts = [torch.tensor(row["input_ids"][: row["prompt_length"]]) for row in rows][:3]
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(each, (width - len(each), 0)) for each in prompts])
    mask = torch.stack([(torch.arange(width) >= width - len(each)).long() for each in prompts])
    length = drafter.draft_lengths[0]
    plain = autoregressive_generate(pair.target, ids, mask, **options).sequences
    assert torch.equal(plain, pair.target.generate(ids, attention_mask=mask, **options))
    assert plain.shape[1] > pair.target.config.sliding_window + width  # beyond the window
    found = speculative_generate(pair.target, drafter.proposer, ids, mask, draft_length=length, **options)
    assert torch.equal(found.sequences, plain)
    if drafter.proposer.replay_refusal(length) is None:
        texts = [
            ended(row[width - len(each) :], pair.target, len(each)) for row, each in zip(plain, prompts, strict=True)
        ]
        lengths = [len(each) for each in prompts]
        replayed = replay_acceptance(
            pair.target, drafter.proposer, texts, lengths, [length], temperature=0.0, max_new_tokens=NEW
        )
        tokens, rounds = replayed.tokens_and_rounds(length)
        assert (sum(tokens), sum(rounds)) == (found.counts.num_emitted_tokens, found.counts.num_drafts)


def ended(text: Tensor, target: Any, start: int) -> Tensor:
    """A text without the padding behind the token that ends it."""
    ends = torch.tensor(target.generation_config.eos_token_id)
    at = torch.isin(text[start:], ends).nonzero()
    return text if not len(at) else text[: start + int(at[0]) + 1]


@pytest.mark.parametrize("name", RECIPES)
def test_texts_are_the_targets_and_replay_is_the_decoder(name, gemma_pipeline, trained):
    output, _ = trained(name)
    checked(gemma_pipeline, DrafterSpec(RECIPES[name][0], str(output), draft_lengths=[GAMMA]))


@pytest.mark.parametrize("kind", MODEL_FREE)
def test_drafters_without_weights_write_the_targets_text(kind, gemma_pipeline):
    checked(gemma_pipeline, DrafterSpec(kind, draft_lengths=[GAMMA], **MODEL_FREE[kind]))


@pytest.mark.parametrize("name", ["carved", "parallel", "medusa", "eagle"])
def test_the_doctor_finds_nothing_wrong_and_exports_read_back(name, gemma_pipeline, trained, tmp_path, capsys):
    (output, _), kind, target = trained(name), RECIPES[name][0], str(gemma_pipeline / "target")
    field = "draft" if kind == "parallel_draft" else kind
    assert cli.main(["doctor", "--target", target, f"--{field}", str(output)]) == 0
    assert f"1 added token without one, first '{IMAGE}'" in capsys.readouterr().out.replace("\n", " ")
    flags = (
        ["--draft", str(output)] if field == "draft" else ["--heads", str(output), "--output", str(tmp_path / "out")]
    )
    assert cli.main(["export", "--target", target, "--format", "vllm", *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("vllm serve ")
