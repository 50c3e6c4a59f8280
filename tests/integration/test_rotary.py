"""Rotary positions of all kinds of drafters: trained, saved, exported and read back they turn by the same numbers.

And on a target whose angles change with the length, the split of batches changes nothing in training.
"""

import math
import shutil

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from native_layers import qwen_names, save_with_mtp
from pipelines import block_configured, configured, eagle_configured, heads_configured
from specimens import as_parallel, block, eagle, medusa, mtp

from draftsmith.decode.cache import rotate_by_text
from draftsmith.decode.errors import InputError
from draftsmith.distill.__main__ import DistillRun
from draftsmith.distill.config import DraftInit
from draftsmith.distill.draft_init import make_draft
from draftsmith.medusa.base import FIXED
from draftsmith.medusa.block.__main__ import BlockRun
from draftsmith.medusa.block.formats import export as block_formats
from draftsmith.medusa.block.formats.importing import import_block
from draftsmith.medusa.eagle.__main__ import EagleRun
from draftsmith.medusa.eagle.formats import export as eagle_formats
from draftsmith.medusa.eagle.formats.importing import import_eagle
from draftsmith.medusa.heads.__main__ import MedusaRun
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.scripts import cli
from draftsmith.train.data.examples import training_examples
from draftsmith.train.kinds.export import unserved_rotation
from draftsmith.train.models import load_draft, load_model
from draftsmith.train.runs import save_model

TRAINED = 32
"""The length that the scaled rotations were trained at; positions go to four times as many."""
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 9.0]},
}
ORDER = torch.arange(4 * TRAINED)[None]
SHORT = ORDER * (ORDER < TRAINED - 5)
BATCHES = {
    "a long text": ORDER,
    "a text of the trained length": ORDER[:, :TRAINED],
    "a token of a cached text": ORDER[:, -1:],
    "texts of both lengths": torch.cat([SHORT, ORDER]),
    "texts packed in a row": torch.cat([ORDER[:, : TRAINED - 5], ORDER[:, : TRAINED + 5]], 1),
    "a short text after long ones": ORDER[:, :9],
}


def scaled(kind):
    """The fields of a rotation, as a config has them."""
    fields = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    return fields | ({"original_max_position_embeddings": TRAINED} if kind in ("llama3", "longrope") else {})


def llama(kind, vocabulary, **options):
    model = tiny_llama(0, vocabulary, layers=4, rope_parameters=scaled(kind), **options)
    model.config.max_position_embeddings = model.model.rotary_emb.original_max_seq_len = (
        TRAINED if kind == "dynamic" else 4 * TRAINED
    )
    return model


def rotations(model):
    """Cosines and sines of all batches, by each kind of layers; texts of one batch as they are alone."""
    rotate_by_text(model)
    embedding = next(part for part in model.modules() if isinstance(getattr(part, "rope_type", None), str | dict))
    kinds = [{"layer_type": kind} for kind in embedding.rope_type] if isinstance(embedding.rope_type, dict) else [{}]
    return [
        part.clone()
        for batch in BATCHES.values()
        for kind in kinds
        for part in embedding(torch.zeros(1, 1), batch, **kind)
    ]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("make", [eagle, block], ids=["eagle", "block"])
def test_heads_turn_alike_in_every_format(kind, make, tmp_path):
    target = llama(kind, 97)
    heads = make(target)
    formats, read = {eagle: (eagle_formats, import_eagle), block: (block_formats, import_block)}[make]
    wanted = rotations(heads)
    # New heads of a target whose angles change with the length turn by the same theta, and never change.
    assert same(wanted, rotations(target if kind in FIXED else llama("default", 97)))
    written = 0
    for name in formats.FORMATS.names:
        try:
            formats.FORMATS.write(heads, tmp_path / name, name)
        except InputError as error:
            assert "rotation" not in str(error)
            continue
        written += 1
        assert same(rotations(read(tmp_path / name)), wanted)
        if name == "own":
            assert same(rotations(type(heads).from_pretrained(tmp_path / name)), wanted)
    assert written >= 3


@pytest.mark.parametrize("make", [eagle, block], ids=["eagle", "block"])
def test_a_yarn_that_servers_scale_otherwise_is_not_exported(make, tmp_path):
    formats = {eagle: eagle_formats, block: block_formats}[make]
    heads = make(tiny_llama(0, 97, layers=4, rope_parameters=scaled("yarn") | {"attention_factor": 1.0}))
    formats.FORMATS.write(heads, tmp_path / "own", "own")
    with pytest.raises(InputError, match=r"a yarn rotation scaled by 1, which servers scale by 1.139; keep"):
        formats.FORMATS.write(heads, tmp_path / "vllm", "vllm")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *((scaled(kind), None) for kind in ("default", "linear", "yarn", "llama3")),
        *((scaled(kind), f"{kind} angles, which servers change") for kind in ("dynamic", "longrope")),
        (scaled("yarn") | {"mscale": 0.7, "mscale_all_dim": 0.7}, "scaled by 1, which servers scale by 1.139"),
        (scaled("yarn") | {"attention_factor": 0.1 * math.log(4.0) + 1}, None),
    ],
)
def test_what_servers_turn_otherwise_is_known(fields, said):
    """The scale of a yarn is the library's."""
    found = unserved_rotation(fields)
    assert found is None if said is None else said in str(found)
    if fields["rope_type"] == "yarn":
        rotary = tiny_llama(0, 97, rope_parameters=fields).model.rotary_emb
        served = 0.1 * math.log(4.0) + 1
        assert (said is None) == (rotary.attention_scaling == pytest.approx(served))


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_the_export_of_a_draft_says_what_servers_turn_otherwise(kind, tmp_path, tokenizer, capsys):
    save_model(llama(kind, len(tokenizer)), tokenizer, tmp_path / "draft")
    assert cli.main(["export", "--drafter", str(tmp_path / "draft"), "--format", "vllm"]) == 0
    said = f"# {tmp_path / 'draft'} has dynamic angles, which servers change with the length by other rules: its"
    assert (said in capsys.readouterr().out) == (kind == "dynamic")


def test_heads_of_a_target_that_turns_a_part_of_each_head_turn_whole_ones():
    """Phi-4's: factors for a part of the head's width alone."""
    rope = scaled("longrope") | {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "partial_rotary_factor": 0.5}
    target = tiny_model("phi3", head_dim=8, rope_parameters=rope, original_max_position_embeddings=TRAINED)
    assert eagle(target).config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("kind", [*SCALINGS, "by layer"])
def test_draft_models_turn_as_their_target(kind, tmp_path, tokenizer):
    if kind == "by layer":
        rope = {"full_attention": scaled("linear"), "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
        target = tiny_model("gemma3", vocab_size=len(tokenizer), num_hidden_layers=4, layer_types=None,
                            _sliding_window_pattern=2, rope_parameters=rope)  # fmt: skip
    else:
        target = llama(kind, len(tokenizer))
    save_model(target, tokenizer, tmp_path / "target")
    target = load_model(tmp_path / "target")
    wanted = rotations(target)
    carved, _ = make_draft(None, DraftInit(2), str(tmp_path / "target"), tokenizer)
    random, _ = make_draft(None, DraftInit(config={"num_hidden_layers": 2}), str(tmp_path / "target"), tokenizer)
    given, _ = make_draft(str(tmp_path / "target"), DraftInit(), str(tmp_path / "target"), tokenizer)
    parallel = as_parallel(load_model(tmp_path / "target"), len(tokenizer) - 2, 3)
    for name, draft in {"carved": carved, "random": random, "given": given, "parallel": parallel}.items():
        assert same(rotations(draft), wanted)
        save_model(draft, tokenizer, tmp_path / name)
        assert same(rotations(load_draft(tmp_path / name)), wanted)


@pytest.mark.parametrize("kind", [*SCALINGS, "by layer"])
def test_mtp_layers_turn_as_their_target_and_medusa_heads_do_not_turn(kind, tmp_path):
    rope = scaled(kind) if kind != "by layer" else None
    target = tiny_model("gemma3") if rope is None else llama(kind, 97)
    wanted, layers = rotations(target), mtp(target)
    assert same(rotations(layers.native), wanted)
    save_with_mtp(target, layers, qwen_names, tmp_path, num_mtp_layers=1)
    read = load_model(tmp_path)
    assert same(rotations(read), wanted)
    assert same(rotations(MtpHeads.native_to(read).native), wanted)
    assert not any(getattr(part, "rope_type", None) for part in medusa(target).modules())


ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 14}
ROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 9.0, 27.0]}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (DistillRun, configured),
        (MedusaRun, heads_configured),
        (EagleRun, eagle_configured),
        (BlockRun, block_configured),
    ],
)
def test_the_loss_does_not_depend_on_the_longest_text_of_a_batch(kind, config, pipeline, tokenizer, tmp_path):
    model = tiny_llama(0, len(tokenizer), scale=1.0, rope_parameters=ROPE, initializer_range=0.3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, tmp_path / "target")
    for name in ("short", "long"):
        shutil.copytree(pipeline / name, tmp_path / name)
    data = training_examples([str(tmp_path / "short"), str(tmp_path / "long")])
    lengths = [len(row["input_ids"]) for row in data]
    assert min(lengths) < 14 < max(lengths)
    losses = []
    for rows in (1, 8):
        options = {"target": str(tmp_path / "target"), "training": {"per_device_eval_batch_size": rows}}
        options |= {"draft": str(pipeline / "draft")} if kind is DistillRun else {}
        run = kind(config(pipeline, tmp_path / "out", **options))
        run.read_small_files()
        run.data, run.heldout = data, None
        run.target = run.load_target()
        trainer = run.make_trainer(run.make_model())
        losses.append(trainer.evaluate(data)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
