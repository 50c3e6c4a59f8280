"""Whole drafts, the target's argmax and the rule for sampling in programs: they write what eager decoding writes.

In float32 the same seeds give the same tokens and counts. Most tests run what would be traced; each kind of program is
traced once under sampling, which the programs of T=0 are parts of.
"""

import copy
import weakref
from functools import lru_cache, wraps

import pytest
import torch
from conftest import perturbed, tiny_llama
from specimens import DFLASH2, RECURRENT, TREE, block, eagle, medusa, parallel, rotated, wavering
from trained_heads import own_texts, train_heads

from draftsmith.decode import (
    BlindProposer,
    Cascade,
    DraftModelProposer,
    HybridProposer,
    InputError,
    ParallelDraftProposer,
    SuffixProposer,
    Switch,
    Threshold,
    Tree,
    Typical,
    autoregressive_generate,
    speculative_generate,
)
from draftsmith.decode.cache import program
from draftsmith.decode.proposers import draft_model
from draftsmith.medusa import BlockProposer, MedusaHeads, MedusaProposer
from draftsmith.medusa.eagle.proposer import EagleProposer

NEW = 14
LENGTHS = (5, 9, 2)
GREEDY = {"do_sample": False}
PLAIN = {"do_sample": True, "top_k": 0}
TEMPERATURES = {"T=0": GREEDY, "T=1": PLAIN, "T=0.7": {**PLAIN, "temperature": 0.7}}


@lru_cache
def target():
    return tiny_llama(0)


@lru_cache
def draft():
    return perturbed(target(), 0.05)


def rounded(model):
    """Give a float32 model weights as bfloat16 has them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@lru_cache
def eagle_heads(window=None):
    return eagle(target(), sliding_window=window)


@lru_cache
def heads(hydra):
    """Heads that learnt from what the target writes behind prompts like the tests'."""
    ids, _ = batch()
    prompts = [row[-length:] for row, length in zip(ids, LENGTHS, strict=True)]
    ways = (GREEDY, PLAIN, PLAIN)
    texts = [text for options in ways for text in own_texts(target(), prompts, max_new_tokens=NEW, **options)]
    return train_heads(target(), MedusaHeads.of_target(target(), 3, hydra=hydra), texts)


@lru_cache
def blocks():
    return block(target(), enable_confidence_head=True)


def chosen():
    return block(target(), block_size=4, anchor_guesses=False, **DFLASH2)


def recurrent():
    return block(target(), **RECURRENT, enable_confidence_head=True)


KINDS = ["sliding_attention", "full_attention"]
SHAPES = {
    "chain": lambda: DraftModelProposer(draft()),
    "greedy chain": lambda: DraftModelProposer(draft(), greedy=True),
    "tree": lambda: DraftModelProposer(draft(), Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])),
    "parallel chain": lambda: ParallelDraftProposer(parallel(target())),
    "parallel tree": lambda: ParallelDraftProposer(parallel(target()), TREE),
    "eagle chain": lambda: EagleProposer(eagle_heads()),
    "eagle tree": lambda: EagleProposer(eagle_heads(), Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])),
    "eagle chain, a window": lambda: EagleProposer(eagle_heads(4)),
    "eagle tree, a window": lambda: EagleProposer(eagle_heads(3), TREE),
    "medusa chain": lambda: MedusaProposer(heads(False), Tree.chain(3)),
    "medusa tree": lambda: MedusaProposer(heads(False), TREE),
    "hydra chain": lambda: MedusaProposer(heads(True), Tree.chain(3)),
    "hydra tree": lambda: MedusaProposer(heads(True), TREE),
    "block chain": lambda: BlockProposer(blocks()),
    "block tree": lambda: BlockProposer(blocks(), TREE),
    "block chain, windows": lambda: BlockProposer(block(target(), layers=2, layer_types=KINDS, sliding_window=5)),
    "block chain, chosen": lambda: BlockProposer(chosen()),
    "block tree, chosen": lambda: BlockProposer(chosen(), TREE),
    "block chain, recurrent": lambda: BlockProposer(recurrent()),
    "block tree, recurrent": lambda: BlockProposer(recurrent(), TREE),
    "block chain, causal": lambda: BlockProposer(block(target(), layers=2, is_causal=True)),
    "block tree, a window": lambda: BlockProposer(block(target(), sliding_window=4, is_causal=False), TREE),
}
# Each at T=0 and, in turn, at one of the other temperatures, which are an input of the same programs.
every_shape = pytest.mark.parametrize(
    ("shape", "name"), [*((shape, "T=0") for shape in SHAPES), *rotated(SHAPES, ["T=1", "T=0.7"])]
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Let no test have another's programs."""
    monkeypatch.setattr(program, "_PROGRAMS", weakref.WeakKeyDictionary())


def batch(rows=3):
    """Prompts of different lengths, padded on the left, and their mask; a single one is the first."""
    generator, longest = torch.Generator().manual_seed(5), max(LENGTHS[:rows])
    ids, mask = torch.zeros(2, rows, longest, dtype=torch.long)
    for row, length in enumerate(LENGTHS[:rows]):
        ids[row, longest - length :] = torch.randint(1, 97, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return ids, mask


def new_tokens(out, rows=3):
    """Return the new tokens of each row, up to its end."""
    first = max(LENGTHS[:rows])
    return [
        row[first : first + c.num_emitted_tokens].tolist() for row, c in zip(out.sequences, out.row_counts, strict=True)
    ]


def ending(drafter, model, options, seed=3):
    """Return a token that ends the second row early and another row never, or the others later."""
    texts = new_tokens(speculate(drafter, model, options, seed=seed))
    early = texts[1][: NEW // 2]
    return min(early, key=lambda token: sum(token in text for text in texts))


def speculate(drafter, model, options, rows=3, draft_length=3, seed=3, **further):
    return speculative_generate(
        model, drafter, *batch(rows), draft_length=draft_length, seed=seed,
        **{"max_new_tokens": NEW, **options, **further},
    )  # fmt: skip


def same(compiled, eager):
    assert compiled.sequences.tolist() == eager.sequences.tolist()
    assert compiled.row_counts == eager.row_counts


def both(drafter, options, model=None, **further):
    """Decode eagerly and compiled; return what is the same of them."""
    model = model or target()
    eager, compiled = (speculate(drafter, model, options, compiled=how, **further) for how in (False, True))
    same(compiled, eager)
    return compiled


def kinds(made):
    """Return which forwards became programs."""
    return {key[0] for _, key in made}


@every_shape
def test_programs_write_the_eager_tokens(untraced, shape, name):
    drafter, options = SHAPES[shape](), TEMPERATURES[name]
    end = ending(drafter, target(), options)
    whole = both(drafter, options, eos_token_id=end)
    counts = [row.num_emitted_tokens for row in whole.row_counts]
    assert counts[1] < max(counts)  # a row ends before others
    assert 0 < whole.counts.num_accepted_tokens < whole.counts.num_draft_tokens
    same(speculate(drafter, target(), options, compiled=True, eos_token_id=end), whole)  # prompts by programs, too
    alone = both(drafter, options, rows=1)
    assert alone.counts.num_emitted_tokens == NEW
    made = kinds(untraced)
    of_shape = {
        "parallel": "BlockForward",
        "medusa": "HeadsForward",
        "hydra": "HeadsForward",
        "block": "BlockDraftForward",
    }
    assert {"BlockForward", of_shape.get(shape.split()[0], "ModelDraftForward")} <= made
    assert ("CompiledRule" in made) == (options is not GREEDY and "tree" not in shape)


def test_traced_programs_write_the_eager_tokens(traced):
    """Of models with a layer: what takes its time is tracing.

    Weights that were saved in half precision are kept in bfloat16, which holds all that they hold; everything else
    stays in float32. `test_families` traces a draft model.
    """
    model = tiny_llama(1, layers=1)
    for drafter in (
        EagleProposer(rounded(eagle(model))),
        MedusaProposer(medusa(model, hydra=True), TREE),
        BlockProposer(block(model, sliding_window=5, layer_types=KINDS[:1])),
    ):
        options = TEMPERATURES["T=0.7"]
        both(drafter, options, model, draft_length=2, eos_token_id=ending(drafter, model, options))
        both(drafter, options, model, rows=1, draft_length=2)
    of_shapes = {"ModelDraftForward", "HeadsForward", "BlockDraftForward"}
    assert kinds(traced) == {"BlockForward", "CompiledRule", *of_shapes}


@pytest.mark.parametrize("kind", ["draft", "eagle", "block"])
def test_a_shorter_last_draft_is_a_shorter_program(untraced, kind):
    """Beside copies of up to 4 tokens, which its cache then lacks together."""
    made = {
        "draft": lambda: DraftModelProposer(draft()),
        "eagle": lambda: EagleProposer(eagle_heads()),
        "block": lambda: BlockProposer(block(target())),
    }
    hybrid = HybridProposer([SuffixProposer(1), made[kind]()], Switch(1), last_length=2)
    prompts = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    fed = set()
    plain = autoregressive_generate(target(), prompts, max_new_tokens=48, **GREEDY)
    out = speculative_generate(
        target(), hybrid, prompts, draft_length=4, max_new_tokens=48, compiled=True,
        observer=lambda round: fed.add((round.source, round.counts.num_draft_tokens)), **GREEDY,
    )  # fmt: skip
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert {0, 1} == {source for source, _ in fed} and (0, 4) in fed and (1, 2) in fed
    drafted = {key[1] for _, key in untraced if "DraftForward" in key[0]}
    assert drafted <= {(-1, 0), (-1,)} and (-1, 0) in drafted


@pytest.mark.parametrize("options", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_chain_longer_than_a_program_is_several(untraced, monkeypatch, options, steps):
    monkeypatch.setattr(draft_model, "MOST_LAYERS", 2 * steps)  # of two layers
    drafter = SHAPES["chain"]()
    both(drafter, options, draft_length=5, eos_token_id=ending(drafter, target(), options))
    both(drafter, options, draft_length=5, rows=1)
    shapes = {len(key[1]) for _, key in untraced if key[0] == "ModelDraftForward"}
    assert shapes == {1, steps}


def test_a_tree_deeper_than_a_program_is_drafted_by_forwards(untraced, monkeypatch):
    monkeypatch.setattr(draft_model, "MOST_LAYERS", 2)
    for options in TEMPERATURES.values():
        both(SHAPES["tree"](), options)
    assert "ModelDraftForward" not in kinds(untraced)


def test_distributions_of_another_precision_are_judged_by_another_program(untraced):
    """A program reads its inputs as what it was compiled for, whatever they are."""
    for drafter in (DraftModelProposer(draft()), BlindProposer(), DraftModelProposer(copy.deepcopy(draft()).double())):
        both(drafter, PLAIN)
    judged = [key for _, key in untraced if key[0] == "CompiledRule"]
    assert len(judged) == len(set(judged)) == 2  # q is float32 or float64


@pytest.mark.parametrize("options", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.usefixtures("untraced")
def test_plain_decoding_by_programs_writes_the_eager_tokens(options):
    """Fewer rows than prompts, so that a prompt takes the row of a text that has ended."""
    ids, mask = batch()
    for rows, prompts in ((3, (ids, mask)), (2, (ids, mask)), (1, batch(1))):
        first = autoregressive_generate(target(), *prompts, seed=3, max_new_tokens=NEW, **options).sequences
        settings = {"seed": 3, "max_new_tokens": NEW, "rows": rows, "eos_token_id": int(first[0, -NEW + 4]), **options}
        eager, compiled = (
            autoregressive_generate(target(), *prompts, compiled=how, **settings) for how in (False, True)
        )
        same(compiled, eager)


@pytest.mark.parametrize(("shape", "name"), [*rotated(SHAPES, ["T=0", "T=1"]), ("chain", "T=1"), ("tree", "T=0")])
@pytest.mark.usefixtures("untraced")
def test_drafts_of_changing_lengths_are_the_eager_ones(shape, name):
    options = TEMPERATURES[name]
    options = options | {"eos_token_id": ending(SHAPES[shape](), target(), options), "max_new_tokens": 2 * NEW}
    eager, compiled = (
        speculate(wavering(SHAPES[shape](), [0, 1, 3, 0, 0, 2, 3, 3]), target(), options, compiled=how)
        for how in (False, True)
    )
    same(compiled, eager)


# Numbers that are none


def broken_after(model, token):
    """Return a copy of a model whose logits are not numbers after a token; all else of it stays as it is."""

    class Broken(type(model)):
        @wraps(type(model).forward)
        def forward(self, input_ids, **inputs):
            output = super().forward(input_ids=input_ids, **inputs)
            spoilt = (input_ids == token)[:, -output.logits.shape[1] :, None]
            output.logits = output.logits.masked_fill(spoilt, float("nan"))
            return output

    copied = Broken(model.config).eval().requires_grad_(False)
    copied.load_state_dict(model.state_dict())
    return copied


def error_of(call, **options):
    with pytest.raises(
        InputError, match=r"^target: expected finite logits, found NaN after \d+ tokens of row \d$"
    ) as e:
        call(**options)
    return str(e.value)


@pytest.mark.parametrize(
    ("shape", "rows"), [(shape, 3) for shape in ("plain", *SHAPES)] + [("plain", 1), ("chain", 1), ("hydra tree", 1)]
)
@pytest.mark.parametrize("options", [GREEDY, PLAIN], ids=["T=0", "T=1"])
@pytest.mark.usefixtures("untraced")
@pytest.mark.filterwarnings("ignore:proposer. q is not a number")
def test_logits_that_are_no_numbers_raise_the_same_error(shape, options, rows):
    settings = {"max_new_tokens": NEW, "seed": 3, **options}
    if shape == "plain":
        text = autoregressive_generate(target(), *batch(rows), **settings).sequences
    else:
        text = speculative_generate(target(), SHAPES[shape](), *batch(rows), draft_length=3, **settings).sequences
    broken = broken_after(target(), int(text[0, max(LENGTHS[:rows]) + 4]))

    def decode(compiled):
        if shape == "plain":
            autoregressive_generate(broken, *batch(rows), compiled=compiled, **settings)
        else:
            speculate(SHAPES[shape](), broken, options, rows=rows, compiled=compiled)

    assert error_of(decode, compiled=True) == error_of(decode, compiled=False)


@pytest.mark.parametrize(
    ("shape", "name"), [("chain", "T=1"), ("tree", "T=0"), ("eagle chain", "T=1"), ("block tree", "T=1")]
)
@pytest.mark.usefixtures("untraced")
@pytest.mark.filterwarnings("ignore:proposer. q is not a number")
def test_a_drafter_without_numbers_leaves_plain_decodings_text(shape, name):
    options = TEMPERATURES[name]
    drafter = copy.deepcopy(SHAPES[shape]())
    for weight in (drafter.heads if hasattr(drafter, "heads") else drafter.draft_model.lm_head).parameters():
        weight.data.fill_(float("nan"))
    out = speculate(drafter, target(), options, compiled=True)
    assert out.counts.num_draft_tokens > 0
    if options is GREEDY:
        plain = autoregressive_generate(target(), *batch(), max_new_tokens=NEW, do_sample=False).sequences
        assert out.sequences.tolist() == plain.tolist()
    else:
        assert out.counts.num_accepted_tokens == 0


# What programs leave to eager code


LEFT = {
    "top-k": {**PLAIN, "top_k": 5, "temperature": 0.7},
    "top-p": {**PLAIN, "top_p": 0.8},
    "repetition penalty": {**PLAIN, "repetition_penalty": 1.3},
    "repetition penalty, T=0": {"do_sample": False, "repetition_penalty": 1.3},
    "suppressed, T=0": {"do_sample": False, "suppress_tokens": list(range(0, 97, 3))},
    "at least, T=0": {"do_sample": False, "min_new_tokens": 6},
    "typical": {**PLAIN, "rule": Typical()},
    "threshold, T=0": {"do_sample": False, "rule": Threshold(0.05)},
    "cascade": {**PLAIN, "rule": Cascade(0.2)},
}


@pytest.mark.parametrize(("shape", "name"), [*rotated(SHAPES, LEFT), ("medusa chain", "top-k")])
def test_other_processors_and_rules_write_the_eager_tokens(untraced, shape, name):
    both(SHAPES[shape](), LEFT[name], eos_token_id=3)
    assert kinds(untraced) == {"BlockForward"}
