"""Tiny models and tokenizers, built in memory: no test needs the network or a GPU.

What takes seconds to import is imported by need: the process that hands out the tests to others needs none of it.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Not among the user's own; what one worker has compiled the others read.
os.environ.setdefault("DRAFTSMITH_PROGRAMS", f"{tempfile.gettempdir()}/draftsmith-tests-{os.getuid()}")
# Any compiler of today knows the vectors of this machine, and need not compile three files to show it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "for i in range(10):\n    print(i, i * i)\n",
    "import os\n\nprint(os.getcwd())\n",
]


FIRST = ["sharded", "embedded", "replay_processes", "data_processes", "failures", "shared_out", "resume", "turns"]
FIRST += ["cached_states", "served_training", "served_caches", "unfinished", "reliability", "training_contracts"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; all tests of ranks side by side, so that one worker's server forks them."""
    places = {f"test_{name}": place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(FIRST)))


def pytest_collection_finish() -> None:
    """Give each worker one thread, and let commands be as quiet on a busy machine as on another."""
    import torch

    from draftsmith.decode import progress

    torch.set_num_threads(1)
    progress.INTERVAL = math.inf


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Keep the garbage collector off what was imported: every training run ends with a full collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def autocast_is_off() -> Iterator[None]:
    """Fail the test that leaves autocast on, and not those behind it."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)
        pytest.fail("autocast was left on")


def tiny_llama(
    seed: int = 0, vocab_size: int = 97, layers: int = 2, hidden: int = 32, scale: float = 6.0, **config: object
) -> LlamaForCausalLM:
    """A random Llama whose logits are spread by `scale`, so that its distributions are neither flat nor degenerate."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=2 * hidden,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            **config,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def perturbed(model: LlamaForCausalLM, noise: float, seed: int = 1) -> LlamaForCausalLM:
    """A drafter that agrees with `model` more often the smaller the noise on its head is."""
    import torch

    draft = tiny_llama(
        0, **{k: getattr(model.config, k) for k in ("vocab_size",)}, layers=model.config.num_hidden_layers
    )
    draft.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight) * noise)
    return draft.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    return tiny_llama(0)


@pytest.fixture(scope="session")
def draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    return perturbed(target, 0.05)


@pytest.fixture(scope="session")
def deep() -> LlamaForCausalLM:
    """Four layers, of which the first says most, so that drafts from it stand now and then."""
    model = tiny_llama(0, layers=4)
    for layer in model.model.layers[1:]:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.mul_(0.3)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    from bpe import train_bpe

    return train_bpe(TEXTS, 300)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory, tokenizer):
    """A pair, and completions of 3 and of up to 12 tokens that the target wrote: 20 to train on, 5 held out."""
    from pipelines import make_pipeline

    return make_pipeline(tmp_path_factory.mktemp("pipeline"), tokenizer)


@pytest.fixture(scope="session")
def sharp(tmp_path_factory, tokenizer):
    """A target that is nearly certain of its next token, and completions of it."""
    from pipelines import make_sharp

    return make_sharp(tmp_path_factory.mktemp("sharp"), tokenizer)


@pytest.fixture(scope="session")
def gemma_pipeline(tmp_path_factory):
    """As `pipeline`, of a tiny Gemma 3 whose tokenizer has a token that the model has no logit for."""
    from pipelines import make_gemma_pipeline

    return make_gemma_pipeline(tmp_path_factory.mktemp("gemma"))


@pytest.fixture
def pair_dirs(tmp_path, tokenizer):
    """A target and a draft as Hugging Face directories that share a tokenizer."""
    from draftsmith.train.runs import save_model

    vocab = len(tokenizer)
    for name, seed, layers in (("target", 0, 2), ("draft", 1, 1)):
        model = tiny_llama(seed, vocab, layers=layers)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.bos_token_id = tokenizer.bos_token_id
        save_model(model, tokenizer, tmp_path / name)
    return tmp_path / "target", tmp_path / "draft"


@pytest.fixture
def short_timing(monkeypatch):
    """Let measurements of what rounds cost be short."""
    from short_timing import shorten

    shorten(monkeypatch)


@pytest.fixture
def traced(monkeypatch):
    """Run compiled forwards as they were traced; gives the list of those that are made, (model, variant)."""
    from programs import Traced

    return _made_as(Traced, monkeypatch)


@pytest.fixture
def untraced(monkeypatch):
    """Run compiled forwards by the code that is traced; gives the same list."""
    from programs import Untraced

    return _made_as(Untraced, monkeypatch)


def _made_as(kind, monkeypatch):
    from draftsmith.decode.cache import program
    from draftsmith.decode.rules import judged

    monkeypatch.setattr(program, "Program", kind)
    monkeypatch.setattr(judged, "_PROGRAMS", {})
    monkeypatch.setattr(kind, "made", [])
    return kind.made
