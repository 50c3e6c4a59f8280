"""`draftsmith coordinate`: the coordinator on this machine, in a Ray of its own."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from draftsmith.decode.errors import InputError, first_line
from draftsmith.scripts.services.coordinate.config import CoordinatorConfig
from draftsmith.train.cli import parse_config

OBJECTS = 80 * 2**20  # bytes of Ray's object store, which is not used
NAME = "draftsmith"


def main(argv: Sequence[str] | None = None) -> int:
    """Answer requests until a signal, then finish those in flight."""
    config = parse_config(CoordinatorConfig, argv, prog="draftsmith coordinate")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's memory monitor kills workers when the whole machine is short of memory. Ours use little, and must survive
    # next to an engine that fills its share.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112
    try:
        import ray
        from ray import serve

        from draftsmith.scripts.services.coordinate.application import DISPATCHER, INGRESS, application
        from draftsmith.scripts.services.coordinate.watch import AWAY, answers, watch
        from draftsmith.scripts.services.http_server import open_socket
    except ImportError as error:
        raise InputError(
            f"coordinate: expected Ray Serve, found none ({error}): pip install -e '.[coordinator]' in the clone"
        ) from error
    built = application(config)
    open_socket(config.host, config.port).close()  # fails seconds before Ray is up and a replica would fail
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once

    try:
        try:
            ray.init(
                address="local",  # never an existing cluster
                num_cpus=1,  # Ray starts a worker for each CPU
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                object_store_memory=OBJECTS,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which sets its own handlers
                signal.signal(number, stop)
            serve.start(proxy_location="Disabled")
            serve.run(built, name=NAME, route_prefix=None)
        except Exception as error:  # of many types, including Ray's own startup timeout
            raise InputError(f"coordinate: expected Ray to start, found: {first_line(error)}") from error
        print(f"coordinator: http://{config.host}:{config.port}, {', '.join(config.models)}", flush=True)
        wanted = {INGRESS: config.ingress, DISPATCHER: 1}

        def say(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        if lost := watch(wanted, NAME, stopped, say, lambda: answers(config.host, config.port)):
            say(f"coordinator: ends: no replica of {', '.join(lost)} for {AWAY:g} s")
            return 1
        dispatcher: Any = serve.get_deployment_handle(DISPATCHER, NAME)
        dispatcher.drain.remote(config.timeout).result()
        serve.delete(NAME)
    finally:
        ray.shutdown()
    return 0
