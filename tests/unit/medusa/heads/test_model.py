"""Heads on hand-made hidden states: their formulas, their files, and what is refused."""

import gc
import json
import weakref

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import CohereConfig, CohereForCausalLM

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree
from draftsmith.medusa import MedusaConfig, MedusaHeads
from draftsmith.train.losses.output_head import last_hidden, open_forward

HIDDEN, VOCAB, K = 8, 13, 3
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def randomised(heads: MedusaHeads, seed: int = 0) -> MedusaHeads:
    """The heads with blocks that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return heads.eval().requires_grad_(False)


def small(**options) -> MedusaHeads:
    return randomised(MedusaHeads(MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=K, **options)))


def hidden_states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(3))


def test_the_states_of_heads_are_released_with_the_loss():
    """A closure that calls itself would hold them until the next run of Python's collector."""
    heads, states = small(), [hidden_states(4) for _ in range(K)]
    open_forward(*heads.all_lm_heads)
    alive = [weakref.ref(state) for state in states]
    gc.disable()
    try:
        heads.inside_lm_heads(states, lambda states: torch.stack(states).sum())
        del states
        assert [reference() for reference in alive] == [None] * K
    finally:
        gc.enable()


def scaled_cohere():
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, logit_scale=0.3
    )
    return CohereForCausalLM(config).eval()


TARGETS = {
    "own head": lambda: tiny_llama(0),
    "tied head": lambda: tiny_model("gpt2"),
    "head with a bias": lambda: with_bias(tiny_model("phi")),
    "soft cap": lambda: tiny_model("gemma2"),
    "logit scale": scaled_cohere,
}


def with_bias(model):
    """A bias that says something; it begins as zero."""
    model.get_output_embeddings().bias.copy_(torch.randn(64, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"original_lm_head": True}, {"hydra": True, "num_hidden_layers": 2, "medusa_fc_bias": True}],
    ids=str,
)
@pytest.mark.parametrize("name", TARGETS)
def test_untrained_heads_are_the_targets_own(name, options):
    target = TARGETS[name]()
    heads = MedusaHeads.of_target(target, K, **options)
    with torch.no_grad():
        hidden = last_hidden(target, input_ids=IDS)
        embeddings = target.get_input_embeddings()(IDS[:, :K]).expand(1, IDS.shape[1], K, -1)
        expected = target(IDS).logits
        logits = heads(hidden, embeddings)
    assert logits.shape == (1, IDS.shape[1], K, expected.shape[-1])
    torch.testing.assert_close(logits, expected[:, :, None].expand_as(logits), atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.01
    # Copies: training the heads leaves the target as it is.
    before = target.get_output_embeddings().weight.clone()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(1.0)
    assert torch.equal(target.get_output_embeddings().weight, before)


def test_own_heads_are_separate_and_a_shared_one_is_one():
    target = tiny_llama(0)
    own, shared = (MedusaHeads.of_target(target, K, original_lm_head=shared) for shared in (False, True))
    assert len({head.weight.data_ptr() for head in own.all_lm_heads}) == len(own.all_lm_heads) == K
    assert len(shared.all_lm_heads) == 1
    assert all(shared.lm_head_of(i) is shared.lm_head for i in range(K))
    size, vocab = target.config.hidden_size, target.config.vocab_size
    assert own.num_parameters() == K * (size * size + vocab * size)
    assert shared.num_parameters() == K * size * size + vocab * size
    blocks = own.blocks  # trap 18: one block n times
    assert len({block.layers[0].weight.data_ptr() for block in blocks}) == K


@pytest.mark.parametrize(
    "options",
    [
        {"num_hidden_layers": 2, "logit_scale": 0.5},
        {"num_hidden_layers": 2, "medusa_fc_bias": True, "original_lm_head": True},
        {"final_logit_softcapping": 2.0, "lm_head_bias": True},
    ],
    ids=str,
)
def test_medusa_is_its_formula(options):
    """Medusa, section 2.1: softmax(W2 · (SiLU(W1 · h) + h)), block after block; with a scale, a soft cap and biases."""
    heads = small(**options)
    tensors, hidden, cap = heads.state_dict(), hidden_states(5), options.get("final_logit_softcapping")
    for i in range(K):
        x = hidden
        for layer in range(heads.config.num_hidden_layers):
            name = f"blocks.{i}.layers.{layer}"
            x = x + silu(x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0))
        own = "lm_head" if "lm_head.weight" in tensors else f"lm_heads.{i}"
        logits = options.get("logit_scale", 1) * (x @ tensors[f"{own}.weight"].T + tensors.get(f"{own}.bias", 0))
        assert cap is None or logits.abs().max() > cap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        torch.testing.assert_close(heads.logits(i, hidden), logits)
        torch.testing.assert_close(heads(hidden)[:, i], logits)


def test_hydra_is_its_formula():
    """Hydra, section 3: the first map sees h and the embeddings of the tokens between, in their order."""
    heads = small(num_hidden_layers=2, hydra=True)
    tensors, hidden = heads.state_dict(), hidden_states(5)
    embeddings = hidden_states(5, K) * 2
    for i in range(K):
        weight = tensors[f"blocks.{i}.layers.0.weight"]
        assert weight.shape == (HIDDEN, (2 + i) * HIDDEN)
        parts = [hidden, *(embeddings[:, j] for j in range(i + 1))]
        wide = sum(part @ weight[:, HIDDEN * j : HIDDEN * (j + 1)].T for j, part in enumerate(parts))
        x = hidden + silu(wide)
        x = x + silu(x @ tensors[f"blocks.{i}.layers.1.weight"].T)
        torch.testing.assert_close(heads.logits(i, hidden, embeddings), x @ tensors[f"lm_heads.{i}.weight"].T)
        # Exactly the tokens between are looked at: what comes after is not.
        assert torch.equal(heads.logits(i, hidden, embeddings[:, : i + 1]), heads.logits(i, hidden, embeddings))
        swapped = embeddings.clone()
        swapped[:, i] += 1.0
        assert not torch.allclose(heads.logits(i, hidden, swapped), heads.logits(i, hidden, embeddings))
    with pytest.raises(InputError, match="embeddings: expected those of the tokens before"):
        heads.logits(0, hidden)


def test_a_truncated_vocabulary_is_minus_infinity_elsewhere():
    target, kept = tiny_llama(0), torch.tensor([90, 3, 5, 41])
    heads = MedusaHeads.of_target(target, K, token_map=kept)
    hidden = last_hidden(target, input_ids=IDS)
    logits, expected = heads(hidden), target(IDS).logits[:, :, None].expand(-1, -1, K, -1)
    torch.testing.assert_close(logits[..., kept], expected[..., kept], atol=1e-5, rtol=1e-5)
    others = torch.ones(97, dtype=torch.bool)
    others[kept] = False
    assert (logits[..., others] == float("-inf")).all()
    assert heads.config.truncated_vocab_size == 4 and heads.lm_heads[0].weight.shape == (4, 32)
    # All tokens in another order are all tokens.
    whole = MedusaHeads.of_target(target, K, token_map=torch.arange(97).flip(0))
    assert torch.equal(whole(hidden), MedusaHeads.of_target(target, K)(hidden))


VARIANTS = {
    "medusa": {},
    "shared head": {"original_lm_head": True},
    "biases": {"medusa_fc_bias": True, "lm_head_bias": True, "num_hidden_layers": 2},
    "hydra": {"hydra": True, "medusa_choices": [[0], [1], [0, 0]]},
    "scaled and capped": {"logit_scale": 0.5, "final_logit_softcapping": 3.0},
    "truncated": {"truncated_vocab_size": 5},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_saved_heads_load_as_they_were(tmp_path, name):
    heads = small(**VARIANTS[name])
    if heads.token_map is not None:
        heads.token_map.copy_(torch.tensor([12, 0, 7, 3, 4]))
    heads.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(heads.state_dict())
    loaded = MedusaHeads.from_pretrained(tmp_path)
    assert not loaded.training and loaded.dtype == torch.float32
    hidden, embeddings = hidden_states(5), hidden_states(5, K)
    assert torch.equal(loaded(hidden, embeddings), heads(hidden, embeddings))
    assert loaded.config.to_diff_dict() == MedusaConfig.from_pretrained(tmp_path).to_diff_dict()
    choices = heads.config.medusa_choices
    assert loaded.tree == (Tree.chain(K) if choices is None else Tree.from_choices(choices))
    config = json.loads((tmp_path / "config.json").read_text())
    # What vLLM reads; keys that hold "num" and "heads" beside "num_heads" would be renamed there.
    for key in ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers", "truncated_vocab_size"):
        assert type(config[key]) is int
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["num_hidden_layers"]


def of_config(**fields):
    return MedusaHeads(MedusaConfig(**{"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": K, **fields}))


def of_target(num_heads=K, **options):
    return MedusaHeads.of_target(tiny_llama(0), num_heads, **options)


REFUSED = [
    *(("num_heads", of_config, {"num_heads": count}) for count in (0, "four", 10**9)),
    ("num_hidden_layers", of_config, {"num_hidden_layers": 0}),
    ("logit_scale", of_config, {"logit_scale": float("nan")}),
    ("truncated_vocab_size", of_config, {"truncated_vocab_size": 14}),
    *(("tree", of_config, {"medusa_choices": paths}) for paths in ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], [], [[1]])),
    *(("token_map", of_target, {"token_map": torch.tensor(ids)}) for ids in ([1, 2, 2], [1, 97], [-1, 3], [1] * 97)),
    ("num_heads", of_target, {"num_heads": 0}),
    ("medusa: .*hidden_size", lambda: of_target().check_fits(tiny_llama(0, hidden=64)), {}),
    ("medusa: .*vocab_size", lambda: of_target().check_fits(tiny_llama(0, 98)), {}),
]


@pytest.mark.parametrize(("field", "make", "options"), REFUSED)
def test_heads_that_cannot_be_are_refused_by_their_field(field, make, options):
    with pytest.raises(InputError, match=f"^{field}"):
        make(**options)


FIRST = "lm_heads.0.weight"
DAMAGES = {
    "missing": ({"blocks.1.layers.0.weight": None}, {}, "1 missing: blocks.1.layers.0.weight"),
    "no token map": ({"token_map": None}, {}, "1 missing: token_map"),
    "unexpected": ({"blocks.0.layers.0.bias": torch.zeros(HIDDEN)}, {}, "1 not expected: blocks.0.layers.0.bias"),
    "more heads": ({}, {"num_heads": 4}, "2 missing: blocks.3.layers.0.weight, lm_heads.3.weight"),
    "another shape": ({FIRST: torch.zeros(5, HIDDEN + 1)}, {}, FIRST),
    "doubles in the token map": ({"token_map": torch.tensor([1, 2, 2, 3, 4])}, {}, "token_map"),
    "a token map beyond the vocabulary": ({"token_map": torch.tensor([1, 2, VOCAB, 3, 4])}, {}, "token_map"),
    "a token map of floats": ({"token_map": torch.arange(5.0)}, {}, "token_map of Medusa heads in int64"),
    "integers": ({FIRST: torch.ones(5, HIDDEN, dtype=torch.int8)}, {}, f"{FIRST} of Medusa heads in floating point"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_heads_are_refused_in_one_line(tmp_path, name):
    """Files that are missing, cut or no JSON are those of `tests/integration/test_saved_kinds.py`."""
    changed, fields, message = DAMAGES[name]
    small(truncated_vocab_size=5).save_pretrained(tmp_path)
    MedusaHeads.from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(InputError) as error:
        MedusaHeads.from_pretrained(tmp_path)
    text = str(error.value)
    assert message in text and str(tmp_path) in text and "\n" not in text, text
