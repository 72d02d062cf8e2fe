"""A web server on loopback, with latency and faults."""

import hashlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from threading import Thread
from typing import Any

import pytest
from werkzeug import Request, Response
from werkzeug.serving import WSGIRequestHandler, make_server


class WebServer:
    """Files in memory, by path, which a test may change at any time."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.latency_s = 0.0  # before each answer
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path with query, and Authorization of each request."""
        self.fault: Callable[[str], str | None] = lambda path: None
        """The fault, if any, that a request of a path meets.

        A status, such as `500`; `reset` (of the connection); `slow` (after a second); `cut` (half
        of the body is missing).
        """
        answer = Request.application(self._answer)
        self._server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=_Handler)
        self.url = f"http://127.0.0.1:{self._server.port}"
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _answer(self, request: Request) -> Response:
        path, address = request.path.lstrip("/"), request.environ["RAW_URI"]
        if request.method == "PUT":
            self.files[path] = request.get_data()
            return Response(status=201, headers={"ETag": "new"})
        self.requests.append((request.method, address, request.headers.get("Authorization")))
        fault, body = self.fault(path), self.files.get(path)
        time.sleep(self.latency_s + (fault == "slow"))
        if body is None or (fault or "").isdigit():
            return Response(status=int(fault or 404))
        if fault == "reset":
            request.environ["werkzeug.socket"].close()
            raise ConnectionResetError
        response = Response(body)
        response.set_etag(hashlib.md5(body).hexdigest())
        response.last_modified = datetime.fromtimestamp(0, UTC)
        response.make_conditional(request, accept_ranges=True, complete_length=len(body))
        if fault == "cut":
            sent = response.get_data()
            response.response = [sent[: len(sent) // 2]]
        return response

    def close(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.0"  # a connection for each request

    def log(self, *arguments: Any) -> None:
        """Requests are not printed."""


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()
