"""What servers of states give, and how many of them feed a run: by hand."""

from dataclasses import dataclass, replace

import pytest
from conftest import tiny_llama
from state_server import StateServer, serving
from transformers import LlamaConfig, TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.train.job.flops import Work
from draftsmith.train.memory.servers import StateServers
from draftsmith.train.memory.setting import TrainingMachines
from draftsmith.train.quantization import arithmetic_of
from draftsmith.train.recipe import RecipeConfig

WORK = Work(decoder=1_000, head=500, attention=10)
SHAPE = LlamaConfig(hidden_size=64, num_hidden_layers=8)
FP8 = {"quant_method": "fp8"}


@dataclass
class PlanConfig(TrainingMachines, RecipeConfig):
    """The config of a plan of any run."""


def planned(work=WORK, layer_ids=(2, 5), dtype="bfloat16", shape=SHAPE, **options) -> StateServers:
    speed = {} if "teacher_tokens_per_second" in options else {"teacher_gpus": 1}
    options = {"sequence_length": 100, "device": "H100", "mfu": 0.5} | speed | options
    return StateServers.of(PlanConfig("t", ["c"], **options), shape, dtype, layer_ids, work)


def quantized(**fields):
    config = LlamaConfig(hidden_size=64, num_hidden_layers=8)
    config.quantization_config = fields
    return config


@pytest.mark.parametrize(
    ("layer_ids", "dtype", "sent", "stored"),
    [((2, 5), "bfloat16", 3, 3), ((2, 8), "bfloat16", 2, 3), ((), "float32", 2, 2)],
)
def test_what_travels_has_the_last_state_once_and_what_is_stored_has_it_for_the_head(layer_ids, dtype, sent, stored):
    found = planned(layer_ids=layer_ids, dtype=dtype)
    assert (found.sent, found.stored) == (sent * 64 * 2, stored * 64 * 2)


def test_a_server_multiplies_its_maps_in_fp8_and_attends_in_bfloat16():
    per_second = 2 * 989e12 * 0.5
    attention = 2 * 10 * 50
    assert planned(teacher_gpus=2).speed == pytest.approx(per_second / (2_000 + attention))
    assert planned(teacher_gpus=2, shape=quantized(**FP8)).speed == pytest.approx(per_second / (1_000 + attention))
    old = planned(teacher_gpus=2, shape=quantized(**FP8), device="A100")
    assert old.speed == pytest.approx(2 * 312e12 * 0.5 / (2_000 + attention)) and "in bfloat16" in old.source
    assert planned(teacher_tokens_per_second=5.0).speed == 5.0


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (FP8, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "bfloat16"),
    ],
)
def test_the_arithmetic_of_a_quantised_target(fields, found):
    assert arithmetic_of(quantized(**fields)) == found


@pytest.mark.parametrize(("bits", "kind", "found"), [(8, "float", "fp8"), (4, "float", "fp4"), (8, "int", "bfloat16")])
def test_inputs_in_few_bits_and_not_weights_alone_make_the_arithmetic(bits, kind, found):
    weights = {"num_bits": bits, "type": kind}
    group = {"targets": ["Linear"], "weights": weights}
    stored = {"quant_method": "compressed-tensors", "config_groups": {"one": group | {"input_activations": weights}}}
    assert arithmetic_of(quantized(**stored)) == found
    stored["config_groups"]["one"]["input_activations"] = None
    assert arithmetic_of(quantized(**stored)) == "bfloat16"


def test_the_slower_side_sets_the_rate_and_the_other_waits():
    few, many = (replace(planned(teacher_tokens_per_second=100.0, gpus=16), count=count) for count in (2, 5))
    assert few.rate(400.0) == 200.0 and many.rate(400.0) == 400.0
    assert "4 servers feed these trainers; with 2 servers training waits 50% of the time" in few.lines(400.0)
    assert "4 servers feed these trainers; with 5 servers the servers wait 20% of the time" in many.lines(400.0)
    (network,) = (line for line in replace(few, speed=1e6).lines(1e6) if line.startswith("the network"))
    assert "0.384 GB/s, and 0.192 GB/s (1.54 Gbit/s) to each" in network and "reads 0.192 GB/s" in network
    assert (
        "4 servers feed these trainers" in replace(few, count=0).lines(400.0) and replace(few, count=0).rate(9.0) == 9.0
    )


def test_without_a_speed_the_bytes_are_still_known():
    lines = planned(work=None, teacher_gpus=1).lines(400.0)
    assert any("no estimate of a server's speed" in line for line in lines)
    assert lines[0].startswith("states from servers: 384 bytes a token, after layers 2, 5, 8 (the last), in bfloat16")
    assert len(planned(teacher_gpus=1).lines(None)) == 2


def test_a_window_holds_two_steps():
    training = TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=5, use_cpu=True)
    step = 4 * 5 * 100 * 3 * 64 * 2
    found = planned(training=training, teacher_window=3 * step / 1e9, gpus=2)
    assert not any("window:" in line for line in found.lines(400.0))
    assert "the processes' windows hold 30 s of training" in found.lines(400.0)
    small = planned(training=training, teacher_window=1e-6)
    assert "two steps of 0.000768 GB must fit a window: --teacher_window 1" in small.lines(None)


def test_a_speed_is_given_once():
    with pytest.raises(InputError, match="teacher_gpus: expected none with teacher_tokens_per_second"):
        planned(teacher_gpus=1, teacher_tokens_per_second=5.0)


def test_servers_that_answer_are_timed(tmp_path):
    model = tiny_llama(0)
    model.save_pretrained(tmp_path)
    with serving(*(StateServer(model, [1, 2], str(tmp_path)) for _ in range(2))) as servers:
        config = PlanConfig(str(tmp_path), ["c"], sequence_length=9, teacher=[f"vllm:{s.url}" for s in servers])
        found = StateServers.of(config, model.config, "float32", [1], WORK)
        servers[0].says = servers[1].says = {"hidden_size": 64}
        with pytest.raises(InputError, match=r"expected a target with hidden_size 32 at .*, found .* with 64"):
            StateServers.of(config, model.config, "float32", [1], WORK)
    assert found.speed > 0 and (found.count, found.source) == (2, "measured now")
    with pytest.raises(InputError, match=r"ConnectError.*; a plan without them takes --teacher_gpus"):
        StateServers.of(config, model.config, "float32", [1], WORK)
