"""A head of block drafters that is a file and an entry of a list: every command takes it, and nothing else changes."""

import json
from pathlib import Path

import pytest
import torch
import toy_block_head
from conftest import tiny_llama
from specimens import TREE, block

from draftsmith.decode import autoregressive_generate, replay_acceptance, speculative_generate
from draftsmith.decode.tree import Tree
from draftsmith.medusa import BlockProposer
from draftsmith.medusa.block import heads
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.scripts.cli import main


@pytest.fixture(scope="module", autouse=True)
def registered():
    heads.HEADS.append(toy_block_head.ToyHead)  # in place: who imported the list before sees it, too
    yield
    heads.HEADS.remove(toy_block_head.ToyHead)


@pytest.fixture(scope="module")
def toy(registered, pipeline, tmp_path_factory):
    """A drafter with the head, trained by the command."""
    output = tmp_path_factory.mktemp("toy") / "block"
    assert main([
        "block", "--target", str(pipeline / "target"), "--completions", json.dumps([str(pipeline / "long")]),
        "--heldout", json.dumps([str(pipeline / "heldout")]), "--markov_rank", "0", "--block_size", "4",
        "--training.output_dir", str(output), "--training.max_steps", "6", "--training.eval_strategy", "steps",
        "--training.eval_steps", "3", "--training.per_device_train_batch_size", "8", "--training.report_to", "none",
    ]) == 0  # fmt: skip
    return output


def test_it_is_a_file_of_few_lines():
    assert len(Path(toy_block_head.__file__).read_text().splitlines()) < 60


def test_it_is_trained_and_saved(toy):
    head = BlockDrafter.from_pretrained(toy).toy_head
    assert all(parameter.abs().sum() > 0 for parameter in head.parameters())  # its map began with zeros
    assert "| toy head | rank 4 |" in (toy / "README.md").read_text()


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_replay_counts_what_the_decoder_counts(tree):
    target, prompts = tiny_llama(5, 13, layers=3), torch.tensor([[3, 4, 5, 3, 4], [6, 1, 6, 1, 6]])
    proposer = BlockProposer(block(target, markov_rank=0, toy_width=4), tree)
    written = autoregressive_generate(target, prompts, max_new_tokens=40, do_sample=False).sequences
    replay = replay_acceptance(target, proposer, list(written), [5, 5], [1, 2, 3], 0, max_new_tokens=40)
    for k in (1, 2, 3):
        out = speculative_generate(target, proposer, prompts, draft_length=k, max_new_tokens=40, do_sample=False)
        assert out.sequences.tolist() == written.tolist()
        replayed = [(text.counts[k].num_drafts, text.counts[k].num_accepted_tokens) for text in replay.texts]
        assert replayed == [(row.num_drafts, row.num_accepted_tokens) for row in out.row_counts]


def test_each_node_continues_its_parents_state():
    target, tree = tiny_llama(5, 13, layers=3), Tree((-1, -1, 0, 1, 2, 3))
    drafter, anchors = block(target, markov_rank=0, toy_width=4), torch.tensor([3, 4])
    model = BlockProposer(drafter).draft_model
    model.draft_for(target)
    hidden, tokens = (
        torch.randn(2, 3, target.config.hidden_size),
        torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]]),
    )
    logits_after = model.logits_after(tree, hidden, torch.stack([anchors + 1, anchors], 1), 13)
    for level in tree.levels(torch.device("cpu")):
        found = logits_after(level, tokens)
        for place, node in enumerate(level.parents):
            path = tree.path(node) if level.depth else []
            side = drafter.sides(hidden, torch.cat([anchors[:, None], tokens[:, path]], 1), model.embed)[:, -1]
            torch.testing.assert_close(found[:, place], drafter.logits(hidden[:, level.depth], side, model.head))


def test_its_run_is_planned(pipeline, capsys):
    target, completions = str(pipeline / "target"), json.dumps([str(pipeline / "long")])
    flags = ["block", "--target", target, "--completions", completions, "--max_length", "64"]
    assert main(["plan", *flags, "--markov_rank", "0", "--gpus", "2"]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("format", "code", "message"),
    [
        ("own", 0, ""),
        ("vllm", 2, "format: expected a drafter that vllm can hold, found a toy head, which no other tool knows"),
        ("sglang", 2, "a toy head, which no other tool knows; take own"),
    ],
)
def test_it_is_exported_in_our_form_alone(toy, pipeline, tmp_path, format, code, message, capsys):
    flags = ["--drafter", str(toy), "--target", str(pipeline / "target"), "--output", str(tmp_path / "out")]
    assert main(["export", *flags, "--format", format]) == code
    assert message in (capsys.readouterr().err.splitlines() or [""])[-1]
    if not code:
        theirs, ours = (BlockDrafter.from_pretrained(path).state_dict() for path in (tmp_path / "out", toy))
        assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
