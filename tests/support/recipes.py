"""The recipes of all kinds: what trains each, and what makes its config for the files of `pipelines`."""

from collections.abc import Callable
from typing import Any

from pipelines import block_configured, configured, eagle_configured, heads_configured, mtp_configured

from draftsmith.distill.__main__ import distill
from draftsmith.medusa.block.__main__ import train_block
from draftsmith.medusa.eagle.__main__ import train_heads as train_eagle
from draftsmith.medusa.heads.__main__ import train_heads
from draftsmith.medusa.mtp.__main__ import train_heads as train_mtp

RECIPES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "draft": (distill, configured),
    "medusa": (train_heads, heads_configured),
    "eagle": (train_eagle, eagle_configured),
    "block": (train_block, block_configured),
    "mtp": (train_mtp, mtp_configured),
}
