"""`draftsmith coordinate`: one process in front of several servers."""

import asyncio
from collections.abc import Sequence

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.train.cli import parse_config


def main(argv: Sequence[str] | None = None) -> int:
    """Answer requests until a signal, then finish those in flight."""
    config = parse_config(CoordinatorConfig, argv, prog="draftsmith coordinate")
    try:
        from draftsmith.scripts.services.coordinate.coordinator import Coordinator, predicted
        from draftsmith.scripts.services.http_server import ended_by_signals, open_socket
    except ModuleNotFoundError as error:
        raise InputError(f"coordinate: expected `pip install -e '.[coordinator]'`, found no {error.name}") from error
    coordinator = Coordinator(config, predicted(config))

    async def answer() -> None:
        listener = open_socket(config.host, config.port)
        server = await coordinator.started()
        ended_by_signals(server)
        print(f"coordinator: http://{config.host}:{config.port}, {', '.join(config.models)}", flush=True)
        await server.serve([listener])

    asyncio.run(answer())
    return 0
