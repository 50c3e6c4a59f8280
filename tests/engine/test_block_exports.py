"""DFlash drafters in a real vLLM: its texts are plain decoding's, and it counts what our decoder and replay count.

DSpark's heads are computed by vLLM's runner for GPUs alone. One layer: with several, vLLM 0.32 on CPU norms
every layer's keys of the text by the first one's weights.
"""

import pytest
import torch
from engine import TARGET, verified
from trained_block import train_block
from transformers import GenerationConfig

from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.medusa.block.initial import begin_as_last_layers
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.models import load_model, load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("cut", [False, True], ids=["whole vocabulary", "cut vocabulary"])
def test_a_block_drafter_is_verified_by_the_command(cut, tmp_path, capsys):
    target = load_model(TARGET, dtype="float32", device="cpu")
    target.generation_config = GenerationConfig(pad_token_id=0)
    prompts = encoded_prompts(None, load_tokenizer(TARGET), 8, 48)
    texts = plain_texts(target, [torch.tensor(ids) for ids in prompts[:6]], 6, max_new_tokens=40)
    frequent = torch.cat(texts).bincount(minlength=target.config.vocab_size).topk(400).indices.sort().values
    torch.manual_seed(0)
    shape = {"block_size": 4, "anchor_guesses": False, "base_model_name_or_path": str(TARGET)}
    drafter = BlockDrafter.of_target(target, 1, token_map=frequent if cut else None, **shape)
    begin_as_last_layers(drafter, target)
    train_block(target, drafter, texts).save_pretrained(tmp_path / "drafter")
    argv = ["--drafter", tmp_path / "drafter", "--output", tmp_path / "out"]
    ((first, second, *_),) = verified(capsys, ["the drafter"], 3, *argv)
    assert first > second > 0, "a drafter that guesses nothing proves nothing"
