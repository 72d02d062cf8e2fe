"""A web server on loopback, for tests, with latency and faults."""

import hashlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

from werkzeug import Request, Response
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server


class WebServer:
    """Files in memory, by path, which a test may change at any time."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.latency_s = 0.0  # before each answer
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path with query, and Authorization of each request."""
        self.fault: Callable[[str, int], str | None] = lambda path, number: None
        """The fault, if any, that a request of a path meets; its number counts the requests from 0.

        A status, such as `500`; `reset` (of the connection); `slow` (after a second); `cut` (half
        of the body is missing).
        """
        self._server = self._serve(0)
        self.port = self._server.port
        self.url = f"http://127.0.0.1:{self.port}"

    def serve(self, folder: Path) -> None:
        """Have the files of a folder, and no others."""
        paths = (path for path in folder.rglob("*") if path.is_file())
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def _serve(self, port: int) -> BaseWSGIServer:
        answer = Request.application(self._answer)
        server = make_server("127.0.0.1", port, answer, threaded=True, request_handler=_Handler)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def _answer(self, request: Request) -> Response:
        path, environment = request.path.lstrip("/"), request.environ
        if request.method == "PUT":
            self.files[path] = request.get_data()
            return Response(status=201, headers={"ETag": "new"})
        key = request.headers.get("Authorization")
        number = [address for _, address, _ in self.requests].count(environment["RAW_URI"])
        self.requests.append((request.method, environment["RAW_URI"], key))
        fault, body = self.fault(path, number), self.files.get(path)
        time.sleep(self.latency_s + (fault == "slow"))
        if body is None or (fault or "").isdigit():
            return Response(status=int(fault or 404))
        if fault == "reset":
            at_once = struct.pack("ii", 1, 0)
            connection: socket.socket = environment["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            connection.close()
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

    def reopen(self) -> None:
        """Answer again, at the same address."""
        self._server = self._serve(self.port)


@contextmanager
def web_server() -> Iterator[WebServer]:
    server = WebServer()
    try:
        yield server
    finally:
        server.close()


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.0"  # a connection for each request

    def log(self, *arguments: Any) -> None:
        """Requests are not printed."""
