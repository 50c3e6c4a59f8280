"""The coordinator as an application of Ray Serve: `serve deploy configs/serve/ray.yaml`."""

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.scripts.services.coordinate.coordinator import TIMEOUT, Coordinator, predicted
from draftsmith.scripts.services.coordinate.routing import Rates
from draftsmith.scripts.services.http_server import open_socket
from draftsmith.train.cli import flags_of, parse_config


@serve.deployment(name="coordinator", ray_actor_options={"num_cpus": 0}, graceful_shutdown_wait_loop_s=1.0)
class CoordinatorDeployment:
    """The only replica, because it knows all loads; Serve starts another if it dies.

    It has its own server, without Serve's proxy, which would add calls between processes to each request.
    """

    async def __init__(self, config: CoordinatorConfig, rates: Mapping[str, Rates]):  # type: ignore[misc]
        self.server = await Coordinator(config, rates).started()
        self.serving = asyncio.create_task(self.server.serve([open_socket(config.host, config.port)]))

    async def check_health(self) -> None:
        """Raise if the coordinator no longer listens, so that Serve replaces it."""
        if self.serving.done():
            raise RuntimeError("the coordinator's server has ended")

    async def __del__(self) -> None:  # Serve awaits it, so that requests in flight are answered first
        self.server.should_exit = True
        await self.serving


def build(args: dict[str, Any]) -> Application:
    """Return the application for `serve deploy` from the fields of `CoordinatorConfig`, or `config`, a file of them."""
    config = parse_config(CoordinatorConfig, flags_of(args))
    deployment: Any = CoordinatorDeployment  # which is more than its type shows
    return deployment.options(graceful_shutdown_timeout_s=TIMEOUT).bind(config, predicted(config))
