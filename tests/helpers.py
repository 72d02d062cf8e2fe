"""Helpers of several tests: the configuration, and entry points in processes of their own."""

import copy
import gzip
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from hydra import compose as compose_config
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conf.check import check_effects
from conf.cli import load_config, to_config
from conf.errors import UserError
from conf.schema import Config
from loaders import build_loaders
from models import build_model
from models.pretrained import (
    Shards,
    best_of,
    map_named,
    newest_first,
    read_state,
    read_weights,
    with_shards,
)
from runtime import evaluate
from tasks import build_task

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("conf", "loaders", "models", "runtime", "tasks", "tools", "data")
SCRIPTS = sorted(path.name for path in REPOSITORY.glob("train*.py"))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

LIMIT_S = 240.0
"""For what would not come at all: no test is about how long something takes."""

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="only `pytest -m gpu` sees GPUs"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]

Watch = Callable[[str], AbstractContextManager]

STARTED: list[ForkServerProcess] = []
"""By the current test; conftest.py kills those that are left after it."""

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.preload"])  # conftest.py starts it


def wait_for(condition: Callable[[], Any], what: str, timeout: float = LIMIT_S) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.05)


@contextmanager
def refused(*shown: str) -> Iterator[None]:
    """Expect a UserError whose message has all these texts."""
    with pytest.raises(UserError) as error:
        yield
    assert all(text in str(error.value) for text in shown), error.value


def replace(path: Path, old: str, new: str) -> None:
    """Replace a text that a file has once."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@contextmanager
def signal_handlers_restored() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@cache
def composed(*groups: str) -> DictConfig:
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return compose_config("config", list(groups))


def make_config(*overrides: str) -> Config:
    """The configuration that these command-line overrides give.

    Hydra composes each set of groups, such as `data=cells`, once: this takes as long as many tests.
    """
    groups = [o for o in overrides if (REPOSITORY / "conf" / o.partition("=")[0]).is_dir()]
    values = [o for o in overrides if o not in groups]
    if any(value.startswith(("+", "~")) for value in values):
        return load_config(overrides)
    try:
        given = copy.deepcopy(composed(*groups))
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(given, override.key_or_group, override.value())
    except (HydraException, OmegaConfBaseException):
        return load_config(overrides)
    cfg = to_config(given)
    check_effects(cfg)
    return cfg


def has_ranks(script: str) -> bool:
    """True if tests start the script, or `plain/`'s of its name, on two ranks."""
    return "ddp" in script or "fsdp" in script


def script_for(technique: str, folder: Path = REPOSITORY) -> str:
    """The script `train_<technique>.py`, or `train.py` where all techniques are merged into it."""
    is_merged = technique.startswith("train_") and not (folder / technique).exists()
    return "train.py" if is_merged else technique


def folder_with(folder: Path, script: str) -> Path:
    """A folder like the repository's, with one script; its techniques are merged if nobody has."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        (folder / name).symlink_to(REPOSITORY / name)
    if not (REPOSITORY / script).exists() and (REPOSITORY / "tools" / "compose.py").exists():
        techniques = script.removesuffix(".py").split("_")[1:]
        (folder / script).write_text(import_module("tools.compose").compose(techniques))
    else:
        shutil.copy(REPOSITORY / script_for(script), folder / script)
    return folder


def commit(folder: Path) -> None:
    """Commit all files of a folder, which becomes a git repository if it is none."""
    name = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        [*name, "commit", "-q", "--allow-empty", "-m", "all"],
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True)


def fork(
    script: str,
    output_dir: Path,
    *overrides: str,
    folder: Path = REPOSITORY,
    num_ranks: int | None = None,
) -> tuple[list[ForkServerProcess], list[Path]]:
    """Start an entry point quickly, as `start()` does; by default on two ranks if it has any."""
    output_dir.mkdir(parents=True, exist_ok=True)
    command = [script, f"output_dir={output_dir}", *overrides]
    prints = output_dir.with_name(f"{output_dir.name}-{script}")
    return start(command, prints, num_ranks or (2 if has_ranks(script) else None), folder)


def train(script: str, output_dir: Path, *overrides: str, folder: Path = REPOSITORY) -> str:
    """Run what `fork()` starts to its end; returns what rank 0 printed."""
    codes, texts = run_to_end(script, output_dir, *overrides, folder=folder)
    assert not any(codes), "\n".join([f"{script}: {codes}", *texts])
    return texts[0]


def run_to_end(*arguments: Any, **options: Any) -> tuple[list[int | None], list[str]]:
    """Exit codes and prints of all ranks that `fork()` starts."""
    processes, prints = fork(*arguments, **options)
    return join(processes), [path.read_text() for path in prints]


def join(processes: Sequence[ForkServerProcess], timeout: float = LIMIT_S) -> list[int | None]:
    """Exit codes of processes; of those that did not end in time, that of a kill."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def start_process(function: Callable[..., Any], *args: Any, **options: Any) -> ForkServerProcess:
    """Call a function in a process of its own, which ends with the test at the latest."""
    process = FORKSERVER.Process(target=function, args=args, kwargs=options)
    STARTED.append(process)
    process.start()
    return process


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def print_to(path: Path) -> None:
    """Lead what this process prints to the end of a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for printed in (1, 2):
        os.dup2(file, printed)


def run_as_main(
    command: list[str],
    env: dict[str, str],
    prints: Path,
    folder: Path = REPOSITORY,
    watch: Watch = nullcontext,
) -> None:
    """Run a command line, as after `python`, in this process, which prints to a file."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    if not (folder / "conf").samefile(REPOSITORY / "conf"):  # the modules are a project's own
        for module in list(sys.modules):
            if (REPOSITORY / module.partition(".")[0]).exists():
                del sys.modules[module]
    os.environ.update(env)
    prints.unlink(missing_ok=True)
    print_to(prints)
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    with watch(command[0]):
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(command[0]), run_name="__main__")


def start(
    command: list[str],
    prints: Path,
    num_ranks: int | None = None,
    folder: Path = REPOSITORY,
    watch: Watch = nullcontext,
) -> tuple[list[ForkServerProcess], list[Path]]:
    """Start a command line, as after `python`, on each rank of a group, on the CPU.

    The script runs inside `watch(script)`; with `num_ranks=None` as `python` starts it.

    Returns:
        The process of each rank, forked, and the file `PRINTS-RANK.txt` that it prints to.
    """
    script, env = script_for(command[0], folder), dict(ENVIRONMENT)
    if num_ranks is not None:
        env |= {"WORLD_SIZE": f"{num_ranks}", "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(free_port())
    paths = [prints.with_name(f"{prints.name}-{rank}.txt") for rank in range(num_ranks or 1)]
    processes = []
    for rank, path in enumerate(paths):
        ranks = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if num_ranks is not None else {}
        arguments = [script, *command[1:]], env | ranks, path, folder, watch
        processes.append(start_process(run_as_main, *arguments))
    return processes, paths


@contextmanager
def cpu_with(features: dict[str, bool], script: str) -> Iterator[None]:
    """Run a script as if torch found these instructions on this CPU; to be bound for `start()`."""
    with mock.patch("torch.cpu.get_capabilities", return_value=features):
        yield


def answers_to(
    commands: list[list[str]], tmp_path: Path, num_ranks: int = 1, *arguments: Any, **more: Any
) -> list[tuple[int | None, str]]:
    """Exit codes and prints of rank 0 of command lines one after another, as of `start()`."""
    ranks = num_ranks if num_ranks > 1 else None
    answers = []
    for command in commands:
        prints = tmp_path / f"answers-{len(list(tmp_path.iterdir()))}"
        processes, paths = start(command, prints, ranks, *arguments, **more)
        answers.append((join(processes)[0], paths[0].read_text()))
    return answers


def without_reader(*command: str) -> tuple[int, bytes]:
    """Exit code and errors of a command line that prints to a pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    python = [sys.executable, *command]
    done = subprocess.run(python, cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    return done.returncode, done.stderr


def run_all(commands: list[list[str]], *arguments: Any, **more: Any) -> list[str]:
    """Prints of `answers_to()`, where each command line must succeed."""
    answers = answers_to(commands, *arguments, **more)
    for command, (code, printed) in zip(commands, answers, strict=True):
        assert code == 0, f"{' '.join(command)}\n{printed}"
    return [printed for _, printed in answers]


def workers_of(training: psutil.Process) -> list[psutil.Process]:
    """The DataLoader's, which are children of the process that they are forked from."""
    return [worker for child in training.children() for worker in child.children()]


def checkpoint_of(output_dir: Path, step: int | None = None, best: bool = False) -> dict[str, Any]:
    """The newest checkpoint of a run, that of a step, or the best; its shards are put together."""
    found = newest_first(output_dir / "checkpoints")
    path = best_of(found) if best else found[0]
    if step is not None:
        path = output_dir / "checkpoints" / f"step-{step:08d}"
    assert path is not None
    state = with_shards(read_state(path), path)
    return map_named(lambda _, x: x.whole() if isinstance(x, Shards) else x, state)


def summary_of(output_dir: Path) -> dict[str, Any]:
    return json.loads((output_dir / "summary.json").read_text())


def trace_of(output_dir: Path, rank: int = 0) -> list[str]:
    """Names of the events in the trace of a run's profiler."""
    with gzip.open(output_dir / f"trace-rank{rank}.json.gz", "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def events_of(output_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(output_dir), size_guidance={"scalars": 0})
    events.Reload()
    return events


def scalars_of(output_dir: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a TensorBoard scalar."""
    return [(event.step, event.value) for event in events_of(output_dir).Scalars(tag)]


def values_of(output_dir: Path, tag: str) -> list[float]:
    return [value for _, value in scalars_of(output_dir, tag)]


class Operations(TorchDispatchMode):
    """Counts the operations of torch, each of which is a launch on a GPU."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += not func.is_view
        return func(*args, **(kwargs or {}))


def weights_differ_by(one: Path, other: Path) -> float:
    """The largest difference of any weight in the newest checkpoints of two runs."""
    first, second = checkpoint_of(one)["model"], checkpoint_of(other)["model"]
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def published(run: Path) -> dict[str, Tensor]:
    return read_weights(str(run))[0]


def validated(weights: dict[str, Tensor], overrides: list[str]) -> dict[str, float]:
    """The validation metrics of these weights, by one process."""
    cfg = make_config(*overrides)
    train_loader, val_loader = build_loaders(cfg, torch.device("cpu"))
    task = build_task(cfg, train_loader)
    model = build_model(cfg.model, train_loader.in_channels, task.num_outputs)
    model.load_state_dict(weights)
    metrics = task.metrics(evaluate(model, task, val_loader)[0])
    return {f"val/{name}": value for name, value in metrics.items()}
