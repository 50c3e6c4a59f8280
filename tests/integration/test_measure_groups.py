"""`draftsmith measure` by part and turn: at T=0 the figures are those of the rounds that the decoder makes."""

import json
from collections import Counter

import pytest
import torch
from conftest import tiny_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from unit.train.data.chat.test_masks import byte_level, user

from draftsmith.decode import DraftModelProposer, HybridProposer, SuffixProposer, Switch, speculative_generate
from draftsmith.scripts.measure.command import measure
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.train.data.chat.parts import PARTS
from draftsmith.train.runs import save_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}[INST]{{ c.function | tojson }}[/INST]"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = {"thinking": range(20, 34), "answer": range(40, 48), "tool call": range(60, 74)}  # tokens of single characters


def following(successors: dict[int, int], vocab_size: int) -> LlamaForCausalLM:
    """A model in which each of these tokens is followed by its successor, whatever was before."""
    model = tiny_llama(0, vocab_size, layers=1, hidden=128)
    with torch.no_grad():
        for layer in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            layer.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(vocab_size, 128), dim=1)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, successor in successors.items():
            model.lm_head.weight[successor] += 8 * embeddings[token]
    return model


def written(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the tokens of the text that the target writes, with the part that each is in."""
    marks = {"thinking": ("<think>", "</think>"), "answer": ((), ()), "tool call": ("[INST]", "[/INST]")}
    text: dict[int, str] = {}
    for part, words in WORDS.items():
        opening, closing = (tokenizer.convert_tokens_to_ids(mark) if mark else None for mark in marks[part])
        text |= {token: part for token in (opening, *words, closing) if token is not None}
    return text | {tokenizer.convert_tokens_to_ids("<|im_end|>"): "tool call"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target that thinks, answers and calls; a draft that is wrong at times; prompts that hold some of the text."""
    root, tokenizer = tmp_path_factory.mktemp("groups"), byte_level(False)
    tokenizer.chat_template = TEMPLATE
    text = list(written(tokenizer))
    begin = tokenizer("\n", add_special_tokens=False).input_ids[-1]
    successors = dict(zip([begin, *text[:-1]], text, strict=True))
    wrong = {token: text[0] for token in text[3::4]}
    for name, follows in (("target", successors), ("draft", successors | wrong)):
        model = following(follows, len(tokenizer))
        model.generation_config.eos_token_id = text[-1]
        save_model(model, tokenizer, root / name)
    rows = []
    for i in range(6):
        asked = user(tokenizer.decode(text[5 + 3 * i : 14 + 4 * i]))
        before = [user("say"), {"role": "assistant", "content": "hello"}] if i % 2 else []
        rows.append({"messages": [*before, asked]})
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_at_t0_parts_and_turns_are_those_of_the_decoded_rounds(root, tmp_path):
    hybrid = f"hybrid:suffix:1+{root / 'draft'}@match=2"
    settings = {"drafter": [hybrid, str(root / "draft")], "max_new_tokens": 64, "draft_length": [3]}
    settings |= {"dtype": "float32", "measure_costs": False, "compiled": False, "threads": 1}
    measure(MeasureConfig(str(root / "target"), str(root / "prompts.jsonl"), str(tmp_path), **settings))
    report = json.loads((tmp_path / "report.json").read_text())
    tokenizer = byte_level(False)
    tokenizer.chat_template = TEMPLATE
    part_of = list(written(tokenizer).values())
    models = [LlamaForCausalLM.from_pretrained(root / name).eval() for name in ("target", "draft")]
    draft = DraftModelProposer(models[1])
    proposers = {"hybrid": HybridProposer([SuffixProposer(1), draft], Switch(2)), "draft": draft}
    prompts = [json.loads(line)["messages"] for line in (root / "prompts.jsonl").read_text().splitlines()]
    for name, proposer in proposers.items():
        rounds, accepted, by_turn = Counter(), Counter(), Counter()
        for messages in prompts:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            found = []
            speculative_generate(
                models[0], proposer, torch.tensor([ids]), draft_length=3, max_new_tokens=64, do_sample=False,
                eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), observer=found.append,
            )  # fmt: skip
            start = 0
            for round in found:
                rounds[part_of[start], round.source] += 1
                accepted.update((part, round.source) for part in part_of[start : start + round.accepted])
                start += len(round.tokens)
            assert start == len(part_of)
            by_turn[str(1 + len(messages) // 2)] += len(found)
        curve = next(curve for curve in report["curves"] if curve["proposer"]["kind"] == name)
        assert list(curve["by_part"]) == list(PARTS) and curve["by_context"] == {}
        for part, group in curve["by_part"].items():
            tokens = 6 * part_of.count(part)
            assert (group["prompts"], group["tokens"]) == (6, tokens)
            started = [rounds[part, source] for source in (0, 1)]
            assert group["mean_acceptance_length"]["3"]["value"] == pytest.approx(tokens / sum(started))
            for source, shares in enumerate((group["drafters"] or {}).values()):
                assert shares["3"]["rounds"]["value"] == pytest.approx(started[source] / sum(started))
                assert shares["3"]["accepted"]["value"] == pytest.approx(accepted[part, source] / tokens)
        for turn, count in by_turn.items():
            tau = 3 * len(part_of) / count
            run = next(run for run in report["runs"] if run["proposer"]["kind"] == name)
            for groups in (curve["by_turn"], run["by_turn"]):
                assert groups.keys() == by_turn.keys() and groups[turn]["prompts"] == 3
            assert curve["by_turn"][turn]["mean_acceptance_length"]["3"]["value"] == pytest.approx(tau)
            assert run["by_turn"][turn]["mean_acceptance_length"]["value"] == pytest.approx(tau)
        assert name == "draft" or all(len(group["drafters"]) == 2 for group in curve["by_part"].values())
