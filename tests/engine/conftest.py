"""Servers that several modules ask: each takes half a minute to start."""

import os
from collections.abc import Iterator

import fated
import pytest
import torch
from draft_service import DraftedFor, start_draft_service
from engine import DRAFT, ROOT, TARGET, Served, end, free_port, vllm_server, wait_for, warm_engine
from transformers import AutoModelForCausalLM, AutoTokenizer

fated.end_with_make()

GAMMA = 4
DRAFTING = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": GAMMA}
CLASS = "draftsmith.scripts.services.remote_draft.RemoteDraft"


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What stands for the engine's Python."""
    with warm_engine(tmp_path_factory.mktemp("warm")) as python, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_ENGINE", str(python))
        yield


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded target, decoding plainly."""
    with vllm_server(TARGET, tmp_path_factory.mktemp("plain") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded pair: the stock draft's argmax, γ = 4, each answer counted.

    Its build samples rightly: see `tests/support/engine_plugins`.
    """
    log = tmp_path_factory.mktemp("speculating") / "log"
    plugins = {"PYTHONPATH": str(ROOT / "tests" / "support" / "engine_plugins")}
    counting = "--per-request-spec-decode-metrics", "summary"
    with vllm_server(TARGET, log, DRAFTING, *counting, environment=plugins) as server:
        yield server


@pytest.fixture(scope="session")
def astray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with three faults: its target is quantised, it has a chat template, and its build samples wrongly.

    Beside it lies `target`, the weights that it has: 4 bits, a scale for each row.
    """
    folder = tmp_path_factory.mktemp("astray")
    model = AutoModelForCausalLM.from_pretrained(TARGET)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                scale = parameter.abs().amax(1, keepdim=True) / 7
                parameter.copy_((parameter / scale).round() * scale)
    model.save_pretrained(folder / "target")
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder / "target")
    (folder / "template.jinja").write_text("{% for m in messages %}User: {{ m['content'] }}{% endfor %}")
    flags = "--chat-template", str(folder / "template.jinja")
    with vllm_server(folder / "target", folder / "log", DRAFTING, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftedFor]:
    """The embedded pair again, its draft in a service of its own."""
    folder, port = tmp_path_factory.mktemp("remote"), free_port()
    log = folder / "draft.log"
    speculative = {"method": "custom_class", "model": CLASS, "num_speculative_tokens": GAMMA}
    environment = {
        "DRAFT_ENDPOINT": f"http://127.0.0.1:{port}",
        "DRAFT_TIMEOUT_MS": "60000",  # counts must not depend on how busy the machine is
        # This tree's draftsmith, whichever the engine's environment has, and what mends the build's sampling.
        "PYTHONPATH": os.pathsep.join([str(ROOT / ".typing"), str(ROOT / "tests" / "support" / "engine_plugins")]),
        "PROMETHEUS_MULTIPROC_DIR": str(folder),
    }
    draft = start_draft_service(DRAFT, port, log)  # it comes up while the server does
    pair = None
    try:
        with vllm_server(TARGET, folder / "log", speculative, environment=environment) as server:
            pair = DraftedFor(server, draft, port, log)
            wait_for(f"{pair.service}/health", draft, log)
            yield pair
    finally:
        end(pair.draft if pair else draft)
