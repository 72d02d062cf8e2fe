from collections.abc import Iterator

import pytest

from tests.servers import WebServer


@pytest.fixture
def web() -> Iterator[WebServer]:
    """A server of files in memory."""
    server = WebServer()
    yield server
    server.close()
