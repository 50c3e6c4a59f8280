"""What `generate` may be asked for beside tokens: served as the library serves it, or refused by name."""

from collections import Counter

import pytest
import torch
from conftest import perturbed, tiny_llama
from families import tiny_model
from gemma import seeing_gemma, tiny_gemma
from specimens import block, case_id, eagle, parallel
from specimens import proposer as specimen_of
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessor,
    LogitsProcessorList,
    MoshiConfig,
    MoshiForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)
from transformers.generation import logits_process as library
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from draftsmith.decode import (
    DraftModelProposer,
    InputError,
    ParallelDraftProposer,
    Tree,
    autoregressive_generate,
    early_exit,
    replay_acceptance,
    speculative_decode,
    speculative_generate,
)
from draftsmith.decode.cache import CachedModel, check_rollback
from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer
from draftsmith.medusa import BlockProposer, EagleProposer
from draftsmith.medusa.mtp.native import make_layers

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def draft(target):
    return perturbed(target, 0.05)


def prompt(rows: int = 1, length: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def decode(target, draft, ids, **options):
    return speculative_generate(target, DraftModelProposer(draft), ids, **(GREEDY | options))


def refusal(target, draft, ids, **options) -> str:
    with pytest.raises(InputError) as speculative:
        decode(target, draft, ids, **options)
    with pytest.raises(InputError) as plain:
        autoregressive_generate(target, ids, **(GREEDY | options))
    assert str(speculative.value) == str(plain.value)
    return str(plain.value)


@pytest.mark.parametrize("rule", ["exact", "typical", "cascade"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_target_that_is_not_a_number_is_refused_where_it_happens(draft, do_sample, rule):
    broken = tiny_llama(0)
    ids = prompt(1)
    plain = autoregressive_generate(broken, ids, do_sample=False, max_new_tokens=8).sequences
    broken.model.embed_tokens.weight[int(plain[0, 8])] = float("nan")
    place = plain[0].tolist().index(int(plain[0, 8])) + 1
    if do_sample:
        broken.model.embed_tokens.weight[:] = float("nan")
        place = 6
    where = place if rule == "exact" or do_sample else r"\d+"  # lossy texts are others
    with pytest.raises(InputError, match=rf"target: expected finite logits, found NaN after {where} tokens of row 0"):
        decode(broken, draft, ids, do_sample=do_sample, rule=rule)
    with pytest.raises(InputError, match=rf"target: expected finite logits, found NaN after {place} tokens of row 0"):
        autoregressive_generate(broken, ids, do_sample=do_sample, max_new_tokens=8)
    broken.model.embed_tokens.weight[:] = float("nan")
    tree = Tree.from_choices([(0,), (1,)])
    for rows, shape, penalty in ((1, None, 1.5), (2, None, 1.0), (2, tree, 1.0)):  # each is judged in its own way
        options = {"do_sample": do_sample, "rule": rule, "repetition_penalty": penalty}
        with pytest.raises(InputError, match="found NaN after 6 tokens of row 0"):
            speculative_generate(broken, DraftModelProposer(draft, shape), prompt(rows), **(GREEDY | options))


def test_the_multimodal_class_writes_what_the_library_writes():
    """`generate` hands it an empty dict in place of images."""
    text = tiny_gemma()
    model = seeing_gemma(text)
    batch = {"input_ids": torch.tensor([[0, 0, 0, 9, 50, 90], [9, 50, 90, 70, 50, 90]])}
    batch["attention_mask"] = (batch["input_ids"] > 0).long()
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = text.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options), expected)
    out = speculative_generate(model, PromptLookupProposer(), **batch, draft_length=3, **options)
    assert torch.equal(out.sequences, expected) and out.counts.num_draft_tokens > 0
    assert torch.equal(autoregressive_generate(model, **batch, **options).sequences, expected)


def test_inputs_that_would_not_be_fed_are_refused(target, draft):
    ids = prompt()
    config = LlavaConfig(
        text_config=target.config.to_dict() | {"model_type": "llama"},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 8, "num_hidden_layers": 1,
                       "num_attention_heads": 1, "intermediate_size": 8, "image_size": 4, "patch_size": 2},
        image_token_index=96,
    )  # fmt: skip
    llava = LlavaForConditionalGeneration(config).eval()
    llava.generation_config.pad_token_id = 0
    # What the library has made of the image.
    assert refusal(llava, draft, ids, pixel_values=torch.zeros(1, 3, 4, 4)) == (
        "inputs: expected input_ids and attention_mask alone, found mm_encoder_outputs"
    )
    assert refusal(target, draft, ids, position_ids=torch.arange(3, 9)[None]) == (
        "position_ids: expected each token's place in the text, found others in row 0"
    )
    full = target(ids, use_cache=True).past_key_values
    assert "past_key_values: expected an empty cache, found 6 tokens" in refusal(
        target, draft, torch.cat([ids, ids], 1), past_key_values=full
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 3), ("prompt_lookup_num_tokens", 3), ("output_scores", True), ("assistant_model", tiny_llama(1))],
)
def test_options_that_are_not_served_are_refused(target, draft, name, value):
    assert refusal(target, draft, prompt(), **{name: value}).startswith(f"{name}: expected it to be left out")
    if name == "num_beams":  # by the library's own door, too
        own = {"custom_generate": speculative_decode, "proposer": DraftModelProposer(draft), name: value}
        with pytest.raises(InputError, match="num_beams: expected it to be left out"):
            target.generate(prompt(), **own, **GREEDY)


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ([1, 1, 1, 1, 0, 0], "a zero after a one"),
        ([0, 1, 1, 0, 1, 1], "a zero after a one"),
        ([0] * 6, "a row of zeros"),
    ],
)
def test_a_mask_that_is_not_left_padding_is_refused(target, draft, mask, found):
    message = refusal(target, draft, prompt(2), attention_mask=torch.tensor([[1] * 6, mask]))
    assert message == f"attention_mask: expected left padding, zeros and then ones, found {found} in row 1"


def test_processors_with_a_state_are_refused(target, draft):
    assert "UnbatchedClassifierFreeGuidanceLogitsProcessor, which keeps a state" in refusal(
        target, draft, prompt(), guidance_scale=1.5, negative_prompt_ids=prompt(seed=1)
    )

    class Grammar(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    Grammar.__module__ = "xgrammar.contrib.hf"
    message = refusal(target, draft, prompt(), logits_processor=LogitsProcessorList([Grammar()]))
    assert message.startswith("logits_processor: expected processors that are functions of the tokens and logits")
    assert (
        UnbatchedClassifierFreeGuidanceLogitsProcessor.__name__
        in __import__("draftsmith.decode.generation", fromlist=["STATEFUL"]).STATEFUL
    )


def processor(call, base=LogitsProcessor, *args, **attributes):
    """A processor of the user's: `call`, with some attributes, or the library's `base` under another name."""
    made = type("Mine", (base,), {"__call__": call} if call else {})(*args)
    vars(made).update(attributes)
    return made


def counted(self, ids, scores):
    self.uses.update([int(ids[0, -1])])
    return scores - 0.1 * (self.uses.total() > 30)


def walked(self, ids, scores):  # as long as the longest text so far
    self.length[0] = max(self.length[0], ids.shape[1])
    return scores + self.length[0] * (torch.arange(97) == 3)


def remembered(self, ids, scores):
    return scores + self.memo.setdefault(tuple(ids[0].tolist()), ids[0, -1] % 3) * (torch.arange(97) == 5)


@pytest.mark.parametrize(
    ("make", "keeps"),
    [
        (lambda: processor(counted, uses=Counter()), True),
        (lambda: processor(walked, length=[0]), True),
        (
            lambda: processor(
                lambda self, ids, scores: self.held(ids, scores), held=processor(counted, uses=Counter())
            ),
            True,
        ),
        (lambda: processor(remembered, memo={}), False),
        (lambda: processor(lambda self, ids, scores: scores, model=tiny_llama(0)), False),
        (lambda: processor(None, library.SequenceBiasLogitsProcessor, {(5,): 2.0, (3, 4): 1.0}), False),
        (lambda: processor(None, library.WatermarkLogitsProcessor, 97, "cpu"), False),
        (
            lambda: processor(
                None, library.SynthIDTextWatermarkLogitsProcessor, 3, [5, 7], 64, 0, 9, torch.device("cpu")
            ),
            True,
        ),
    ],
)
def test_processors_of_the_user_are_functions_of_the_text(target, draft, make, keeps):
    """What they remember does not matter; what they count does, since drafts ask them about texts that fail."""
    ids, options = prompt(), GREEDY | {"logits_processor": LogitsProcessorList([make()])}
    proposer = DraftModelProposer(draft)
    if keeps:
        with pytest.raises(InputError, match="of the tokens and logits, found Mine, which keeps a state from call to"):
            speculative_generate(target, proposer, ids, **options)
    else:
        written = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert torch.equal(speculative_generate(target, proposer, ids, **options).sequences, written)


@pytest.mark.parametrize("tree", [None, Tree.from_choices([(0,), (1,), (0, 0), (0, 1)])])
def test_a_constraint_is_asked_about_the_row_it_is_for(target, draft, tree):
    ids = prompt(3)
    allowed = lambda row, tokens: [10 * (row + 1), 10 * (row + 1) + 1]  # noqa: E731
    library = target.generate(ids, attention_mask=torch.ones_like(ids), prefix_allowed_tokens_fn=allowed, **GREEDY)
    proposer = DraftModelProposer(draft, tree)
    out = speculative_generate(target, proposer, ids, prefix_allowed_tokens_fn=allowed, **GREEDY)
    assert torch.equal(out.sequences, library)
    assert out.counts.num_accepted_tokens > 0
    assert torch.equal(
        autoregressive_generate(target, ids, prefix_allowed_tokens_fn=allowed, **GREEDY).sequences, library
    )


EXACT = [
    *(("draft", shape) for shape in ("chain", "tree")),
    *((kind, "chain") for kind in ("run_ahead", "prompt_lookup", "lookahead", "block")),
    *((kind, "tree") for kind in ("medusa", "eagle")),
    ("hybrid", "lookup, draft"),
]


@pytest.mark.parametrize("ending", ["a token", "a string"])
@pytest.mark.parametrize(
    ("case", "rule"),
    [*((case, "exact") for case in EXACT), (("draft", "tree"), "threshold"), (("draft", "chain"), "cascade")],
    ids=case_id,
)
def test_a_constraint_is_asked_only_about_texts_that_the_target_may_write(target, tokenizer, case, rule, ending):
    """Neither past the end of a text nor after a token that it does not allow: a trie knows no answer there."""
    allowed = ([1, 3], [1, 2], [1, 3, 9], [9])

    def trie(row, tokens):
        written = tokens[6:].tolist()
        assert 9 not in written and all(token in allowed[i] for i, token in enumerate(written)), written
        return allowed[len(written)]

    drafter, ids = specimen_of(*case, target), prompt(1 if case[0] == "run_ahead" else 3)
    ends = {"eos_token_id": 9}
    if ending == "a string":
        ends = {"stop_strings": tokenizer.decode([9]), "tokenizer": tokenizer}
    options = ends | {"prefix_allowed_tokens_fn": trie, "max_new_tokens": 8}
    library = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        out = speculative_generate(target, drafter, ids, draft_length=3, rule=rule, **options, **sampling)
        assert rule != "exact" or sampling["do_sample"] or torch.equal(out.sequences, library)


def test_penalties_that_hold_the_batchs_prompts_are_refused_in_batches(target, draft):
    for options in ({"encoder_repetition_penalty": 1.3}, {"encoder_no_repeat_ngram_size": 2}):
        assert "expected one prompt with Encoder" in refusal(target, draft, prompt(2), **options)
        ids = prompt()
        library = target.generate(ids, attention_mask=torch.ones_like(ids), **options, **GREEDY)
        assert torch.equal(decode(target, draft, ids, **options).sequences, library)


def test_a_ragged_batch_with_a_least_length_is_decoded_together(target, draft, monkeypatch):
    """One forward for all rows: in every round as many as one group has, not as many as there are prompt lengths."""
    lengths = (2, 3, 4, 5, 6)
    ids, mask = torch.zeros(5, 6, dtype=torch.long), torch.zeros(5, 6, dtype=torch.long)
    for row, n in enumerate(lengths):
        ids[row, 6 - n :], mask[row, 6 - n :] = prompt(1, n, row)[0], 1
    eos = int(autoregressive_generate(target, prompt(1, 2, 0), **GREEDY).sequences[0, 4])
    forwards = []
    feed = CachedModel.feed
    monkeypatch.setattr(CachedModel, "feed", lambda self, *a, **k: forwards.append(self.model) or feed(self, *a, **k))
    options = GREEDY | {"min_new_tokens": 5, "eos_token_id": eos}
    out = decode(target, draft, ids, attention_mask=mask, draft_length=3, **options)
    assert forwards.count(target) == max(counts.num_drafts for counts in out.row_counts)
    for row, n in enumerate(lengths):
        alone = autoregressive_generate(target, prompt(1, n, row), **options).sequences[0]
        assert torch.equal(out.sequences[row, 6 - n : 6 + len(alone) - n], alone)


def test_the_result_is_an_ordinary_tensor(target, draft):
    for out in (decode(target, draft, prompt()), autoregressive_generate(target, prompt(), **GREEDY)):
        assert not out.sequences.is_inference()
        loss = tiny_llama(1).requires_grad_(True)(out.sequences, labels=out.sequences).loss
        loss.backward()
        out.sequences[0, 0] = 1


def test_stop_strings_of_a_generation_config_are_obeyed(target, draft, tokenizer, monkeypatch):
    ids = prompt()
    text = autoregressive_generate(target, ids, **GREEDY).sequences[0]
    stop = tokenizer.decode(text[8:9])
    config = GenerationConfig(max_new_tokens=8, do_sample=False, stop_strings=[stop], pad_token_id=0)
    library = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, tokenizer=tokenizer)
    for options in ({"generation_config": config}, {"stop_strings": [stop], **GREEDY}):
        out = speculative_generate(target, DraftModelProposer(draft), ids, tokenizer=tokenizer, **options)
        assert torch.equal(out.sequences, library)
    assert config.stop_strings == [stop]
    monkeypatch.setattr(target, "generation_config", own := GenerationConfig(stop_strings=[stop], pad_token_id=0))
    given = {"generation_config": GenerationConfig(**GREEDY | {"max_new_tokens": 8})}
    for options in (given, GREEDY | {"max_new_tokens": 8}):
        out = speculative_generate(target, DraftModelProposer(draft), ids, tokenizer=tokenizer, **options)
        assert torch.equal(out.sequences, library)
    assert target.generation_config is own and own.stop_strings == [stop]
    whole = autoregressive_generate(target, ids, stop_strings=None, **GREEDY)
    assert torch.equal(whole.sequences[0], text)
    with pytest.raises(InputError, match="tokenizer: expected the target's tokenizer with stop_strings, found none"):
        speculative_generate(target, DraftModelProposer(draft), ids, generation_config=config)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_are_served(name):
    """The last layers of Gemma 3n and 4 read the keys of an earlier one: their own are never written."""
    model = tiny_model(name)
    ids = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    library = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    tree = Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])
    eos, options = int(library[0, 11]), GREEDY | {"draft_length": 3}
    proposers = [DraftModelProposer(model), DraftModelProposer(model, tree), PromptLookupProposer()]
    proposers.append(ParallelDraftProposer(parallel(model)))
    proposers += [EagleProposer(eagle(model)), BlockProposer(block(model))] if name == "gemma4" else []
    for proposer in proposers:
        for rows in (slice(None), slice(1)):
            out = speculative_generate(model, proposer, ids[rows], **options)
            assert torch.equal(out.sequences, library[rows])
        (text,) = replay_acceptance(model, proposer, library[rows], [9], [3], 0, max_new_tokens=8).texts
        assert text.counts[3].num_accepted_tokens == out.counts.num_accepted_tokens
        speculative_generate(model, proposer, ids, eos_token_id=eos, **options)  # a row ends before the others
    for take in (early_exit, make_layers):
        with pytest.raises(InputError, match=r": expected layers with keys and embeddings of their own, found Gemma"):
            take(model, 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=20, n_embd=8, n_layer=1, n_head=1)),
            "expected a model with a key-value cache, found OpenAIGPTLMHeadModel, which has none",
        ),
        (
            lambda: BertLMHeadModel(
                BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
            ),
            "expected causal attention, found BertLMHeadModel with is_decoder = False, an encoder",
        ),
        (
            lambda: MoshiForCausalLM(
                MoshiConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, ffn_dim=8)
            ),
            "expected another model, found MoshiForCausalLM, whose config names a window that its layers do not have",
        ),
    ],
)
def test_models_whose_cache_is_another_are_refused(build, message):
    with pytest.raises(InputError) as error:
        check_rollback(build(), "target")
    assert str(error.value) == f"target: {message}"


def test_buffers_grow_with_the_text(target):
    """32,000 tokens allowed and 70 written: room for at most twice as many."""
    model = CachedModel(target, rows=1, max_length=32_000)
    ids = prompt(1, 40)
    model.prefill(ids)
    expected = target(torch.cat([ids, ids[:, :30]], 1)).logits[:, 40:]
    logits = torch.cat([model.feed(ids[:, i : i + 1], [40 + i]) for i in range(30)], 1)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert {layer.keys.shape[2] for layer in model.cache.layers} == {128}
