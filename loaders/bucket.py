"""Web servers and buckets: ranges over the network, many in flight, tried again until they are whole.

One event loop in one thread of each process asks; obstore speaks with the servers.
"""

import asyncio
import atexit
import os
import random
import re
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from conf.mistakes import Mistake
from loaders.storage import (
    CUT,
    MissingError,
    Storage,
    StorageError,
    is_remote,
    too_short,
    without_credentials,
)

try:
    import obstore
    from obstore import exceptions as said
    from obstore.store import from_url
except ModuleNotFoundError:
    raise Mistake(
        "http(s)://, s3:// and gs:// need the package obstore; pip install obstore"
    ) from None

IN_FLIGHT = 256
"""Calls of a process that are under way at once: at 100 ms, enough for 2,500 a second."""

TOGETHER, TOGETHER_S = 10, 0.001
"""Ranges of a file that are asked for in one call, which obstore still makes requests of their own of, all at
once; and seconds for which the first of them waits for others. Each of 10 takes a fifth of the CPU time of one
that is asked for alone."""

PART, PARTS_IN_FLIGHT = 4 << 20, 16
"""Bytes of the parts that longer ranges are fetched in, and how many of them a process has at once."""

CONNECT_S, STALL_S, TRY_S = 5, 10, 60
"""Seconds after which a try is given up: no connection; no further byte; not whole."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 15.0
"""Between two tries; doubled from one to the next, of which a random half to all is waited."""

CREDENTIALS = {
    "http": "give user and password in the address: http://USER:PASSWORD@HOST/...",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true: a public bucket)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS (GOOGLE_SKIP_SIGNATURE=true: a public bucket)",
}
CREDENTIALS["https"] = CREDENTIALS["http"]

STATUS = r"status code: (\d{3}[\w -]*\w)"
"""In the text of an error."""

METADATA = ("169.254.169.254", "metadata.google")
"""Addresses that obstore asks for credentials last: they answer on machines of the cloud."""

T = TypeVar("T")


class _Asked(NamedTuple):
    """A range of a file, and the future that gets its bytes."""

    name: str
    start: int
    end: int
    future: Future[bytes]


class _Wrong(Exception):
    """An answer that is not what was asked for."""


class Bucket(Storage):
    """A web server or bucket.

    Args:
        root: such as `s3://bucket/prefix`; credentials come from the environment, as obstore takes them.
        retry_s: seconds after which a request that has failed is not tried again.
    """

    def __init__(self, root: str, retry_s: float) -> None:
        self.root = root
        self.scheme = is_remote(root)
        self.retry_s = retry_s
        self.states: dict[str, str] = {}
        """Of each file that was seen, its size and ETag, or when it was changed: another file, another state."""
        self.knows_ranges = False
        self._asked: list[_Asked] = []
        self._asking = Lock()

    def __reduce__(self) -> Any:
        return Bucket, (self.root, self.retry_s)

    def read(self, name: str, start: int, end: int) -> bytes:
        return submit(self.fetch(name, start, end)).result()

    def begin(self, name: str, start: int, end: int) -> Future[bytes]:
        """As `Storage.begin`. Only the first range of a file tells whether it has changed: who wants to know
        that of others compares checksums, and reads again what differs."""
        asked, loop = _Asked(name, start, end, Future()), _loop()
        with self._asking:
            self._asked.append(asked)
            is_first = len(self._asked) == 1
        if is_first:
            loop.call_soon_threadsafe(loop.call_later, TOGETHER_S, self._ask)
        return asked.future

    def write(self, name: str, path: Path) -> None:
        submit(self._put(name, path)).result()

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except MissingError:
            return False
        return True

    def size(self, name: str) -> int:
        return submit(self.head(name)).result()

    # In the loop

    def _ask(self) -> None:
        """Ask for all ranges that were begun since the last call."""
        with self._asking:
            asked, self._asked = self._asked, []
        of_files: dict[str, list[_Asked]] = {}
        for one in asked:
            if one.future.set_running_or_notify_cancel():
                of_files.setdefault(one.name, []).append(one)
        for name, ranges in of_files.items():
            # Only a call for one range tells the file's state.
            step = TOGETHER if name in self.states else 1
            for start in range(0, len(ranges), step):
                _keep(self._answer(ranges[start : start + step]))

    async def _answer(self, asked: "list[_Asked]") -> None:
        """Fetch ranges of a file: in one call, or each by itself if that goes wrong."""
        try:
            if not await self._answer_together(asked):
                await asyncio.gather(*map(self._answer_alone, asked))
        except asyncio.CancelledError:
            for one in asked:
                if not one.future.done():
                    one.future.set_exception(StorageError("this process has ended"))

    async def _answer_together(self, asked: "list[_Asked]") -> bool:
        [name, *_], starts, ends, _ = zip(*asked, strict=True)
        if name not in self.states or not all(
            0 < end - start <= PART for _, start, end, _ in asked
        ):
            return False
        try:
            async with slots:
                found = await obstore.get_ranges_async(
                    self._store, name, starts=starts, ends=ends, coalesce=0
                )
        except (said.BaseError, OSError, ValueError, TimeoutError):
            return False
        if any(len(f) != end - start for f, start, end in zip(found, starts, ends, strict=True)):
            return False
        for one, content in zip(asked, found, strict=True):
            one.future.set_result(bytes(content))
        return True

    async def _answer_alone(self, one: "_Asked") -> None:
        try:
            one.future.set_result(await self.fetch(one.name, one.start, one.end))
        except Exception as error:
            one.future.set_exception(error)

    async def fetch(self, name: str, start: int, end: int) -> bytes:
        """As `read`."""
        if end - start <= PART:
            return await self._fetch_part(name, start, end) if end > start else b""
        whole = bytearray(end - start)

        async def keep(at: int, part: bytes) -> None:
            whole[at - start : at - start + len(part)] = part

        await self.fetch_parts(name, start, end, keep)
        return bytes(whole)

    async def fetch_parts(
        self, name: str, start: int, end: int, keep: Callable[[int, bytes], Awaitable[None]]
    ) -> None:
        """Fetch a long range in parts, several at once; `keep` gets the start of each and its bytes."""

        async def fetch_part(at: int) -> None:
            async with parts:
                await keep(at, await self._fetch_part(name, at, min(at + PART, end)))

        tasks = [asyncio.create_task(fetch_part(at)) for at in range(start, end, PART)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch_part(self, name: str, start: int, end: int) -> bytes:
        async def ask() -> bytes:
            answer = await obstore.get_async(self._store, name, options={"range": (start, end)})
            self.knows_ranges = True
            self._check_same(name, answer.meta)
            if answer.meta["size"] < end:
                raise too_short(self.address(name), answer.meta["size"], end)
            read = bytes(await answer.bytes_async())
            if len(read) != end - start:
                raise _Wrong(f"{len(read):,} bytes instead of {end - start:,}")
            return read

        return await self._until_it_works(name, ask)

    async def head(self, name: str) -> int:
        """As `size`."""

        async def ask() -> int:
            meta = await obstore.head_async(self._store, name)
            self._check_same(name, meta)
            return meta["size"]

        return await self._until_it_works(name, ask)

    async def _put(self, name: str, path: Path) -> None:
        in_parts = None if self.scheme in ("s3", "gs") else False

        async def ask() -> None:
            await obstore.put_async(self._store, name, path, use_multipart=in_parts)

        await self._until_it_works(name, ask)
        self.states.pop(name, None)

    def _check_same(self, name: str, meta: Any) -> None:
        state = f"{meta['size']:,} bytes, {meta['e_tag'] or meta['last_modified']}"
        if self.states.setdefault(name, state) != state:
            raise StorageError(
                f"{self.address(name)} has changed since this run began to read it: {self.states[name]}; "
                f"now {state}; data that is in use has to stay as it is",
                may_pass=False,
            )

    async def _until_it_works(self, name: str, ask: Callable[[], Awaitable[T]]) -> T:
        began, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                async with slots:
                    return await ask()
            except (said.BaseError, FileNotFoundError, ValueError, TimeoutError, _Wrong) as error:
                failure, seen = error, f"{self.address(name)}: {_seen(error)}"
            if isinstance(failure, FileNotFoundError):
                raise MissingError(f"{seen}; set data.root to the place that holds it")
            fix = self._fix(failure)
            if fix:
                raise StorageError(f"{seen}; {fix}", may_pass=False)
            away = time.monotonic() - began
            if away >= self.retry_s:
                raise StorageError(
                    f"{seen}, tried {tries} times in {away:.0f} s; see whether the server answers, or let "
                    f"it stay away for longer than data.retry_s={self.retry_s:g}"
                )
            pause = min(FIRST_PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1)
            await asyncio.sleep(min(pause, self.retry_s - away))

    def _fix(self, error: Exception) -> str:
        """What mends an error that another try would meet again; empty if it may pass."""
        status = re.search(STATUS, str(error))
        lacks_credentials = any(place in str(error) for place in METADATA)
        if lacks_credentials or (status and status[1][:3] in ("401", "403")):
            return CREDENTIALS[self.scheme]
        if self.scheme == "s3" and "configured region" in str(error):
            return "set AWS_REGION to the region of the bucket"
        if isinstance(error, said.NotSupportedError) and not self.knows_ranges:
            return "use a server that answers requests for ranges of bytes, such as nginx"
        if status and status[1][:3] == "416":
            return CUT
        is_refused = status and status[1][0] == "4" and status[1][:3] not in ("408", "429")
        if is_refused or "builder error" in str(error):
            return "see whether data.root names what is meant"
        return ""

    def address(self, name: str) -> str:
        """Of a file, as it may be shown."""
        return f"{without_credentials(self.root).rstrip('/')}/{name}"

    @cached_property
    def _store(self) -> Any:
        address = urlsplit(self.root)
        user, at, host = address.netloc.rpartition("@")
        bare = address._replace(netloc=host, path=address.path.rstrip("/")).geturl()
        basic = b64encode(unquote(user).encode()).decode()
        return from_url(
            bare,
            client_options={
                "allow_http": self.scheme != "https",  # for s3 and gs, the environment says
                **({"default_headers": {"authorization": f"Basic {basic}"}} if at else {}),
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "read_timeout": timedelta(seconds=STALL_S),
                "timeout": timedelta(seconds=TRY_S),
            },
            retry_config={"max_retries": 0},  # it does not see all that is wrong
        )


def _seen(error: Exception) -> str:
    """What an error says, in a few words without credentials."""
    text = str(error)
    status, code = re.search(STATUS, text), re.search(r"<Code>(\w+)</Code>", text)
    if status:
        return status[1] + (f" ({code[1]})" if code else "")
    if "TimedOut" in text:
        return f"no answer within {CONNECT_S} to {TRY_S} s"
    cause = re.search(r'message: "([^"]+)"|(Incomplete\w+)', text)
    first = without_credentials(text.partition("\n")[0]).rpartition(" - ")[2]
    return f"{first} ({cause[1] or cause[2]})" if cause else first


# The loop of the process

_starting = Lock()
_of_process: tuple[int, asyncio.AbstractEventLoop] | None = None
_tasks: set[asyncio.Task[None]] = set()
slots, parts = asyncio.Semaphore(IN_FLIGHT), asyncio.Semaphore(PARTS_IN_FLIGHT)


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the loop of this process.

    Raises:
        RuntimeError: the process was forked from one whose loop had begun; obstore would hang.
    """
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, _loop())
    except RuntimeError:
        coroutine.close()
        raise


def _keep(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in the loop, in which this is called; the loop itself may lose its task."""
    task = asyncio.create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _loop() -> asyncio.AbstractEventLoop:
    global _of_process
    if _of_process is None:
        with _starting:
            if _of_process is None:
                loop = asyncio.new_event_loop()
                thread = Thread(target=loop.run_forever, name="storage", daemon=True)
                thread.start()
                atexit.register(_stop, loop, thread)
                _of_process = os.getpid(), loop
    if _of_process[0] != os.getpid():
        raise RuntimeError(
            f"this process was forked from process {_of_process[0]}, which has read from a server, and what "
            "does so does not survive a fork; use multiprocessing's spawn or forkserver"
        )
    return _of_process[1]


def _stop(loop: asyncio.AbstractEventLoop, thread: Thread) -> None:
    """End what is under way before Python ends, whose remains obstore's threads would otherwise call."""
    if _of_process is None or _of_process[0] != os.getpid():
        return

    async def cancel() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(timeout=TRY_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=STALL_S)
