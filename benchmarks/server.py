"""HTTP server and bucket (GET, HEAD and ListObjectsV2 of S3) on loopback with delayed responses.

A single thread handles any number of delayed requests. Files are mapped on the first request.
"""

import asyncio
import mmap
import multiprocessing
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

HEAD_END = b"\r\n\r\n"


@contextmanager
def serve(folder: Path, latency_s: float, cores: set[int]) -> Iterator[str]:
    """Run the server in a process; yield its address.

    Args:
        folder: its subfolders are the buckets; their files must not change.
        latency_s: seconds between a request and the start of its response.
        cores: numbers of the CPU cores that the server may use.
    """
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(str(folder), latency_s, cores, sender), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.terminate()
        process.join()


def _run(folder: str, latency_s: float, cores: set[int], answer: Any) -> None:
    os.sched_setaffinity(0, cores)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _Connection(folder, latency_s), "127.0.0.1", 0, backlog=4096
        )
        answer.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


class _Connection(asyncio.Protocol):
    """HTTP/1.1 connection without request bodies and pipelining."""

    def __init__(self, folder: str, latency_s: float) -> None:
        self.folder, self.latency_s = folder, latency_s
        self.received = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, rest = self.received.partition(HEAD_END)
        if not end:
            return
        self.received = rest
        if self.latency_s:
            asyncio.get_running_loop().call_later(self.latency_s, self.answer, head.decode())
        else:
            self.answer(head.decode())

    def answer(self, head: str) -> None:
        method, target, _ = head.partition("\r\n")[0].split(" ")
        address = urlsplit(target)
        query, path = parse_qs(address.query), os.path.join(self.folder, unquote(address.path)[1:])
        if "list-type" in query:
            self.send(200, method, list_objects(path, query.get("prefix", [""])[0]))
            return
        try:
            content, tag, modified = open_file(path)
        except OSError:
            self.send(404, method, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = f'ETag: "{tag}"\r\nLast-Modified: {modified}\r\nAccept-Ranges: bytes\r\n'
        requested = re.search(r"\r\nrange: *bytes=(\d+)-(\d*)", head, re.IGNORECASE)
        if not requested:
            self.send(200, method, content, headers)
            return
        start, stop = int(requested[1]), min(int(requested[2] or len(content)) + 1, len(content))
        headers += f"Content-Range: bytes {start}-{stop - 1}/{len(content)}\r\n"
        self.send(206, method, content[start:stop], headers)

    def send(self, status: int, method: str, body: Any, headers: str = "") -> None:
        head = f"HTTP/1.1 {status} -\r\n{headers}Content-Length: {len(body)}{HEAD_END.decode()}"
        self.transport.write(head.encode())
        if method != "HEAD":
            self.transport.write(body)


@cache
def open_file(path: str) -> tuple[memoryview, str, str]:
    """Content, ETag and modification time of a file.

    Raises:
        OSError: sender is not such a file.
    """
    with open(path, "rb") as file:
        facts = os.fstat(file.fileno())
        content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if facts.st_size else b""
    tag = f"{facts.st_size:x}-{facts.st_mtime_ns:x}"
    return memoryview(content), tag, formatdate(facts.st_mtime, usegmt=True)


def list_objects(bucket: str, prefix: str) -> bytes:
    """Response to ListObjectsV2."""
    files = sorted(path for path in Path(bucket).rglob("*") if path.is_file())
    keys = [(path.relative_to(bucket).as_posix(), path.stat().st_size) for path in files]
    found = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size></Contents>"
        for key, size in keys
        if key.startswith(prefix)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()
