"""Native MTP layers: chains have the library's logits, layer by layer and by `use_mtp`; replay for every γ."""

import pytest
import torch
from families import tiny_model
from native_layers import deepseek_names, qwen_names, save_with_mtp
from specimens import mtp
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator

from draftsmith.decode import autoregressive_generate, replay_acceptance, speculative_generate
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.native import promise
from draftsmith.medusa.mtp.proposer import MtpProposer

VOCAB, PROMPT, NEW = 5, 6, 24
NAMES = {"qwen": qwen_names, "deepseek": deepseek_names(2)}
# The family, its number of MTP layers, how their tensors are named, and the field that counts them.
TARGETS = {
    "dense": ("llama", 1, "qwen", "num_mtp_layers"),
    "several layers with a window": ("qwen2-window", 3, "deepseek", "num_nextn_predict_layers"),
    "experts": ("deepseek-v3", 1, "deepseek", "num_nextn_predict_layers"),
    "several layers of experts": ("deepseek-v3", 2, "deepseek", "num_nextn_predict_layers"),
    "sinks and windows": ("gpt-oss", 1, "qwen", "num_mtp_layers"),
    "states": ("qwen3-5", 1, "qwen", "mtp_num_hidden_layers"),
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    """A target that was saved with MTP layers and loaded again, and its layers from these files."""
    family, layers, names, field = TARGETS[request.param]
    model, path = tiny_model(family, vocab_size=VOCAB, initializer_range=0.15), tmp_path_factory.mktemp("target")
    save_with_mtp(model, mtp(model, layers), NAMES[names], path, **{field: layers})
    loaded = AutoModelForCausalLM.from_pretrained(path).eval().requires_grad_(False)
    loaded.generation_config.pad_token_id = 0
    return loaded, MtpHeads.native_to(loaded), mtp(model, layers)


def by_hand(target, heads, text, drafted):
    """Logits of a round's steps, (K, V), by the library's layers and cache; one layer takes its own output again."""
    native, ids = heads.native, text[None]
    states = target(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    cache, tokens = MtpCache(config=native.config), ids[:, 1:]
    positions, logits = torch.arange(1, len(text))[None], []
    for k, token in enumerate(drafted):
        layer = k if len(native.layers) > 1 else 0
        states = native.forward_layer(layer, states, positions, cache, input_ids=tokens)
        logits.append(native._project_to_logits(states[0, -1]))
        if len(native.layers) > 1:
            tokens, positions = torch.cat([tokens[:, 1:], token[None, None]], 1), positions + 1
        else:
            states, tokens, positions = states[:, -1:], token[None, None], positions[:, -1:] + 1
    return torch.stack(logits)


def at_once(target, heads, text, drafted):
    """The same logits from the steps of all rounds at once, which replay reads."""
    ids = torch.cat([text, drafted])[None]
    states = target(ids, output_hidden_states=True).hidden_states[-1]
    steps = heads.unroll(heads.embed(ids[:, 1:-1]), states[:, :-2], torch.arange(ids.shape[1] - 2)[None], len(drafted))
    return torch.stack([heads.head(step[0, len(text) - 2]) for step in steps])


def test_the_files_layers_are_read(target):
    _, heads, written = target
    assert heads.state_dict().keys() == written.state_dict().keys()
    assert all(torch.equal(part, written.state_dict()[name]) for name, part in heads.state_dict().items())


@pytest.mark.parametrize("rows", [1, 3])
def test_chains_have_the_logits_of_the_librarys_layers(target, monkeypatch, rows):
    model, heads, _ = target
    proposer, drafts = MtpProposer(heads), []
    propose = MtpProposer.propose

    def recorded(self, contexts, lengths):
        proposals = propose(self, contexts, lengths)
        drafts.extend(zip(contexts, proposals, strict=True))
        return proposals

    monkeypatch.setattr(MtpProposer, "propose", recorded)
    prompts = torch.randint(1, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    depth = proposer.longest or 4
    lengths = torch.tensor([0, 2, 1])[:rows, None]  # rows of different lengths
    out = speculative_generate(
        model, proposer, prompts, (torch.arange(PROMPT) >= lengths).long(), draft_length=depth, max_new_tokens=NEW,
        do_sample=True, top_k=0, seed=0,
    )  # fmt: skip
    assert sum(out.counts.num_accepted_tokens_per_pos[1:]) > 0
    drafted = [(context, proposal) for context, proposal in drafts if len(proposal.tokens)]
    assert len(drafted) > 4
    for context, proposal in drafted:
        logits = by_hand(model, heads, context, proposal.tokens)
        torch.testing.assert_close(proposal.probabilities, logits.softmax(-1), atol=1e-5, rtol=0)
        torch.testing.assert_close(at_once(model, heads, context, proposal.tokens), logits, atol=1e-5, rtol=1e-5)


def test_use_mtp_has_the_same_candidates(target, monkeypatch):
    model, heads, _ = target
    ids = torch.randint(1, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    layers, rounds, candidates = len(heads.layers), [], MTPCandidateGenerator.get_candidates
    own = model.config.get_text_config().num_hidden_layers
    patterns = [r"^mtp\.", *(rf"layers\.{own + k}\." for k in range(layers))]
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", patterns, raising=False)

    def recorded(self, input_ids, *args, **kwargs):
        found, logits = candidates(self, input_ids, *args, **kwargs)
        if logits is not None:
            rounds.append((input_ids[0], found[0, input_ids.shape[1] :], logits[0]))
        return found, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    with promise(model.config, layers):
        if model._is_stateful:
            with pytest.raises(ValueError, match="stateful"):
                model.generate(ids, use_mtp=True, do_sample=False, max_new_tokens=NEW)
            return
        text = model.generate(ids, use_mtp=True, do_sample=False, max_new_tokens=NEW)
    out = speculative_generate(model, MtpProposer(heads), ids, draft_length=layers, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out.sequences, text)
    assert out.counts.num_drafts == len(rounds) + 1 and len(rounds) > 4
    for context, drafted, logits in rounds:
        torch.testing.assert_close(at_once(model, heads, context, drafted), logits, atol=1e-5, rtol=1e-5)


def test_a_prompt_of_one_token_is_drafted_for(target):
    model, heads, _ = target
    options = {"max_new_tokens": 8, "do_sample": False}
    plain = autoregressive_generate(model, torch.tensor([[2]]), **options).sequences
    out = speculative_generate(
        model, MtpProposer(heads), torch.tensor([[2]]), draft_length=len(heads.layers), **options
    )
    assert torch.equal(out.sequences, plain) and out.counts.num_draft_tokens > 0


def test_replay_counts_what_the_decoder_counts_for_every_draft_length(target):
    model, heads, _ = target
    proposer = MtpProposer(heads)
    prompts = torch.randint(1, VOCAB, (3, PROMPT), generator=torch.Generator().manual_seed(1))
    plain = autoregressive_generate(model, prompts, max_new_tokens=NEW, do_sample=False).sequences
    lengths = (1, proposer.longest or 4)
    replayed = replay_acceptance(model, proposer, list(plain), [PROMPT] * 3, lengths, temperature=0, max_new_tokens=NEW)
    for k in lengths:
        out = speculative_generate(model, proposer, prompts, draft_length=k, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out.sequences, plain)
        for text, counts in zip(replayed.texts, out.row_counts, strict=True):
            for name, count in counts.to_dict().items():
                assert getattr(text.counts[k], name) == pytest.approx(count), (k, name)
