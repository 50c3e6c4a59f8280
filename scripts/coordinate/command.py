"""`draftsmith coordinate`: the coordinator on this machine, in a Ray of its own."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.scripts.coordinate.config import CoordinatorConfig
from draftsmith.train.cli import parse_config

OBJECTS = 80 * 2**20
"""Bytes for Ray's object store, of which nothing is wanted here."""
NAME = "draftsmith"


def main(argv: Sequence[str] | None = None) -> int:
    """Answer requests until a signal ends it; those under way are then finished first."""
    config = parse_config(CoordinatorConfig, argv, prog="draftsmith coordinate")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions

        from draftsmith.scripts.coordinate.application import DISPATCHER, application
    except ImportError as error:
        raise InputError(
            f"coordinate: expected Ray Serve, found none ({error}): pip install 'draftsmith[coordinator]'"
        ) from error
    built = application(config)
    _require_free(config)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait

    ray.init(
        address="local",  # never a cluster that happens to be there
        num_cpus=1,  # Ray starts a worker for each
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=OBJECTS,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which sets its own
            signal.signal(number, stop)
        serve.start(http_options=HTTPOptions(host=config.host, port=config.port), proxy_location="HeadOnly")
        serve.run(built, name=NAME, route_prefix="/")
        print(f"coordinator: http://{config.host}:{config.port}, {', '.join(config.models)}", flush=True)
        stopped.wait()
        dispatcher: Any = serve.get_deployment_handle(DISPATCHER, NAME)
        dispatcher.drain.remote(config.timeout).result()
        serve.delete(NAME)
    finally:
        ray.shutdown()
    return 0


def _require_free(config: CoordinatorConfig) -> None:
    """Require an address to answer at, before seconds of starting Ray.

    Raises:
        InputError: it is taken, or none of this machine's.
    """
    try:
        with socket.create_server((config.host, config.port)):
            pass
    except OSError as error:
        found = error.strerror or str(error)
        raise InputError(f"port: expected a free one at {config.host}:{config.port}, found: {found}") from error
