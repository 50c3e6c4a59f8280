"""A drafter of each kind for any tiny target: what the tests of every kind draft with.

Tests take their cases from `KINDS`. A kind that is listed and has no specimen here fails each of them with one line.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trained_parallel import as_parallel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import (
    BlindProposer,
    DraftModelProposer,
    HybridProposer,
    LookaheadProposer,
    ParallelDraftProposer,
    PromptLookupProposer,
    Proposer,
    RunAheadProposer,
    SuffixProposer,
    Switch,
    Tree,
)
from draftsmith.decode.proposers.renumbered import renumber_draft
from draftsmith.medusa import BlockDrafter, BlockProposer, EagleHeads, MedusaHeads, MedusaProposer
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.proposer import MtpProposer
from draftsmith.scripts import kinds
from draftsmith.train.runs import save_model

TREE = Tree.from_choices([(0,), (1,), (0, 0)])
LENGTH = 3
"""Tokens that heads and parallel drafts guess at once."""
Make = Callable[[PreTrainedModel], Proposer]


@dataclass(frozen=True)
class Specimen:
    """How tests make drafters of a kind."""

    shapes: Mapping[str, Make]
    """What it drafts, each in memory for a target."""
    save: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Path], None] | None = None
    """Writes one into a directory; None where the kind is not stored."""
    argument: str = ""
    """What follows the name of a kind that is not stored."""
    training: Callable[[Path], list[str]] = lambda pipeline: []
    """What its recipe must be told in addition to target and completions, of the files of `pipeline`."""
    confident: bool = True
    """Whether its drafts have a probability, which `Cascade` compares."""
    batched: bool = True
    """Whether it drafts for several rows."""

    def named(self, kind: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> str:
        """Return what `--drafter` says of it; one that is stored is written first."""
        if self.save is None:
            return kind + self.argument
        self.save(target, tokenizer, directory)
        return str(directory)


def few(target: PreTrainedModel) -> int | None:
    """Return how many tokens trees may name: of a tiny vocabulary, whose orders are all followed, three."""
    return 3 if target.config.vocab_size < 10 else None


def near(target: PreTrainedModel, names: int | None = None) -> PreTrainedModel:
    """Return a copy of a target that is a little off, and names the first tokens alone."""
    draft = copy.deepcopy(target)
    weight = draft.get_output_embeddings().weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)
    draft.get_output_embeddings().weight = torch.nn.Parameter((weight + 0.6 * weight.std() * noise)[:names])
    return draft.requires_grad_(False)


def shaken(heads: Any, target: PreTrainedModel) -> Any:
    """Return heads in a target's dtype that no longer say what the target's own head says."""
    torch.manual_seed(4)
    for parameter in heads.parameters():
        spread = parameter.data.std(correction=min(1, parameter.numel() - 1)).clamp(min=0.1)
        parameter.data += 0.2 * spread * torch.randn_like(parameter)
    return heads.to(target.dtype).eval().requires_grad_(False)


def named_tokens(target: PreTrainedModel) -> Tensor | None:
    return torch.tensor([target.config.vocab_size - 1, 0, 1]) if few(target) else None


def medusa(target: PreTrainedModel, **options: Any) -> MedusaHeads:
    return shaken(MedusaHeads.of_target(target, LENGTH, token_map=named_tokens(target), **options), target)


def eagle(target: PreTrainedModel, names: Tensor | None = None, **options: Any) -> EagleHeads:
    return shaken(EagleHeads.of_target(target, token_map=names, **options), target)


def mtp(target: PreTrainedModel, layers: int = 1) -> MtpHeads:
    """Return layers that no longer say what the target's last layer says."""
    return shaken(MtpHeads.of_target(target, layers), target)


DFLASH2 = {"markov_rank": 0, "selector_rank": 2, "selector_top_k": 3, "conv_kernel_size": 2, "conv_group_size": 4}
"""Its parts, small enough for any tiny target."""
RECURRENT = {"markov_rank": 0, "emb_dim": 2, "gru_hidden_dim": 3}
"""Domino's head."""


def block(target: PreTrainedModel, **shape: Any) -> BlockDrafter:
    shape = {"block_size": LENGTH, "markov_rank": 2, **shape}
    torch.manual_seed(3)  # its layers begin at random
    return shaken(BlockDrafter.of_target(target, target.config.vocab_size - 2, **shape), target)


def parallel(target: PreTrainedModel, names: int | None = None) -> PreTrainedModel:
    return as_parallel(near(target, names), target.config.vocab_size - 2, LENGTH)


def permuted(target: PreTrainedModel) -> PreTrainedModel:
    """Return a draft whose tokens have other numbers, made to fit: one of them is no token of the draft's."""
    size = target.config.vocab_size
    return renumber_draft(near(target), {i: (i + 3) % size for i in range(size) if i != 2}, 2)


def save_heads(make: Callable[[PreTrainedModel], Any]) -> Callable[..., None]:
    return lambda target, tokenizer, directory: make(target).save_pretrained(directory)


def save_causal(make: Callable[[PreTrainedModel], PreTrainedModel]) -> Callable[..., None]:
    return lambda target, tokenizer, directory: save_model(make(target), tokenizer, directory)


SPECIMENS: dict[str, Specimen] = {
    "draft": Specimen(
        {
            "chain": lambda target: DraftModelProposer(near(target)),
            "greedy chain": lambda target: DraftModelProposer(near(target), greedy=True),
            "tree": lambda target: DraftModelProposer(near(target, few(target)), TREE),
        },
        save_causal(near),
        training=lambda pipeline: [f"--draft={pipeline / 'draft'}"],
    ),
    "renumbered": Specimen({"renumbered": lambda target: DraftModelProposer(permuted(target))}, save_causal(near)),
    "run_ahead": Specimen({"chain": lambda target: RunAheadProposer(near(target))}, save_causal(near), batched=False),
    "parallel_draft": Specimen(
        {
            "chain": lambda target: ParallelDraftProposer(parallel(target)),
            "greedy chain": lambda target: ParallelDraftProposer(parallel(target), greedy=True),
            "tree": lambda target: ParallelDraftProposer(parallel(target, few(target)), TREE),
        },
        save_causal(parallel),
        training=lambda pipeline: [f"--draft={pipeline / 'draft'}", "--parallel=3"],
    ),
    "medusa": Specimen(
        {
            "chain": lambda target: MedusaProposer(medusa(target), Tree.chain(LENGTH)),
            "tree": lambda target: MedusaProposer(medusa(target), TREE),
            "hydra tree": lambda target: MedusaProposer(medusa(target, hydra=True), TREE),
        },
        save_heads(medusa),
    ),
    "eagle": Specimen(
        {
            "chain": lambda target: EagleProposer(eagle(target)),
            "normed chain": lambda target: EagleProposer(eagle(target, norm_output=True, fc_norm=True)),
            "chain with a window": lambda target: EagleProposer(eagle(target, sliding_window=3)),
            "tree": lambda target: EagleProposer(eagle(target, named_tokens(target)), TREE),
            "tree with a window": lambda target: EagleProposer(eagle(target, sliding_window=2), TREE),
        },
        save_heads(eagle),
    ),
    "block": Specimen(
        {
            "chain": lambda target: BlockProposer(block(target)),
            "two layers, anchor guesses nothing": lambda target: BlockProposer(
                block(target, block_size=LENGTH + 1, anchor_guesses=False, markov_rank=0, layers=2)
            ),
            "two layers, one with a window": lambda target: BlockProposer(
                block(target, layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=LENGTH + 1)
            ),
            "greedy chain": lambda target: BlockProposer(block(target), greedy=True),
            "tree": lambda target: BlockProposer(block(target, token_map=named_tokens(target)), TREE),
            "chosen chain, anchor guesses nothing": lambda target: BlockProposer(
                block(target, block_size=LENGTH + 1, anchor_guesses=False, **DFLASH2)
            ),
            "chosen tree": lambda target: BlockProposer(
                block(target, token_map=named_tokens(target), **DFLASH2 | {"selector_top_k": 2}), TREE
            ),
            "recurrent chain": lambda target: BlockProposer(block(target, **RECURRENT, pure_draft_prefix_len=1)),
            "recurrent tree": lambda target: BlockProposer(
                block(target, **RECURRENT, token_map=named_tokens(target)), TREE
            ),
            "recurrent, anchor guesses nothing, causal": lambda target: BlockProposer(
                block(target, **RECURRENT, block_size=LENGTH + 1, anchor_guesses=False, is_causal=True)
            ),
            "causal tree": lambda target: BlockProposer(
                block(target, is_causal=True, markov_rank=0, token_map=named_tokens(target)), TREE
            ),
        },
        save_heads(block),
    ),
    "mtp": Specimen(
        {
            "one layer": lambda target: MtpProposer(mtp(target)),
            "a layer for each token": lambda target: MtpProposer(mtp(target, LENGTH)),
            "greedy chain": lambda target: MtpProposer(mtp(target), greedy=True),
        },
        save_heads(mtp),
    ),
    "prompt_lookup": Specimen({"chain": lambda target: PromptLookupProposer()}, confident=False),
    "suffix": Specimen({"chain": lambda target: SuffixProposer(min_match=1)}, argument=":1", confident=False),
    "lookahead": Specimen({"chain": lambda target: LookaheadProposer()}, confident=False),
    "unigram": Specimen({"of the text": lambda target: BlindProposer()}),
    "hybrid": Specimen(
        {
            "lookup, draft": lambda target: HybridProposer([PromptLookupProposer(), DraftModelProposer(near(target))]),
            "suffix, eagle's tree": lambda target: HybridProposer(
                [SuffixProposer(min_match=1), EagleProposer(eagle(target, named_tokens(target)), TREE)], Switch(match=1)
            ),
        },
        argument=":suffix:1+prompt_lookup+unigram@match=2",
        confident=False,
    ),
}


def specimen(kind: str) -> Specimen:
    """Return the specimen of a kind, or fail the test in one line."""
    if kind not in SPECIMENS:
        pytest.fail(f"{kind}: expected a specimen in tests/support/specimens.py, found none", pytrace=False)
    return SPECIMENS[kind]


def every_kind(stored: bool = False) -> pytest.MarkDecorator:
    """Run a test once for each kind, or for each that lies in a directory."""
    return pytest.mark.parametrize("kind", [kind.name for kind in kinds.KINDS if kind.stored or not stored])


def shapes() -> list[tuple[str, str]]:
    """Return every kind with each of its shapes; a kind without a specimen has one, whose test fails."""
    return [
        (kind.name, shape)
        for kind in kinds.KINDS
        for shape in (SPECIMENS[kind.name].shapes if kind.name in SPECIMENS else ["no specimen"])
    ]


def case_id(value: object) -> str | None:
    """Return the id of a case of `shapes`, for `parametrize`."""
    return "-".join(value) if isinstance(value, tuple) else None


every_shape = pytest.mark.parametrize(("kind", "shape"), shapes())


def proposer(kind: str, shape: str, target: PreTrainedModel) -> Proposer:
    """Make one in memory."""
    return specimen(kind).shapes[shape](target)


def rotated(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the first axis in full, and beside each of its values one combination of the others, in turn."""
    first, *others = axes
    return [(value, *rest) for value, rest in zip(first, cycle(product(*others)), strict=False)]


def wavering(proposer: Any, draft_lengths: Iterable[int]) -> Any:
    """Let a proposer draft at most these lengths, in turn, as the last drafter of a hybrid may have to."""
    propose, turns = proposer.propose, cycle(draft_lengths)

    def of_this_turn(contexts: Any, room: Any) -> Any:
        most = next(turns)
        return propose(contexts, [min(k, most) for k in room])

    proposer.propose = of_this_turn
    return proposer
