"""Train a run for each combination of values, several at a time, each on one process or on several ranks.

    python sweep.py script=train.py optimizer.lr=0.1,0.01 seed=1,2
    python sweep.py script=train_ddp.py ranks=2 jobs=2 optimizer.lr=0.1,0.01 seed=1,2
    python sweep.py script=train.py trials=20 jobs=4 'optimizer.lr=tag(log,interval(1e-4,1e-1))' optimizer=adamw,sgd

Values are separated by commas, as in Hydra's -m. `ranks=N` starts each run by torchrun with N ranks; `jobs=N` trains N
runs at a time, which share no GPU. With `trials=N`, Optuna chooses N combinations by the metric of the best epoch of
earlier runs. Each run has a folder below `out` (default: outputs/sweep/...) and a log next to it, both named after its
values and a checksum of the script and all overrides. A run that was killed starts again as long as it makes new
checkpoints, and the same command continues the sweep. At the end the runs are listed, the best first.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

import runs
from conf.cli import parse_options, user_errors
from conf.credentials import masked
from conf.errors import UserError
from launch.study import Study

NUM_LOG_LINES = 12
EXIT_CODE = 75  # as a run that a signal has stopped; runtime has the name, but would import torch
POLL_S = 0.2
MAX_NAME_LENGTH = 100


class Options(NamedTuple):
    """The command line."""

    script: Path
    ranks: int
    """0: without torchrun."""
    jobs: int
    trials: int
    """0: every combination."""
    out: Path
    overrides: list[str]


class Trial(NamedTuple):
    """One run of the sweep."""

    name: str
    """Of its folder and its log."""
    overrides: list[str]


def main() -> None:
    options = command_line(sys.argv[1:])
    overrides = parse(options.overrides)
    options.out.mkdir(parents=True, exist_ok=True)
    name = checksum(options.script, options.overrides)
    study = Study(options.out, name, overrides, options.jobs) if options.trials else None
    trials = [
        make_trial(options.script, overrides, values, number if study else None)
        for number, values in enumerate(study.values() if study else combinations(overrides))
    ]
    num_trials = options.trials or len(trials)
    environments = [environment(options, place) for place in range(options.jobs)]
    waiting = deque(trial for trial in trials if not has_ended(options.out / trial.name))
    print(f"{options.out}: {num_trials} runs, {len(trials) - len(waiting)} have ended already")
    running: dict[subprocess.Popen[bytes], tuple[Trial, dict[str, str]]] = {}
    checkpoints: dict[str, set[str]] = {}  # by name, before the last start
    failed: list[str] = []
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: signals.append(number))
    num_forwarded = 0

    while running or ((waiting or len(trials) < num_trials) and not signals):
        while (waiting or len(trials) < num_trials) and environments and not signals:
            if study and not waiting:
                report(study, trials, options.out)
                trials.append(make_trial(options.script, overrides, study.choose(), len(trials)))
                waiting.append(trials[-1])
            trial, env = waiting.popleft(), environments.pop(0)
            print(f"{trial.name}: starts{' again' * (trial.name in checkpoints)}", flush=True)
            checkpoints[trial.name] = checkpoints_of(options.out / trial.name)
            running[start(options, trial, env)] = trial, env
        while num_forwarded < len(signals):
            num_forwarded += 1
            for process in running:  # saves and exits
                process.send_signal(signal.SIGTERM)
        time.sleep(POLL_S)
        for process in [process for process in running if process.poll() is not None]:
            trial, env = running.pop(process)
            environments.append(env)
            if has_ended(options.out / trial.name):
                print(f"{trial.name}: has ended", flush=True)
            elif signals:
                continue
            elif checkpoints_of(options.out / trial.name) != checkpoints[trial.name]:
                waiting.appendleft(trial)  # killed, but it had made progress
            else:
                failed.append(trial.name)
                log = options.out / f"{trial.name}.log"
                last = log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
                print(
                    f"{trial.name}: failed with exit code {process.returncode}; the end of {log}:"
                )
                print("\n".join(f"    {line}" for line in last), flush=True)

    if study:
        report(study, trials, options.out)
    rows = [runs.read_run(options.out / trial.name, options.out) for trial in trials]
    print(runs.listing(rows, "best"))
    if signals:
        print(f"stopped by a signal; the same command again continues {options.out}")
        sys.exit(EXIT_CODE)
    sys.exit(bool(failed))


def command_line(arguments: list[str]) -> Options:
    """Read the options and the overrides.

    Raises:
        UserError: they do not fit each other.
    """
    given, overrides = parse_options(
        __doc__, arguments, script=None, ranks="0", jobs="1", trials="0", out=""
    )
    script = Path(given["script"])
    if not script.is_file():
        raise UserError(f"script={script} is no file; give a training script, such as train.py")
    for key, least in {"ranks": 0, "jobs": 1, "trials": 0}.items():
        if not given[key].isdecimal() or int(given[key]) < least:
            raise UserError(f"{key}={given[key]} is no number of {key}; use 1 or more")
    ranks, jobs, trials = (int(given[key]) for key in ("ranks", "jobs", "trials"))
    if not ranks and "torchrun" in script.read_text():
        raise UserError(f"script={script} is started by torchrun; give the number of ranks=")
    if trials and masked(overrides) != overrides:
        raise UserError(
            "trials= writes the values to a file, and an address among them has a user, password or query; "
            "put it into an environment variable: data.root='${oc.env:NAME}', for example"
        )
    if any(override.startswith("output_dir=") for override in overrides):
        raise UserError("output_dir= would be the folder of all runs; use out=FOLDER")
    default = Path("outputs", "sweep", f"{script.stem}-{checksum(script, overrides)}")
    return Options(script, ranks, jobs, trials, Path(given["out"] or default), overrides)


def checksum(script: Path, overrides: list[str]) -> str:
    return f"{crc32(' '.join([str(script), *sorted(masked(overrides))]).encode()):08x}"


def parse(overrides: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from error


def combinations(overrides: list[Override]) -> list[dict[str, str]]:
    """Values of the swept keys, one dictionary for each run.

    Raises:
        UserError: a key has an interval, which holds infinitely many values.
    """
    swept = [override for override in overrides if override.is_sweep_override()]
    for override in swept:
        if isinstance(override.value(), IntervalSweep):
            raise UserError(
                f"{override.input_line} has infinitely many values; use trials=NUMBER, or a list"
            )
    keys = [override.get_key_element() for override in swept]
    values = [list(override.sweep_string_iterator()) for override in swept]
    return [dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*values)]


def make_trial(
    script: Path, overrides: list[Override], values: dict[str, Any], number: int | None = None
) -> Trial:
    """Combine the fixed overrides with these values of the swept ones; Optuna's trials have numbers."""
    chosen = [f"{key}={value}" for key, value in values.items()]
    fixed = [
        override.input_line or "" for override in overrides if not override.is_sweep_override()
    ]
    parts = [*([] if number is None else [str(number)]), *chosen]
    # Without = and commas, which Hydra would read in output_dir=.
    name = re.sub(r"[^\w.+-]", "_", "-".join(masked(parts)))[:MAX_NAME_LENGTH]
    return Trial(f"{name}-{checksum(script, fixed + chosen)}".lstrip("-"), fixed + chosen)


def report(study: Study, trials: list[Trial], out: Path) -> None:
    """Give the study the results of the trials that have ended."""
    for number, trial in enumerate(trials):
        if has_ended(out / trial.name):
            row = runs.read_run(out / trial.name, out)
            study.report(number, row.score(row.metric))


def environment(options: Options, place: int) -> dict[str, str]:
    """Environment variables of the run in one of the `jobs` places.

    Raises:
        UserError: there are not enough GPUs for all places.
    """
    num_ranks = max(1, options.ranks)
    found = dict(os.environ)
    every = [str(n) for n, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    visible = found.get("CUDA_VISIBLE_DEVICES", ",".join(every)).split(",")
    gpus = list(itertools.takewhile(lambda gpu: gpu not in ("", "-1"), visible))  # as CUDA reads it
    if gpus and "device=cpu" not in options.overrides:
        if len(gpus) < options.jobs * num_ranks:
            raise UserError(
                f"jobs={options.jobs} of {num_ranks} ranks need {options.jobs * num_ranks} GPUs, but "
                f"there are {len(gpus)}; use fewer, or device=cpu"
            )
        chosen = gpus[place * num_ranks : (place + 1) * num_ranks]
        return found | {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
    num_threads = len(os.sched_getaffinity(0)) // (options.jobs * num_ranks)
    return {"OMP_NUM_THREADS": str(max(1, num_threads))} | found


def start(options: Options, trial: Trial, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start or resume a run; its output is appended to its log."""
    command = [sys.executable]
    if options.ranks:
        # Ranks on one machine find each other without a port that other runs may have.
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={options.ranks}"]
    command += [str(options.script), *trial.overrides]
    command += [f"output_dir={options.out / trial.name}", "resume=auto"]
    with (options.out / f"{trial.name}.log").open("ab") as log:
        # In a session of its own a run gets Ctrl-C once, from here.
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def has_ended(folder: Path) -> bool:
    return (folder / "summary.json").exists()


def checkpoints_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoints/step-*.pt")}


if __name__ == "__main__":
    with user_errors():
        main()
