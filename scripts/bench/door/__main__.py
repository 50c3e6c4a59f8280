"""Time requests with and without the coordinator in front."""

import asyncio
from contextlib import AsyncExitStack
from statistics import median, quantiles
from typing import Any

import torch
from tqdm.auto import tqdm

from draftsmith.scripts.bench.common import Figures, main
from draftsmith.scripts.bench.door import BenchDoorConfig
from draftsmith.scripts.bench.door.stubs import door, stub, timed
from draftsmith.train.provenance import environment


async def measured(config: BenchDoorConfig) -> dict[str, dict[str, Any]]:
    """Return the figures of both ways, with one client and with all of them."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(stub(config.seconds)) for _ in range(config.servers)]
        ways = {"straight": servers, "door": [await stack.enter_async_context(door(config, servers))]}
        figures: dict[str, dict[str, Any]] = {}
        for clients in dict.fromkeys((1, config.clients)):
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for _ in tqdm(range(config.rounds), desc=f"{clients} clients"):
                for name, ports in ways.items():
                    taken[name] += await timed(config, ports, clients)
            for name, seconds in taken.items():
                figures[f"{name}, {clients} clients"] = {
                    "median_ms": 1000 * median(seconds),
                    "p95_ms": 1000 * quantiles(seconds, n=20)[-1],
                    "over_straight": median(seconds) / median(taken["straight"]),
                }
        return figures


def bench(config: BenchDoorConfig) -> Figures:
    """Time both ways."""
    found = asyncio.run(measured(config))
    return {"environment": environment(torch.device("cpu")), "door": found}


if __name__ == "__main__":
    main(BenchDoorConfig, bench)
