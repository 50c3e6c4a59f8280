"""The law of sampled output, exactly: V = 5, and every outcome of every random number is followed (`enumeration`).

What the decoder writes must have the probabilities that the target's conditionals multiply to. Models compute in double
precision, of which sums over some thousand products leave far more than twelve digits: nothing here is left to chance.

Each proposer decodes a prompt alone and
three of different lengths, verified together and by the eager reference. Where cuts leave few outcomes these are the
three rows of a run, elsewhere each prompt has many rows, which follow other outcomes.
"""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from enumeration import enumerated, target_law
from families import tiny_model
from misreporting import Misreporting, argmax_scored_with_q
from specimens import TREE, case_id, proposer, shapes
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decode import DraftModelProposer, RunAheadProposer, Tree, cache, speculative
from draftsmith.decode.cache.layers import IndexedLayer
from draftsmith.decode.cache.states import StateLayer
from draftsmith.decode.proposers import draft_tree, run_ahead
from draftsmith.decode.rules import acceptance, judged, verification
from draftsmith.decode.sampling import Sampler, draw_rows, uniforms

SCALES = {"wte": 30, "wpe": 10, "c_attn": 40, "c_proj": 20, "c_fc": 20, "lm_head": 16}
VOCAB = 5
CUT = "T=0.7 top-k top-p"
PROMPTS = [(4, 1, 0, 1), (3,), (1, 2, 3, 4, 0, 4)]
ROUNDING = 1e-12

# name → (arguments of generate, the library's processors, new tokens)
SETTINGS = {
    "T=1": ({"top_k": 0, "eos_token_id": 2}, [], 3),
    CUT: (
        {"temperature": 0.7, "top_k": 4, "top_p": 0.8},
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.8)],
        4,
    ),
    "penalties": (
        {"top_k": 0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3)],
        3,
    ),
}


def tiny_gpt2(seed: int, layers: int = 1, names: int = VOCAB) -> GPT2LMHeadModel:
    """A model in double precision throughout, neither flat nor sure, that names the first tokens alone."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=8, n_layer=layers, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(SCALES.get(name.split(".")[-2], 1) if weight.ndim > 1 else 1)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:names])
    model.generation_config.pad_token_id = 0
    return model.double().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def target():
    return tiny_gpt2(0, layers=2)


def laws(target, proposer, setting, prompts=PROMPTS, width=500, **options):
    """The laws of what is decoded and of the target, for each prompt, and the share of drafted tokens that stand."""
    arguments, processors, length = SETTINGS[setting]
    written = enumerated(target, proposer, prompts, length, width, **arguments, **options)
    eos = arguments.get("eos_token_id")
    wanted = [target_law(target, prompt, length, LogitsProcessorList(processors), eos) for prompt in prompts]
    return [law.texts() for law in written], wanted, [law.accepted() for law in written]


def difference(law, wanted) -> float:
    return max(abs(law.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*law, *wanted})


FORMS = ("one row", "batch", "batch by row")
SHAPES = [shape for shape in shapes() if shape[0] != "run_ahead"]  # which has no order: see below
CASES = [  # each shape in each setting and each form, and these two together
    (shape, setting, FORMS[(i + j) % 3]) for i, shape in enumerate(SHAPES) for j, setting in enumerate(SETTINGS)
]


@pytest.fixture(scope="module")
def llama():
    """A target that has features, in double precision."""
    model = tiny_llama(2, VOCAB, layers=3, hidden=8).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 if weight.ndim > 1 else 1)
    return model


class DoubleTorch:
    """Torch, without single precision."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_double(monkeypatch, *models):
    """The library's norms, recurrences and positions compute in single precision whatever they are given."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in {type(module).__module__ for model in models for module in model.modules()}:
        if name.startswith("transformers.models.") and hasattr(sys.modules[name], "torch"):
            monkeypatch.setattr(sys.modules[name], "torch", DoubleTorch())


@pytest.mark.parametrize(("shape", "setting", "form"), CASES, ids=case_id)
def test_every_text_has_the_targets_probability(llama, monkeypatch, shape, setting, form):
    compute_in_double(monkeypatch, llama)
    alone, cut = form == "one row", setting == CUT
    if shape[0] == "eagle":
        torch.manual_seed(3)  # its layer begins at random
    written, wanted, accepted = laws(
        llama, proposer(*shape, llama), setting, PROMPTS[: 1 if alone else None],
        width=1 if alone else 500, draft_length=1 if alone and not cut else 2, by_row=form == "batch by row",
    )  # fmt: skip
    for law, expected in zip(written, wanted, strict=True):
        assert difference(law, expected) < ROUNDING
    assert alone or any(0.02 < share < 0.98 for share in accepted), accepted  # drafts fail and stand


class Unwarped(DraftModelProposer):
    """Not a mistake: any q is lossless as long as it is what was drawn from."""

    def start(self, task):
        return super().start(replace(task, sampler=Sampler(LogitsProcessorList(), do_sample=True)))


def test_another_warping_of_the_draft_leaves_the_law(target):
    written, wanted, _ = laws(target, Unwarped(tiny_gpt2(1)), CUT)
    for law, expected in zip(written, wanted, strict=True):
        assert difference(law, expected) < ROUNDING


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_draft_that_runs_ahead_leaves_the_law(target, monkeypatch, setting):
    """What it drafts ahead is drafted before the target verifies, for an order of two threads has no enumeration."""
    monkeypatch.setattr(run_ahead._AheadThread, "start", lambda ahead: ahead.run())
    monkeypatch.setattr(run_ahead._AheadThread, "join", lambda ahead: None)
    proposer = RunAheadProposer(tiny_gpt2(4))

    def ahead(path, token):
        """What was drafted ahead, where it is handed over."""
        drafted = [int(part.tokens) for part in proposer._ahead._parts] if proposer._ahead and path else []
        return tuple(drafted) if drafted[:1] == [token] else None

    arguments, processors, _ = SETTINGS[setting]
    if setting != CUT:  # five tokens would be followed for the draft, the guess, and what is behind it
        arguments, processors = arguments | {"top_k": 3}, [*processors, TopKLogitsWarper(3)]
    (law,) = enumerated(target, proposer, PROMPTS[2:], 4, draft_length=1, hidden=ahead, **arguments)
    wanted = target_law(target, PROMPTS[2], 4, LogitsProcessorList(processors), arguments.get("eos_token_id"))
    assert difference(law.texts(), wanted) < ROUNDING
    assert 0 < proposer.num_used < proposer.num_ahead


# Recurrent and convolution states, and an index that selects two tokens of a text, in small chunks and without experts,
# whose product has no double precision.
STATES = {
    "qwen3-5": {},
    "mamba2": {"chunk_size": 4},
    "lfm2": {},
    "deepseek-v32": {"index_topk": 2, "first_k_dense_replace": 2},
}


def with_states(name):
    return tiny_model(name, vocab_size=VOCAB, **STATES[name]).double()


def draft_with_states(name):
    """A draft of the target's family that is off in each of its weights."""
    draft = with_states(name)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * (0.5 * weight.std() if weight.ndim > 1 else 0))
    return draft


def small_llama(name):
    return tiny_llama(1, VOCAB, layers=1, hidden=8).double()


def laws_with_states(monkeypatch, name, draft, form):
    target, draft = with_states(name), draft(name)
    compute_in_double(monkeypatch, target, draft)
    alone = form == "one row"
    return laws(
        target, DraftModelProposer(draft), "T=1", PROMPTS[: 1 if alone else None], width=1 if alone else 500,
        draft_length=1 if alone else 2, by_row=form == "batch by row",
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draft", [draft_with_states, small_llama])
@pytest.mark.parametrize("name", STATES)
def test_targets_and_drafts_with_states_leave_the_law(monkeypatch, name, draft, form):
    written, wanted, accepted = laws_with_states(monkeypatch, name, draft, form)
    for law, expected in zip(written, wanted, strict=True):
        assert difference(law, expected) < ROUNDING
    assert any(0.02 < share < 0.98 for share in accepted), accepted


# A row keeps the states after its rejected tokens, or an index reads each key one slot late.
FORGOTTEN = {
    StateLayer: ("_index", lambda layer, row, place: len(layer._ends) - 1 if place else -1),
    IndexedLayer: (
        "update_indexer",
        lambda layer, keys, write=IndexedLayer.update_indexer: write(layer, keys).roll(1, 1),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_rollback_that_forgets_a_state_is_seen(monkeypatch, name):
    layer = IndexedLayer if name == "deepseek-v32" else StateLayer
    monkeypatch.setattr(layer, *FORGOTTEN[layer])
    written, wanted, _ = laws_with_states(monkeypatch, name, small_llama, "batch")
    assert max(difference(*pair) for pair in zip(written, wanted, strict=True)) > 1e-2


def after_token_1(draft):
    """A model whose logits are not numbers after a token."""

    def spoil(module, args, inputs, output):
        output.logits[inputs["input_ids"][:, -output.logits.shape[1] :] == 1] = torch.nan

    draft.register_forward_hook(spoil, with_kwargs=True)
    return draft


def nowhere(draft):
    draft.lm_head.weight.fill_(torch.nan)
    return draft


NAN = {
    "after a token": lambda: DraftModelProposer(after_token_1(tiny_gpt2(1, names=3))),
    "in a tree": lambda: DraftModelProposer(after_token_1(tiny_gpt2(1, names=3)), tree=TREE),
    "everywhere": lambda: DraftModelProposer(nowhere(tiny_gpt2(1))),
}


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("where", NAN)
@pytest.mark.filterwarnings("ignore:proposer. q is not a number")
def test_a_draft_that_is_not_a_number_leaves_the_law(target, where, by_row):
    written, wanted, _ = laws(target, NAN[where](), "T=1", by_row=by_row)
    for law, expected in zip(written, wanted, strict=True):
        assert difference(law, expected) < ROUNDING


# Mistakes


def flattened(proposer, context, draft):
    flat = draft.probabilities.pow(0.8)
    return {"probabilities": flat / flat.sum(-1, keepdim=True)}


def chains_with(**changed):
    """The rule for chains, with some of its arguments changed."""
    rule = acceptance.accept_exact_chains

    def mistaken(p, q, drafted, r, u):
        arguments = {"p": p, "q": q, "drafted": drafted, "r": r, "u": u}
        if q is None:  # nothing was drafted
            return rule(p, q, drafted, r, u)
        return rule(*(arguments | {name: change(**arguments) for name, change in changed.items()}).values())

    return {(judged, "accept_exact_chains"): mistaken}


def siblings_with(mistake):
    """The rule for siblings, step by step, with a mistake in one of them."""

    def accept(p_M, q_M, places, r):
        rest, left = p_M.astype(float), q_M.copy()
        outside = max(0.0, 1.0 - rest.sum())
        for i, place in enumerate(places):
            q = left / left.sum() if left.sum() > 0 else left
            mass = outside + rest.sum()
            if mistake == "<=" and q[place] > 0 and rest[place] == 0:
                return i, rest  # r = 0 is not below 0
            if q[place] > 0 and r[i] * q[place] < rest[place] / mass:
                return i, rest
            if mistake != "one residual for all" or i == 0:
                rest = (rest - (q_M if mistake == "the first sibling's q for all" else q) * mass).clip(min=0.0)
            left[place] = 0.0
        return None, p_M if mistake == "the last token from p" else rest

    return {(verification, "accept_siblings"): accept}


def one_number(generators, counts, dtype, device):
    u = uniforms(generators, counts, dtype, device)
    return u[:, :1].expand_as(u).where(u < 1, 1.0)


def siblings(target):
    return DraftModelProposer(tiny_gpt2(1, names=3), tree=Tree((-1,) * 3))


def chain(target):
    return DraftModelProposer(tiny_gpt2(1))


def tree(target):
    return DraftModelProposer(tiny_gpt2(1, names=3), tree=TREE)


MISTAKES = {
    "q at another temperature": ("T=1", lambda t: Misreporting(tiny_gpt2(1), flattened), {}),
    "argmax drafts scored with q": ("T=1", lambda t: Misreporting(tiny_gpt2(1), argmax_scored_with_q), {}),
    "r ≤ p/q": (CUT, chain, chains_with(r=lambda r, **_: r - 1e-300)),
    "r < p": ("T=1", chain, chains_with(r=lambda r, q, drafted, **_: r / q.gather(-1, drafted[..., None])[..., 0])),
    "the bonus from the place before": ("T=1", chain, chains_with(p=lambda p, **_: p[:, [*range(p.shape[1] - 1), -2]])),
    "not a number is taken for a draw": (
        "T=1", lambda t: NAN["after a token"](), chains_with(q=lambda q, **_: q.nan_to_num(1 / VOCAB)),
    ),
    "no residual": ("T=1", chain, {(acceptance, "residual_rows"): lambda p, q: p}),
    "residual by softmax": ("T=1", chain, {(acceptance, "residual_rows"): lambda p, q: (p - q).softmax(-1)}),
    "one number for all of a draft": ("T=1", chain, {(verification, "uniforms"): one_number}),
    "a bonus by argmax": ("T=1", chain, {(acceptance, "draw_rows"): lambda p, u: p.argmax(-1)}),
    "cumulative sums in half precision": (
        "T=1", chain, {(acceptance, "draw_rows"): lambda p, u: draw_rows(p.half(), u)},
    ),
    "no path in the penalties": (
        "penalties", chain, {(speculative, "Contexts"): lambda text, draft: [text] * (len(draft.tokens) + 1)},
    ),
    "the likeliest siblings scored with q": (
        "T=1", siblings, {(draft_tree, "draw_siblings"): lambda q, u, count: q.expand(u.shape).topk(count).indices},
    ),
    "siblings drawn by u · q": (
        "T=1", siblings, {(draft_tree, "draw_siblings"): lambda q, u, count: (q * u).topk(count).indices},
    ),
    "paths that stay where they were": (
        "T=1", tree, {(cache.CachedModel, "keep_paths"): lambda *arguments: None},
    ),
    **{
        mistake: (CUT if mistake == "<=" else "T=1", siblings, siblings_with(mistake))
        for mistake in ("<=", "one residual for all", "the first sibling's q for all", "the last token from p")
    },
}  # fmt: skip
# What is seen where a number is used, before there is a law.
NOTICED = {"one number for all of a draft": "decides twice", "cumulative sums in half precision": "draw two tokens"}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:proposer. q is not a number")
def test_a_mistake_is_seen(target, monkeypatch, name):
    setting, proposer, patches = MISTAKES[name]
    for (module, attribute), mistake in patches.items():
        monkeypatch.setattr(module, attribute, mistake)
    if name in NOTICED:
        with pytest.raises(AssertionError, match=NOTICED[name]):
            laws(target, proposer(target), setting)
        return
    written, wanted, _ = laws(target, proposer(target), setting)
    assert max(difference(*pair) for pair in zip(written, wanted, strict=True)) > 1e-3


def test_the_rules_that_mistakes_are_planted_in_are_right_without_them(target, monkeypatch):
    for patches in (siblings_with(None), chains_with()):
        for (module, attribute), rule in patches.items():
            monkeypatch.setattr(module, attribute, rule)
    for make in (siblings, chain):
        written, wanted, _ = laws(target, make(target), "T=1")
        assert max(difference(*pair) for pair in zip(written, wanted, strict=True)) < ROUNDING
