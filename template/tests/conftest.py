from tests.conftest import *  # noqa: F403  # hooks and fixtures
