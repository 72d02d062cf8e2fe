"""Find the first thing that two runs compute differently: its phase, module and size.

    python -m tools.compare train.py train_ddp.py model.kwargs.batch_norm=false
    python -m tools.compare train_ddp.py mine.py steps=5 ranks=1,2 data.root=PHOTOS -- seed=1
    python -m tools.compare run=outputs/a run=outputs/b     # two finished runs: settings, logs

Two scripts in the current folder train for `steps` (3) steps and evaluate, in deterministic mode,
without dropout; those for torchrun on `ranks` (2). Overrides after -- are for the second script
alone.
"""

import difflib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections import ChainMap, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from conf.cli import parse_options, user_errors
from conf.errors import UserError, counted
from loaders.batch import num_samples, tensors_of

SETTINGS = ["deterministic=true", "fp32_precision=ieee", "model.compile=false", "log.images=0"]
SETTINGS += ["log.every_steps=1", "log.to=[tensorboard]", "ema.decay=0", "amp.init_scale=256"]
ROUNDING = {"float32": 1e-5, "float16": 5e-2, "bfloat16": 0.4}  # relative, in the first step
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
START, EVALUATED, RATE = "weight before the step", "evaluated weight", "learning rate"
LOCAL, NORM, USED = "gradient before averaging", "train/grad_norm", "gradient in the step"
PHASES = [START, "samples", "seed of dropout", "output of", "train/loss", LOCAL, NORM, USED, RATE]
PHASES += ["weight after the step", EVALUATED, "evaluated mode", "evaluated samples"]
PHASES += ["evaluated output of", "val/loss"]  # in the order of a step
CAUSES = {  # where one phrase says it
    "seed of dropout": "all ranks have the same dropout: seed_everything() without the rank",
    USED: "clipping, or a change between backward() and optimizer.step()",
    RATE: "optimizer.lr, or scheduler.step() at another place",
    "weight after the step": "another optimizer, weight decay or momentum",
    "evaluated mode": "no model.eval()",
    "evaluated output of": "another precision in evaluation",
    "val/loss": "sums that are not added over all ranks: dist.all_reduce(totals)",
}


class Recorder:
    """What a rank computes, by step, kind and name: numbers that add up over micro-batches."""

    def __init__(self) -> None:
        self.sums = defaultdict[tuple[int, str, str], Any](float)
        self.num_steps, self.step, self.phase = 0, 0, ""
        self.model, self.names = nn.Module(), dict[nn.Module, str]()  # until the model trains
        self.count = 0  # of samples, while the model or its wrapper computes
        nn.modules.module.register_module_forward_pre_hook(self.enter)
        nn.modules.module.register_module_forward_hook(self.leave)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)

    def add(self, kind: str, name: str, value: Any) -> None:
        """Add at most 65,536 sums of evenly spaced numbers; of shards, of all ranks."""
        whole = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
        flat = whole.detach().flatten().cpu().double()
        sums = torch.bincount(torch.arange(len(flat)) % 65_536, flat)  # all numbers count
        self.sums[self.step, self.phase + kind, name] += sums

    def add_samples(self, kind: str, name: str, value: Any) -> None:
        """Add the sums over the samples, of all tensors whose first dimension they are."""
        for number, x in enumerate(tensors_of(value)):
            if x.ndim and len(x) % self.count == 0:
                self.add(kind, f"{name} {number or ''}".strip(), x.float().sum(0))

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Hook before a module computes; the first one that trains weights is the model."""
        model = module.module if isinstance(module, WRAPPERS) else module
        trains = model.training and torch.is_grad_enabled()
        if not self.names and trains and any(not p.is_meta for p in model.parameters()):
            self.model, self.names = model, {each: name for name, each in model.named_modules()}
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    weight.register_hook(partial(self.add, LOCAL, name))
        if model is self.model and not self.count:
            self.count = num_samples(inputs)
            self.step, self.phase = self.num_steps - (not trains), "" if trains else "evaluated "
            if (self.step, f"{self.phase}mode", "") not in self.sums:
                self.add("mode", "", model.training)
                for name, value in model.state_dict().items():
                    self.add(START if trains else "weight", name, value)
            self.add_samples("samples", "", inputs)
        if isinstance(module, DROPOUTS) and module.p and trains:
            module.p = 0.0
            self.add("seed of dropout", "", torch.initial_seed())

    def leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Hook after a module has computed."""
        if self.count and module in self.names:
            self.add_samples("output of", self.names[module] or "the model", outputs)
        if module is self.model or isinstance(module, WRAPPERS):
            self.count = 0

    def before_step(self, optimizer: Any, *unused: Any) -> None:
        for name, weight in self.model.named_parameters():
            if weight.grad is not None:
                self.add(USED, name, weight.grad)
        self.add(RATE, "", [group["lr"] for group in optimizer.param_groups])

    def after_step(self, *unused: Any) -> None:
        for name, value in self.model.state_dict().items():
            self.add("weight after the step", name, value)
        self.num_steps += 1


class Computed:
    """What all ranks of a run have computed and logged, by step, kind and name, from its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.precision = json.loads((folder / "run.json").read_text())["precision"]
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        self.values = defaultdict[tuple[int, str, str], Tensor](partial(torch.zeros, 0))
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                self.values[event.step - 1, tag, ""] = torch.tensor([event.value])
        self.ranks = [torch.load(file) for file in folder.glob("rank-*.pt")]
        for key in ChainMap(*self.ranks):
            found = torch.stack([rank[key] for rank in self.ranks if key in rank])
            adds_up = key[1].endswith(("samples", "output of"))
            self.values[key] = found.sum(0) if adds_up else found.mean(0)
            if "seed" in key[1]:  # in its place, the share of the ranks that have one of their own
                self.values[key] = torch.tensor([len(found.unique(dim=0)) / len(found)])


def first_difference(one: Computed, two: Computed) -> tuple[str, float]:
    """Return the first difference beyond rounding as text, and the largest one within it."""
    precisions, largest = {one.precision, two.precision}, 0.0
    phases = [phase for phase in PHASES if phase != LOCAL or "float16" not in precisions]
    places = {key[:2] for key in one.values} & {key[:2] for key in two.values}
    keys = [key for key in one.values | two.values if key[1] in phases and key[:2] in places]
    for key in sorted(keys, key=lambda key: (key[0], phases.index(key[1]))):
        step, phase, name = key
        a, b = (run.values[key].nan_to_num() for run in (one, two))
        allowed = max(ROUNDING[precision] for precision in precisions) * 2**step  # it grows
        least = 0.1 * one.values[step, NORM, ""].norm() if phase in (LOCAL, USED) else 1e-30
        alone = 0.0 if "output" in phase or phase == RATE else torch.inf  # size, if one lacks it
        size = float((a - b).norm() / max(a.norm(), b.norm(), least)) if len(a) == len(b) else alone
        if size > allowed:
            text = f"first difference: step {step + 1}, {phase} {name}".rstrip()
            text += f"\nby {size:.2g}, where rounding explains {allowed:.0e}"
            if phase in CAUSES:
                text += f"\nlikely cause: {CAUSES[phase]}"
            return text, largest
        largest = max(largest, size)
    return "", largest


def train(script: str, ranks: str, folder: Path, overrides: list[str]) -> Computed:
    """Train a script, and return what it computes."""
    num_ranks = ranks if "torchrun" in Path(script).read_text() else 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", "--module", "tools.compare"]
    command += ["record", str(folder), script]
    if code := subprocess.run([*command, *overrides], stdout=sys.stderr).returncode:
        raise UserError(f"{script} has ended with exit code {code}, see above")
    return Computed(script, folder)


def compare_runs(one: Path, two: Path) -> bool:
    """Print how two finished runs differ; return True if their logs do."""
    for name in ("config.yaml", "summary.json"):
        a, b = ((folder / name).read_text().splitlines() for folder in (one, two))
        print(*difflib.unified_diff(a, b, f"{one}", f"{two}", n=0, lineterm=""), sep="\n")
    first, second = (Computed(folder.name, folder).values for folder in (one, two))
    shared = sorted(key for key in first.keys() & second.keys() if "perf" not in key[1])
    if not shared:
        raise UserError(f"{one} and {two} have logged nothing at the same step")
    for key in shared:
        if not torch.allclose(first[key], second[key], 1e-6, 0.0, equal_nan=True):
            values = f"{first[key].item():.7g} and {second[key].item():.7g}"
            print(f"the logs differ from step {key[0] + 1} on: {key[1]} {values}")
            return True
    print(f"the logs are equal to 1e-6 in {counted(len(shared), 'value')}")
    return False


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["record"]:  # in a process of its own
        folder, script, *overrides = arguments[1:]
        sys.argv, recorder = [script, f"output_dir={folder}", *SETTINGS, *overrides], Recorder()
        runpy.run_path(script, run_name="__main__")
        torch.save(dict(recorder.sums), f"{folder}/rank-{os.environ.get('RANK', '0')}.pt")
        return
    runs = [Path(a.removeprefix("run=")) for a in arguments if a.startswith("run=")]
    if len(runs) == 2:
        sys.exit(compare_runs(*runs))
    place = [*arguments, "--"].index("--")
    scripts = [a for a in arguments[:place] if a.endswith(".py") and "=" not in a]
    rest = [a for a in arguments[:place] if a not in scripts]
    options, overrides = parse_options(__doc__, rest, steps="3", ranks="2")
    if len(scripts) != 2:
        raise UserError("tools.compare takes two scripts, or run= twice; --help shows examples")
    ranks, overrides = options["ranks"].split(","), [f"max_steps={options['steps']}", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        one = train(scripts[0], ranks[0], Path(folder, "1"), overrides)
        two = train(scripts[1], ranks[-1], Path(folder, "2"), [*overrides, *arguments[place + 1 :]])
    if one.name == two.name:
        one.name, two.name = f"1st {one.name}", f"2nd {two.name}"
    difference, largest = first_difference(one, two)
    names = " and ".join(f"{run.name} (ranks: {len(run.ranks)})" for run in (one, two))
    print(f"{names}: {difference or f'equal to {largest:.0e} in all steps and evaluation'}")
    sys.exit(difference != "")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
