"""An HTTP server on this machine that does not print what becomes of a connection whose client has left."""

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    """What the fake servers of tests run on."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, but for a connection that its client has reset."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
