"""Servers that several modules ask: each takes half a minute to start."""

from collections.abc import Iterator

import pytest
from engine import DRAFT, TARGET, Served, vllm_server

GAMMA = 4


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded target, decoding plainly."""
    with vllm_server(TARGET, tmp_path_factory.mktemp("plain") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded pair: the stock draft's argmax, γ = 4."""
    speculative = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": GAMMA}
    with vllm_server(TARGET, tmp_path_factory.mktemp("speculating") / "log", speculative) as server:
        yield server
