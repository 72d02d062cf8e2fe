import os

import pytest

# Two ranks or workers on few cores would otherwise fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """All tests but those of GPUs are about the CPU, and fork, which no process may that uses CUDA."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
