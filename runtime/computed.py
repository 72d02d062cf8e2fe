"""What a script computes in its first steps and in evaluation, recorded by hooks of PyTorch."""

import csv
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.optim.swa_utils import AveragedModel

from loaders.batch import num_samples, tensors_of

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Kind(StrEnum):
    """What a step computes, in this order."""

    START = "initial weight"
    SAMPLES = "samples"
    RANDOM = "random numbers"
    OUTPUT = "output of"
    LOSS = "train/loss"
    OUTER = "gradient of the output"
    LOCAL = "gradient before averaging"
    NORM = "train/grad_norm"
    USED = "gradient in the step"
    RATE = "learning rate"
    AFTER = "weight after the step"
    EVALUATED = "evaluated weight"
    COUNTED = "evaluated samples"
    ANSWER = "output in evaluation of"
    METRIC = "val"


PER_RANK = (Kind.START, Kind.USED, Kind.RATE, Kind.AFTER, Kind.EVALUATED)

Values = dict[tuple[str, str], Any]
"""What was computed in a step, by its kind and the name of a module or weight."""


class Recorder:
    """What a process computes in its first steps, and in evaluation: lists of micro-batches."""

    def __init__(self, num_steps: int) -> None:
        self.steps: list[Values] = []
        self.now, self.num_steps = defaultdict[tuple[str, str], list[Any]](list), num_steps
        self.model: nn.Module | None = None
        self.active: nn.Module | None = None  # the model or its wrapper, while it computes
        self.names: dict[nn.Module, str] = {}
        self.kept: dict[nn.Module, Any] = {}

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Hook before a module computes; calls of the model in training and evaluation count."""
        if isinstance(module, DROPOUTS):
            self.kept[module] = inputs[0].clone()
        names = [name for name, _ in module.named_parameters()] if self.active is None else []
        if not names or module.training != torch.is_grad_enabled():
            return
        inner = module.module if isinstance(module, WRAPPERS) else module
        if self.model is None and module.training:
            self.model = inner
            self.names = {part: name for name, part in inner.named_modules() if name}
            self.keep_weights(self.now, Kind.START, inner)
            for name, parameter in inner.named_parameters():
                if parameter.requires_grad:
                    parameter.register_hook(
                        lambda g, n=name: self.now[Kind.LOCAL, n].append(flat(g))
                    )
        is_new = len(self.steps) < self.num_steps if module.training else bool(self.steps)
        if is_new and self.model and len(names) == len(list(self.model.parameters())):
            self.parts = self.now if module.training else self.steps[-1]
            self.active, self.count, self.random = module, num_samples(inputs), random_state()
            if not module.training and (Kind.COUNTED, "") not in self.parts:
                self.keep_weights(self.parts, Kind.EVALUATED, inner)
            self.keep(Kind.SAMPLES if module.training else Kind.COUNTED, "", inputs)

    def leave(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Hook after a module has computed; a dropout layer returns its inputs."""
        outputs = self.kept.pop(module, outputs)
        is_active = module is self.active
        if is_active:
            self.active = None
            self.keep(Kind.OUTPUT if module.training else Kind.ANSWER, "the model", outputs)
            if module.training and random_state() != self.random:
                self.now[Kind.RANDOM, ""].append(self.random)
            for leaf in tensors_of(outputs):
                if leaf.requires_grad:
                    leaf.register_hook(partial(self.keep, Kind.OUTER, ""))
        elif self.active is not None and module.training and module in self.names:
            self.keep(Kind.OUTPUT, self.names[module], outputs)
        return outputs

    def keep(self, kind: str, name: str, value: Any) -> None:
        """Keep numbers of each sample, of all tensors whose first dimension is samples."""
        n = self.count
        rows = [x.reshape(n, -1) for x in tensors_of(value) if x.ndim and len(x) % n == 0]
        if rows:
            self.parts[kind, name].append(torch.cat([thinned(row, 1024) for row in rows], 1))

    def keep_weights(self, parts: Values, kind: str, model: nn.Module) -> None:
        for name, value in chain(model.named_parameters(), model.named_buffers()):
            parts[kind, name] = [flat(value)]

    def before_step(self, optimizer: Any, *unused: Any) -> None:
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self.model.named_parameters() if self.model else ():
            if parameter.grad is not None:
                self.now[Kind.USED, name] = [flat(parameter.grad)]
            if parameter in rates:
                self.now[Kind.RATE, name] = [torch.tensor([float(rates[parameter])])]

    def after_step(self, *unused: Any) -> None:
        if self.model is not None and len(self.steps) < self.num_steps:
            self.keep_weights(self.now, Kind.AFTER, self.model)
            self.steps.append(self.now)
            self.now = defaultdict(list)


def random_state() -> int:
    """Return a checksum of the state of torch's random numbers."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state() for _ in range(torch.cuda.is_initialized())]
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))


def thinned(rows: Tensor, most: int) -> Tensor:
    """Return at most so many numbers of each row, evenly spaced, and the row's mean."""
    rows = rows.detach().float()
    return torch.cat([rows[:, :: -(-rows.shape[1] // most) or 1], rows.mean(1, True)], 1).cpu()


def flat(tensor: Any) -> Tensor:
    """Return numbers of a weight or gradient, gathered if it is sharded over ranks."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return thinned(whole.reshape(1, -1), 1 << 16)[0]


@contextmanager
def recorded(folder: Path, num_steps: int, script: str) -> Iterator[None]:
    """Record what a script computes in this process, into `SCRIPT-RANK.pt`."""
    recorder = Recorder(num_steps)
    hooks = [
        modules.register_module_forward_pre_hook(recorder.enter),
        modules.register_module_forward_hook(recorder.leave),
        optimizers.register_optimizer_step_pre_hook(recorder.before_step),
        optimizers.register_optimizer_step_post_hook(recorder.after_step),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        steps = [{(str(k), n): v for (k, n), v in step.items()} for step in recorder.steps]
        norms = [n for m, n in recorder.names.items() if "BatchNorm" in type(m).__name__]
        content = {"steps": steps, "norms": norms}
        torch.save(content, folder / f"{Path(script).stem}-{os.environ.get('RANK', 0)}.pt")


class Computed(NamedTuple):
    """What all ranks of a run have computed."""

    name: str
    steps: list[Values]
    samples: list[list[list[int]]]
    """Of each step and rank: checksums of the samples."""
    norms: list[str]
    """Names of the BatchNorms."""
    precision: str


def read_recorded(folder: Path, script: str, run: Path) -> Computed:
    """Read what `recorded()` wrote on all ranks, and the log of the run."""
    files = folder.glob(f"{Path(script).stem}-*.pt")
    by_rank = sorted(files, key=lambda file: int(file.stem.rpartition("-")[2]))
    ranks = [torch.load(file, weights_only=True) for file in by_rank]
    precision, log = json.loads((run / "run.json").read_text())["precision"], read_log(run)
    computed = Computed(script, [], [], ranks[0]["norms"], precision)
    for number, parts in enumerate(zip(*(rank["steps"] for rank in ranks), strict=False), 1):
        values: Values = {}
        for kind, name in parts[0]:
            pieces = [part.get((kind, name)) for part in parts]
            if kind in PER_RANK:
                labels = [name, *(f"{name} on rank {rank}" for rank in range(1, len(parts)))]
                found = zip(labels, pieces, strict=True)
                values |= {(kind, label): piece[0] for label, piece in found if piece}
            elif kind == Kind.LOCAL:
                values[kind, name] = sum(map(sum, pieces)) / len(parts)
            elif kind == Kind.RANDOM:
                values[kind, name] = torch.tensor(
                    [len({str(piece) for piece in pieces}) / len(parts)]
                )
            else:  # each rank has every world_size-th row of the batch
                rows = [torch.cat(piece) for piece in pieces]
                is_even = len({len(row) for row in rows}) == 1
                values[kind, name] = (
                    torch.stack(rows, 1).flatten(0, 1) if is_even else torch.cat(rows)
                )
        if (Kind.OUTER, "") in values:
            values[Kind.OUTER, ""] /= len(parts)  # the mean over ranks
        if (Kind.COUNTED, "") in values:
            places = {s: place for place, s in enumerate(checksums(values[Kind.COUNTED, ""]))}
            values[Kind.COUNTED, ""] = torch.tensor(sorted(places))
            for key in [key for key in values if key[0] == Kind.ANSWER]:
                values[key] = values[key][[places[s] for s in sorted(places)]]
        for (tag, step), value in log.items():
            if step == number and (tag in set(Kind) or tag.startswith("val/")):
                kind, _, name = (tag, "", "") if tag in set(Kind) else tag.partition("/")
                values[kind, name] = torch.tensor([value])
        computed.steps.append(values)
        computed.samples.append([checksums(torch.cat(part[Kind.SAMPLES, ""])) for part in parts])
    return computed


def checksums(rows: Tensor) -> list[int]:
    return [zlib.crc32(row.numpy().tobytes()) for row in rows]


def read_log(run: Path) -> dict[tuple[str, int], float]:
    """Read the numbers that a run has logged, by name and step."""
    if (run / "metrics.csv").exists():
        rows = list(csv.DictReader((run / "metrics.csv").open(newline="")))
        return {(row["name"], int(row["step"])): float(row["value"]) for row in rows}
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}
