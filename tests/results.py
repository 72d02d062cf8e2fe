"""What a run has left in its folder, and whether two runs have left the same."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from loaders import build_loaders
from models import build_model
from runtime import evaluate
from runtime.checkpoint_files import (
    Shards,
    best_of,
    map_named,
    newest_first,
    read_state,
    read_weights,
    with_shards,
)
from tasks import build_task
from tests.helpers import make_config

# Equal to the last bit, all tensors in them included.
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def steps_saved(output_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (output_dir / "checkpoints").glob("step-*"))


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoint_of(output_dir: Path, step: int | None = None, best: bool = False) -> dict[str, Any]:
    """The newest checkpoint of a run, that of a step, or the best; its shards are put together."""
    found = newest_first(output_dir / "checkpoints")
    newest = best_of(found) if best else found[0]
    path = newest if step is None else step_folder(output_dir, step)
    assert path is not None
    state = with_shards(read_state(path), path)
    return map_named(lambda _, x: x.whole() if isinstance(x, Shards) else x, state)


def with_numbers(name: str, value: Any) -> Any:
    """A value that `==` compares: the type and the numbers of a tensor."""
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value


def assert_same_state(one: Path, other: Path) -> None:
    """The newest checkpoints of two runs are equal in all that decides how a run goes on."""
    first, second = (map_named(with_numbers, checkpoint_of(run)) for run in (one, other))
    for name in (first.keys() | second.keys()) - {"progress", "config", "facts"}:
        assert first[name] == second[name], name


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
    """(step, value) of a TensorBoard scalar, by step: files of one second have no order."""
    return sorted((event.step, event.value) for event in events_of(output_dir).Scalars(tag))


def values_of(output_dir: Path, tag: str) -> list[float]:
    return [value for _, value in scalars_of(output_dir, tag)]
