"""Servers on loopback, for tests: a web server with latency and faults, and a bucket."""

import hashlib
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from email.utils import formatdate
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


class WebServer:
    """Files in memory, by path, which a test may change at any time."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.latency_s = 0.0  # before each answer
        self.stall_s = 0.0  # of a `slow` answer
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path with query, and Authorization of each request."""
        self.fault: Callable[[str, int], str | None] = lambda path, number: None
        """The fault, if any, that a request of a path meets; its number counts the requests from 0.

        A status, such as `500`; `reset` (of the connection); `slow`; `cut` (half of the body is
        missing); `short` (half of the file, as if it was all).
        """
        self.numbers: dict[str, int] = {}
        self._server = self._serve(0)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def serve(self, folder: Path) -> None:
        """Have the files of a folder, and no others."""
        paths = (path for path in folder.rglob("*") if path.is_file())
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def _serve(self, port: int) -> "_Server":
        server = _Server(("127.0.0.1", port), partial(_Handler, self))
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

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


@contextmanager
def bucket_server(bucket: str = "bucket") -> Iterator[str]:
    """An S3-compatible server with an empty bucket; its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        # Not `urlopen`, which asks the proxy of the environment.
        with closing(HTTPConnection(host, port)) as connection:
            connection.request("PUT", f"/{bucket}")
            assert connection.getresponse().status == 200
        yield f"http://{host}:{port}"
    finally:
        server.stop()


class _Server(ThreadingHTTPServer):
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, *arguments: Any) -> None:
        """Clients that go away are no errors."""


class _Handler(BaseHTTPRequestHandler):
    """As HTTP/1.0, it has a connection for each request."""

    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def __init__(self, web: WebServer, *arguments: Any) -> None:
        self.web = web
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_PUT(self) -> None:
        self.web.files[self._path()] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(201, {"ETag": "new"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, web = self._path(), self.web
        web.requests.append((self.command, self.path, self.headers.get("Authorization")))
        number = web.numbers[path] = web.numbers.get(path, -1) + 1
        fault, body = web.fault(path, number), web.files.get(path)
        time.sleep(web.latency_s + (web.stall_s if fault == "slow" else 0))
        if body is None or (fault or "").isdigit():
            self._answer(int(fault or 404))
        elif fault == "reset":
            at_once = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            self.connection.close()
        else:
            body = body[: len(body) // 2] if fault == "short" and self.command == "GET" else body
            tag = f'"{hashlib.md5(body).hexdigest()}"'
            headers, status = {"ETag": tag, "Last-Modified": formatdate(0, usegmt=True)}, 200
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                start, stop = int(asked[1]), min(int(asked[2]) + 1, len(body))
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
                body, status = body[start:stop], 206
            self._answer(status, headers, body, len(body) // 2 if fault == "cut" else len(body))

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", sent: int = 0
    ) -> None:
        """Answer with the first `sent` bytes of a body."""
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
