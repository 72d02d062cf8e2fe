"""Find the first thing that two runs compute differently, and its likely cause.

    python compare.py train.py train_ddp.py model.kwargs.batch_norm=false
    python compare.py train.py mine.py steps=5 data.root=PHOTOS -- optimizer.lr=0.01
    python compare.py train_ddp.py train_ddp.py ranks=1,2
    python compare.py run=outputs/a run=outputs/b     # two finished runs: settings, versions, logs

Two scripts beside this one train for `steps` (3) steps and evaluate, in deterministic mode, without
dropout. Samples of ranks and micro-batches are put together; scripts that torchrun starts have
`ranks` (2) ranks. Overrides after -- are the second script's alone. Exit code 1: a difference.
"""

import ast
import json
import math
import runpy
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from conf.cli import user_errors
from conf.errors import UserError
from conf.options import parse_options
from runtime.computed import Computed, Kind, read_log, read_recorded, recorded

SETTINGS = ["deterministic=true", "fp32_precision=ieee", "model.compile=false", "log.images=0"]
SETTINGS += ["log.every_steps=1", "log.to=[tensorboard]"]
SETTINGS += ["ema.decay=0"]  # part: ema
SETTINGS += ["amp.init_scale=256"]  # part: amp
ROUNDING = {"float32": 1e-5, "float16": 5e-2, "bfloat16": 0.4}  # relative, in the first step
CAUSES = {
    Kind.START: "another model or seed, or a seed of the rank before the model is built",
    Kind.SAMPLES: "another order of data, by seed or shares of ranks, or another crop or decoder",
    Kind.RANDOM: "all ranks have the same dropout: seed_everything() without the rank",
    Kind.OUTPUT: "another layer or precision, F.dropout, or a layer that sees others of its batch",
    Kind.LOSS: "another loss, or one that is not a mean over samples",
    Kind.OUTER: "backward() is not called on the loss that is recorded",
    Kind.LOCAL: "a change between loss and backward()",
    Kind.NORM: "gradients that are not cleared, or are changed, or a norm of some of them",
    Kind.USED: "clipping, or another change between backward() and optimizer.step()",
    Kind.RATE: "optimizer.lr, warm-up or length of the schedule",
    Kind.AFTER: "another optimizer, weight decay or momentum, or a change beside optimizer.step()",
    Kind.EVALUATED: "other weights are evaluated than trained",
    Kind.COUNTED: "samples that are left out, or another validation split",
    Kind.ANSWER: "another precision in evaluation",
    Kind.METRIC: "sums that are not added over all ranks: dist.all_reduce(totals)",
}
"""The likely cause of a difference, by what differs."""


class Difference(NamedTuple):
    """The first thing that two runs compute differently."""

    step: int
    what: str
    size: float  # relative to the larger L2 norm
    rounding: float
    cause: str


def first_difference(one: Computed, two: Computed) -> tuple[Difference | None, float]:
    """Return the first difference beyond rounding, if any, and the largest one within it."""
    largest, precisions = 0.0, {one.precision, two.precision}
    clear: dict[str, Any] = {}
    for at, (first, second) in enumerate(zip(one.steps, two.steps, strict=False)):
        rounding = max(ROUNDING[name] for name in precisions) * 2**at  # it grows from step to step
        kinds = {kind for kind, _ in first} & {kind for kind, _ in second}
        keys = [key for key in dict.fromkeys([*first, *second]) if key[0] in kinds]
        for kind, name in sorted(keys, key=lambda key: list(Kind).index(Kind(key[0]))):
            whole, allowed, size = name.partition(" on rank ")[0], rounding, math.inf
            a, b = (v.get((kind, name), v.get((kind, whole))) for v in (first, second))
            if (a is None or b is None) and kind in (Kind.OUTPUT, Kind.METRIC):
                continue
            if a is not None and b is not None and a.shape == b.shape:
                a, b = a.double().nan_to_num(), b.double().nan_to_num()
                if kind in (Kind.OUTER, Kind.LOCAL) and "float16" in precisions:
                    b = b / 2 ** round(math.log2(factor(a, b) or 1))  # the scaler's
                if kind in (Kind.AFTER, Kind.EVALUATED):
                    a, b = (value * clear.get(whole, 1) for value in (a, b))
                if kind == Kind.METRIC and name != "loss":  # equal scores may fall either way
                    allowed = max(rounding, 2 / len(first.get((Kind.COUNTED, ""), "1")))
                top = max(
                    value.double().norm() for (other, _), value in first.items() if other == kind
                )
                least = 0.1 * top if kind in (Kind.LOCAL, Kind.USED) else torch.tensor(1e-30)
                size = ((a - b).norm() / max(a.norm(), b.norm(), least)).item()
                if kind == Kind.USED:  # Adam makes a whole step of a gradient that is rounding
                    is_clear = a.abs() * len(a) ** 0.5 > rounding * top
                    clear[whole] = is_clear & clear.get(whole, is_clear)
            if size > allowed:
                cause = cause_of(Kind(kind), name, at, one, two, a, b)
                return Difference(at + 1, f"{kind} {name}".strip(), size, allowed, cause), largest
            largest = max(largest, size)
    if len(one.steps) != len(two.steps):
        fewer, at = min((len(run.steps), run.name) for run in (one, two))[::-1]
        cause = f"{fewer} lacks train_loader.set_epoch(epoch): it makes no step in the next epoch"
        return Difference(at + 1, "number of steps", math.inf, 0, cause), largest
    return None, largest


def factor(a: Tensor, b: Tensor) -> float:
    """Return x if b is about x * a, else 0."""
    ratio = (b.norm() / a.norm()).item() if a.norm() > 0 else 0.0
    return ratio if (b - ratio * a).norm() < 0.1 * b.norm() else 0.0


def cause_of(kind: Kind, name: str, at: int, one: Computed, two: Computed, a: Any, b: Any) -> str:
    """Return the likely cause of a difference in the step at this place in `steps`."""
    if a is None or b is None:
        has = "another model" if kind == Kind.START else "it frozen, unused or not in the optimizer"
        return f"{one.name if a is None else two.name} has {has}"
    runs, times = (one, two), factor(a, b) if a.shape == b.shape else 0.0
    more, times = two.name if times > 1 else one.name, max(times, times and 1 / times)
    counts = [len(samples) for run in runs for samples in run.samples[at]]
    for run in runs:
        used = {label: value for (k, label), value in run.steps[at].items() if k == Kind.USED}
        seen = list(chain(*run.samples[at]))
        if kind == Kind.SAMPLES and len(set(seen)) <= len(seen) / len(run.samples[at]) < len(seen):
            return f"all ranks of {run.name} load the same: build_loaders() without the rank"
        if kind in (Kind.NORM, Kind.USED) and any(
            not value.equal(used[label.partition(" on rank ")[0]]) for label, value in used.items()
        ):
            return f"{run.name} does not average the gradients: each rank has its own"
    if kind == Kind.OUTPUT and name in one.norms:
        return "BatchNorm without sync: each rank, or micro-batch, has its own statistics"
    if kind in (Kind.LOSS, Kind.OUTER) and any(near(times, n) for n in [*counts, sum(counts) / 2]):
        return f"the loss of {more} is a sum over the samples, not their mean"
    if kind in (Kind.NORM, Kind.USED) and any(near(times, len(run.samples[at])) for run in runs):
        return f"{more} adds the gradients over ranks, or the other one averages them twice"
    if kind in (Kind.NORM, Kind.USED) and times > 16 and "float16" in (r.precision for r in runs):
        return f"{more} clips the gradients before scaler.unscale_()"
    if kind == Kind.RATE:
        for run, late, value in ((one, two, b), (two, one, a)):
            for step, values in enumerate(run.steps):
                if step != at and near(values.get((kind, name), 0), value):
                    return f"{late.name} has that of step {step + 1}: scheduler.step() is misplaced"
        return f"it is {times:.6g} times as high in {more}: {CAUSES[Kind.RATE]}"
    if kind == Kind.EVALUATED and " on rank " in name:
        return "buffers are not broadcast before evaluation: sync_buffers(state)"
    if kind == Kind.EVALUATED:
        for run, value in ((two, b), (one, a)):
            old = run.steps[at - 1][Kind.AFTER, name] if at else run.steps[0][Kind.START, name]
            if torch.allclose(old.double() * (value != 0), value):
                return f"{run.name} updates the EMA before optimizer.step()"
    return CAUSES[kind]


def near(a: float, b: float) -> bool:
    return a > 0 and b != 1 and math.isclose(a, b, rel_tol=0.01)


def record(script: str, num_ranks: int, folder: Path, steps: int, overrides: list[str]) -> Computed:
    """Train a script for some steps, and record what it computes."""
    folder.mkdir()
    command = [sys.executable]
    if "torchrun" in (ast.get_docstring(ast.parse(Path(script).read_text())) or ""):
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += [__file__, "record", str(folder), str(steps), script, *SETTINGS]
    command += [f"max_steps={steps}", f"output_dir={folder / 'run'}", *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise UserError(f"{script} has ended with exit code {done.returncode}, see above")
    return read_recorded(folder, script, folder / "run")


def compare_scripts(arguments: list[str]) -> bool:
    """Train two scripts, and print their first difference; return True if there is one."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    scripts = [a for a in arguments[:place] if a.endswith(".py") and "=" not in a]
    rest = [a for a in arguments[:place] if a not in scripts]
    options, overrides = parse_options(__doc__, rest, steps="3", ranks="2")
    if len(scripts) != 2:
        raise UserError("compare.py takes two scripts, or run= twice; --help shows examples")
    try:
        steps, *ranks = [int(n) for n in [options["steps"], *options["ranks"].split(",")]]
    except ValueError:
        raise UserError(f"{options}: use numbers, such as steps=3 ranks=2 or ranks=1,2") from None
    both = [overrides, overrides + arguments[place + 1 :]]
    with tempfile.TemporaryDirectory() as folder:
        one, two = (
            record(script, ranks[n % len(ranks)], Path(folder) / str(n), steps, both[n])
            for n, script in enumerate(scripts)
        )
    if one.name == two.name:
        one, two = one._replace(name=f"1st {one.name}"), two._replace(name=f"2nd {two.name}")
    difference, largest = first_difference(one, two)
    names = " and ".join(f"{run.name} (ranks: {len(run.samples[0])})" for run in (one, two))
    if difference is None:
        print(f"{names}: equal to {largest:.0e} in {len(one.steps)} steps and evaluation")
        return False
    print(f"{names}: step {difference.step}, {difference.what} differs")
    print(f"by {difference.size:.2g}, where rounding explains {difference.rounding:.0e}")
    print(f"likely cause: {difference.cause}")
    return True


def flat(values: dict[str, Any], key: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    inner = [flat(v, f"{key}{k}.") for k, v in values.items() if isinstance(v, dict)]
    found = {f"{key}{name}": v for name, v in values.items() if not isinstance(v, dict)}
    return dict(chain(found.items(), *(more.items() for more in inner)))


def compare_runs(folders: list[Path]) -> bool:
    """Print how two finished runs differ; return True if their logs do."""
    about = []
    for folder in folders:
        if not (folder / "summary.json").is_file():
            raise UserError(f"run={folder} is not the folder of a finished run")
        run, summary = (json.loads((folder / f"{n}.json").read_text()) for n in ("run", "summary"))
        config = yaml.safe_load((folder / "config.yaml").read_text())
        summary = {key: summary[key] for key in ("versions", "device", "world_size", "bad_steps")}
        about.append(flat(config | run | summary | {"settings": 0, "name": 0, "output_dir": 0}))
    for key in dict.fromkeys(chain(*about)):
        if about[0].get(key) != about[1].get(key):
            print(f"{key}: {about[0].get(key)} and {about[1].get(key)}")
    a, b = map(read_log, folders)
    shared = a.keys() & b.keys()
    places = sorted((step, tag) for tag, step in shared if tag.startswith(("train/", "val/")))
    for step, tag in places:
        first, second = a[tag, step], b[tag, step]
        if not math.isclose(first, second, rel_tol=1e-6) and str(first) != str(second):
            print(f"the logs differ from step {step} on: {tag} {first:.7g} and {second:.7g}")
            return True
    print(f"the logs are equal to 1e-6 in {len(places)} values")
    return False


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["record"]:  # in a process of its own
        folder, steps, sys.argv = Path(arguments[1]), int(arguments[2]), arguments[3:]
        with recorded(folder, steps, sys.argv[0]):
            runpy.run_path(sys.argv[0], run_name="__main__")
        return
    folders = [Path(a.partition("=")[2]) for a in arguments if a.startswith("run=")]
    sys.exit(compare_runs(folders) if len(folders) == 2 else compare_scripts(arguments))


if __name__ == "__main__":
    with user_errors():
        main()
