"""Train a run for each combination of values, several at a time, each on one process or on several ranks.

    python sweep.py train.py optimizer.lr=0.1,0.01 seed=1,2
    python sweep.py --ranks 2 --jobs 2 train_ddp.py optimizer.lr=0.1,0.01 seed=1,2
    python sweep.py --trials 20 --jobs 4 train.py 'optimizer.lr=tag(log,interval(1e-4,1e-1))' optimizer=adamw,sgd
    python sweep.py --slurm "--nodes=2 --gpus-per-node=8" train_ddp.py optimizer.lr=0.1,0.01

Values are separated by commas, as Hydra takes them with -m. With --trials, Optuna chooses so many combinations,
by the metric of the best epoch of the runs before. Each run has a folder of its own below --out, beside
a log; on GPUs, runs share none. A run that is killed goes on from its newest checkpoint as long as it makes new
ones, and the same command again goes on with the sweep. At the end the runs are listed, the best first.
"""

import argparse
import ctypes
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

import runs
from conf.mistakes import Mistake, end, is_mistake
from launch.trials import Trials

LINES_OF_A_LOG = 12
ASKED_TO_LEAVE = 75  # runtime.preemption's, which would import torch
SECONDS_BETWEEN_LOOKS = 0.2
MOST_LETTERS = 100  # of a folder's name


def main() -> None:
    options = command_line()
    overrides = parsed(options.overrides)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.trials is None:
        trials, names = None, runs_of(overrides)
    else:
        trials = Trials(options.out, overrides, options.jobs)
        names = dict(trial_of(overrides, *made) for made in enumerate(trials.made()))
    if options.slurm is not None:
        submit(options, names)
        return
    places = list(range(options.jobs))
    environments = [environment(options, place) for place in places]
    waiting = deque(name for name in names if not has_ended(options.out / name))
    num_runs = options.trials or len(names)
    print(f"{options.out}: {num_runs} runs, {len(names) - len(waiting)} have ended already")
    running: dict[subprocess.Popen[bytes], tuple[str, int]] = {}
    made: dict[str, set[str]] = {}  # checkpoints before the last start
    failed: list[str] = []
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    num_passed_on = 0

    while running or ((waiting or len(names) < num_runs) and not asked):
        while (waiting or len(names) < num_runs) and places and not asked:
            if trials and not waiting:
                tell_of_ended(trials, names, options.out)
                name, names[name] = trial_of(overrides, len(names), trials.choose())
                waiting.append(name)
            name, place = waiting.popleft(), places.pop(0)
            print(f"{name}: starts{' again' if name in made else ''}", flush=True)
            made[name] = checkpoints_of(options.out / name)
            running[start(options, name, names[name], environments[place])] = name, place
        for _ in asked[num_passed_on:]:
            num_passed_on += 1
            for process in running:  # which saves and leaves
                process.send_signal(signal.SIGTERM)
        time.sleep(SECONDS_BETWEEN_LOOKS)
        for process in [process for process in running if process.poll() is not None]:
            name, place = running.pop(process)
            places.append(place)
            if has_ended(options.out / name):
                print(f"{name}: has ended", flush=True)
            elif not asked and checkpoints_of(options.out / name) != made[name]:
                waiting.appendleft(name)  # killed, but it was moving on
            elif not asked:
                failed.append(name)
                log = options.out / f"{name}.log"
                last = log.read_text(errors="replace").splitlines()[-LINES_OF_A_LOG:]
                print(f"{name}: failed with exit code {process.returncode}; the end of {log}:")
                print("\n".join(f"    {line}" for line in last), flush=True)

    if trials:
        tell_of_ended(trials, names, options.out)
    rows = [runs.read_run(options.out / name, options.out) for name in names]
    print(runs.table(runs.in_order(rows, "best"), "best"))
    if asked:
        print(f"asked to leave; the same command again goes on with {options.out}")
        sys.exit(ASKED_TO_LEAVE)
    sys.exit(bool(failed))


def command_line() -> argparse.Namespace:
    """What the user has asked for.

    Raises:
        Mistake: they do not fit each other or this machine.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="start each run by torchrun with so many ranks")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--trials", type=int, help="have Optuna choose so many combinations")
    parser.add_argument("--out", type=Path, help="folder of the sweep (default: by what is swept)")
    parser.add_argument("--slurm", help="submit an array of jobs with these options of sbatch")
    parser.add_argument("script", type=Path)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE or KEY=VALUE,VALUE")
    options = parser.parse_args()
    if not options.script.is_file():
        raise Mistake(f"{options.script} is no file; give a training script, such as train.py")
    for name in ("ranks", "jobs", "trials"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise Mistake(f"--{name} {value} is less than 1; use 1 or more")
    if options.trials is not None and options.slurm is not None:
        raise Mistake("--trials waits for results, which --slurm does not; use one of them")
    if options.ranks is None and options.slurm is None and "torchrun" in options.script.read_text():
        raise Mistake(f"{options.script} is started by torchrun: say with how many --ranks")
    if any(override.startswith("output_dir=") for override in options.overrides):
        raise Mistake("output_dir= would be the folder of all runs; use --out FOLDER")
    if options.out is None:
        swept = f"{crc32(' '.join(sorted(options.overrides)).encode()):08x}"
        options.out = Path("outputs") / "sweep" / f"{options.script.stem}-{swept}"
    return options


def parsed(overrides: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise Mistake(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from error


def runs_of(overrides: list[Override]) -> dict[str, list[str]]:
    """Of each run its name, and its overrides: every combination of the values."""
    for override in overrides:
        if isinstance(override.value(), IntervalSweep):
            raise Mistake(
                f"{override.input_line} has no end of values; use --trials NUMBER, or a list"
            )
    values = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [override.input_line or ""]
        for override in overrides
    ]
    swept = [place for place, override in enumerate(overrides) if override.is_sweep_override()]
    return {
        name_of(number, [chosen[place] for place in swept]): list(chosen)
        for number, chosen in enumerate(itertools.product(*values))
    }


def trial_of(
    overrides: list[Override], number: int, values: dict[str, Any]
) -> tuple[str, list[str]]:
    """The name and the overrides of a trial with these values."""
    chosen = [f"{key}={value}" for key, value in values.items()]
    fixed = [o.input_line or "" for o in overrides if not o.is_sweep_override()]
    return name_of(number, chosen), fixed + chosen


def name_of(number: int, swept: list[str]) -> str:
    # No = and no comma, which Hydra would read in output_dir=.
    return re.sub(r"[^\w.+-]", "_", f"{number}-{'-'.join(swept)}".rstrip("-"))[:MOST_LETTERS]


def tell_of_ended(trials: Trials, names: Iterable[str], out: Path) -> None:
    for number, name in enumerate(names):
        if has_ended(out / name):
            row = runs.read_run(out / name, out)
            trials.tell(number, row.best.get(row.metric))


def environment(options: argparse.Namespace, place: int) -> dict[str, str]:
    """The variables of the run that is `place`-th at the same time.

    Raises:
        Mistake: there are not enough GPUs for all.
    """
    num_ranks = options.ranks or 1
    found = dict(os.environ)
    every = [str(n) for n, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    visible = found.get("CUDA_VISIBLE_DEVICES", ",".join(every)).split(",")
    gpus = list(itertools.takewhile(lambda gpu: gpu not in ("", "-1"), visible))  # as CUDA reads it
    if gpus and "device=cpu" not in options.overrides:
        if len(gpus) < options.jobs * num_ranks:
            raise Mistake(
                f"--jobs {options.jobs} of {num_ranks} ranks need {options.jobs * num_ranks} GPUs, but "
                f"there are {len(gpus)}; use fewer, or device=cpu"
            )
        chosen = gpus[place * num_ranks : (place + 1) * num_ranks]
        return found | {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
    num_threads = len(os.sched_getaffinity(0)) // (options.jobs * num_ranks)
    return {"OMP_NUM_THREADS": str(max(1, num_threads))} | found


def start(
    options: argparse.Namespace, name: str, overrides: list[str], env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a run, or go on with it; what it prints goes to its log."""
    launcher = [sys.executable]
    if options.ranks:
        # Ranks that are alone on their machine find each other without a port that others may have.
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc_per_node={options.ranks}"]
    with (options.out / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [
                *launcher,
                options.script,
                *overrides,
                f"output_dir={options.out / name}",
                "resume=auto",
            ],
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches it once, from here
            preexec_fn=end_with_the_sweep,
        )


def end_with_the_sweep() -> None:
    """Have this process asked to leave when the sweep is killed."""
    set_signal_of_parents_death = 1
    ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGTERM)


def has_ended(folder: Path) -> bool:
    return (folder / "summary.json").exists()


def checkpoints_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoints/step-*.pt")}


def submit(options: argparse.Namespace, names: dict[str, list[str]]) -> None:
    """Submit the runs as an array of Slurm jobs, whose arguments lie in files named by their numbers."""
    for number, (name, overrides) in enumerate(names.items()):
        arguments = [*overrides, f"output_dir={options.out / name}"]
        (options.out / f"{number}.arguments").write_text("\n".join(arguments) + "\n")
    command = ["sbatch", f"--array=0-{len(names) - 1}%{options.jobs}", *shlex.split(options.slurm)]
    variables = {"SCRIPT": str(options.script), "SWEEP": str(options.out)}
    status = subprocess.run(
        [*command, "launch/slurm.sbatch"], env=os.environ | variables
    ).returncode
    if status == 0:
        print(f"python runs.py {options.out} lists the runs")
    sys.exit(status)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        if not is_mistake(error):
            raise
        end(error)
