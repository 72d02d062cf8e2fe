"""What a script computes in its first steps and in evaluation, recorded by hooks of PyTorch."""

import csv
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from loaders.common import num_samples, tensors_of
from runtime.guard import BATCH_NORMS

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Recorder:
    """What a process computes in each step, by kind and name; outputs as sums over the samples."""

    def __init__(self) -> None:
        self.steps: list[defaultdict[tuple[str, str], Any]] = []
        self.now = self.values = defaultdict[tuple[str, str], Any](float)
        self.rank = int(os.environ.get("RANK", 0))
        self.num_ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.model = nn.Module()  # until it computes
        self.active: nn.Module | None = None  # the model or its wrapper, while it computes
        self.names: dict[nn.Module, str] = {}
        self.kept: dict[nn.Module, Tensor] = {}

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Hook before a module computes; the first one with weights is the model."""
        if isinstance(module, DROPOUTS):
            self.kept[module] = inputs[0].clone()
        model = module.module if isinstance(module, WRAPPERS) else module
        trains = model.training and torch.is_grad_enabled()
        if not self.names and trains and any(not p.is_meta for p in model.parameters()):
            self.model = model
            for name, m in model.named_modules():
                self.names[m] = (name or "the model") + " (BatchNorm)" * isinstance(m, BATCH_NORMS)
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    weight.register_hook(partial(self.add_gradient, name))
        if self.active is None and model is self.model and (trains or self.steps):
            self.active, self.count, self.random = module, num_samples(inputs), random_state()
            kind, weights, self.values = "samples", "weight before the step", self.now
            if not trains:
                kind, weights, self.values = "evaluated samples", "evaluated weight", self.steps[-1]
                self.keep(kind, "in training mode", torch.tensor([model.training]).double())
            if (kind, "count") not in self.values:
                self.keep_weights(weights)
            self.add(kind, "", inputs)
            self.add(kind, "count", torch.ones(self.count))

    def leave(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Hook after a module has computed; a dropout layer returns its inputs."""
        outputs = self.kept.pop(module, outputs)
        if self.active is not None and (name := self.names.get(module)):
            kind = "output of" if self.values is self.now else "output in evaluation of"
            self.add(kind, name, outputs)
        if module is self.active:
            self.active = None
            if not random_state().equal(self.random):
                self.keep("random numbers", "", self.random)
        return outputs

    def add(self, kind: str, name: str, value: Any) -> None:
        """Add the sums over the samples, of all tensors whose first dimension they are."""
        sums = [x.float().sum(0) for x in tensors_of(value) if x.ndim and not len(x) % self.count]
        if sums:
            self.values[kind, name] += torch.cat([numbers(total) for total in sums])

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        self.now["gradient before averaging", name] += numbers(gradient) / self.num_ranks

    def keep(self, kind: str, name: str, value: Tensor) -> None:
        """Keep what should be equal on all ranks."""
        self.values[kind, f"{name} on rank {self.rank}" if self.rank else name] = value

    def keep_weights(self, kind: str) -> None:
        for name, value in chain(self.model.named_parameters(), self.model.named_buffers()):
            self.keep(kind, name, numbers(value))

    def before_step(self, optimizer: Any, *unused: Any) -> None:
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for name, weight in self.model.named_parameters():
            if weight.grad is not None:
                self.keep("gradient in the step", name, numbers(weight.grad))
            if weight in rates:
                self.keep("learning rate", name, torch.tensor([float(rates[weight])]).double())

    def after_step(self, *unused: Any) -> None:
        self.keep_weights("weight after the step")
        self.steps.append(self.now)
        self.now = self.values = defaultdict(float)


def random_state() -> Tensor:
    """Return the state of torch's random numbers."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state() for _ in range(torch.cuda.is_initialized())]
    return torch.cat(states)


def numbers(tensor: Any) -> Tensor:
    """Return at most 65,536 numbers, evenly spaced, and their mean; of shards, of all ranks."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    flat = whole.detach().flatten().cpu().double().nan_to_num()
    return torch.cat([flat[:: len(flat) // 65_536 + 1], flat.mean().view(1)])


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Record what a script computes in this process, which is to end with it."""
    recorder = Recorder()
    modules.register_module_forward_pre_hook(recorder.enter)
    modules.register_module_forward_hook(recorder.leave)
    optimizers.register_optimizer_step_pre_hook(recorder.before_step)
    optimizers.register_optimizer_step_post_hook(recorder.after_step)
    try:
        yield
    finally:
        steps = [dict(step) for step in recorder.steps]
        torch.save(steps, folder / f"rank-{recorder.rank:06d}.pt")


class Computed(NamedTuple):
    """What all ranks of a run have computed: for each step, by kind, by name."""

    name: str
    precision: str
    num_ranks: int
    steps: list[dict[str, dict[str, Tensor]]]


def read_recorded(folder: Path, script: str, run: Path) -> Computed:
    """Read what `recorded()` wrote on all ranks, and the log of the run."""
    ranks = [torch.load(file) for file in sorted(folder.glob("rank-*.pt"))]
    precision = yaml.safe_load((run / "run.json").read_text())["precision"]
    computed, log = Computed(script, precision, len(ranks), []), read_log(run)
    for number, parts in enumerate(zip(*ranks, strict=False), 1):
        values: Any = defaultdict(lambda: defaultdict(float))
        for rank, part in enumerate(parts):
            for (kind, name), value in part.items():
                values[kind][name] += value
            values["samples of a rank"][rank] = part["samples", ""]
        if states := values.pop("random numbers", None):
            num_states = len(torch.stack([*states.values()]).unique(dim=0))
            values["random numbers"][""] = torch.tensor([num_states / len(states)]).double()
        for tag in ("train/loss", "train/grad_norm", "val/loss"):
            if (tag, number) in log:
                values[tag][""] = torch.tensor([log[tag, number]]).double().nan_to_num()
        computed.steps.append(values)
    return computed


def read_log(run: Path) -> dict[tuple[str, int], float]:
    """Read the numbers that a run has logged, by name and step."""
    if (run / "metrics.csv").exists():
        rows = list(csv.DictReader((run / "metrics.csv").open(newline="")))
        return {(row["name"], int(row["step"])): float(row["value"]) for row in rows}
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}
