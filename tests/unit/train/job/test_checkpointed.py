"""Checkpoints are loaded by the names that the library saves them under."""

import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.train.job.checkpointed import CheckpointedTrainer, to_model_names
from draftsmith.train.lora import add_lora
from draftsmith.train.options import LoraOptions


def neox():
    return tiny_model("gpt-neox", tie_word_embeddings=False)


def adapted():
    model = neox()
    add_lora(model, LoraOptions(r=2))
    return model


def mixtral():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    torch.manual_seed(0)
    # Twelve experts: sorted as text, the tenth would be stacked behind the first.
    return MixtralForCausalLM(MixtralConfig(vocab_size=50, intermediate_size=8, num_local_experts=12, **sizes))


def llama():
    return tiny_model("llama")


@pytest.mark.parametrize(("make", "renamed"), [(neox, True), (adapted, True), (mixtral, True), (llama, False)])
def test_what_is_resumed_and_the_best_are_the_checkpoints(tmp_path, make, renamed):
    model = make()
    trainer = CheckpointedTrainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = tmp_path / "checkpoint-1"
    model.save_pretrained(checkpoint, state_dict=model.state_dict())
    saved = load_file(checkpoint / "model.safetensors")
    assert bool(saved.keys() - wanted.keys()) == renamed
    assert to_model_names(model, saved).keys() <= wanted.keys()
    trainer.state.best_model_checkpoint = str(checkpoint)
    for load in (lambda: trainer._load_from_checkpoint(str(checkpoint)), trainer._load_best_model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load()
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_checkpoint_without_the_head_is_refused(tmp_path):
    model = neox()
    trainer = CheckpointedTrainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    checkpoint = tmp_path / "checkpoint-1"
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head")}
    model.save_pretrained(checkpoint, state_dict=state)
    with pytest.raises(
        InputError, match=r"checkpoint-1: expected .*weights of another model: none for lm_head\.weight"
    ):
        trainer._load_from_checkpoint(str(checkpoint))
