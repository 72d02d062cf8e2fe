"""Train a run for each combination of values, several at a time, each on one or several ranks.

    python sweep.py script=train.py optimizer.lr=0.1,0.01 seed=1,2
    python sweep.py script=train_ddp.py ranks=2 jobs=2 optimizer.lr=0.1,0.01 seed=1,2
    python sweep.py script=train.py trials=20 jobs=4 \\
        'optimizer.lr=tag(log,interval(1e-4,1e-1))' optimizer=adamw,sgd

Values are separated by commas, as in Hydra's -m. `ranks=N` starts each run by torchrun with N
ranks; `jobs=N` trains N runs at a time, which share no GPU. With `trials=N`, Optuna chooses N
combinations by the metric of the best epoch of earlier runs. Each run has a folder below `out`
(default: outputs/sweep/...) and a log next to it, both named after its values and a checksum of the
script and all overrides. A run that was killed starts again as long as it makes new checkpoints,
and the same command continues the sweep. At the end the runs are listed, the best first.
"""

import fcntl
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString

import runs
from conf.cli import user_errors
from conf.credentials import masked
from conf.errors import UserError
from conf.options import parse_options

NUM_LOG_LINES = 12
MAX_NAME_LENGTH = 100


class Options(NamedTuple):
    """The command line."""

    script: Path
    ranks: int  # 0: without torchrun
    jobs: int
    trials: int  # 0: every combination
    out: Path
    overrides: list[str]


class Trial(NamedTuple):
    """One run of the sweep."""

    folder: Path
    overrides: list[str]
    number: int
    """Optuna's, with `trials`."""

    @property
    def log(self) -> Path:
        """File next to the folder that gets the output."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def has_ended(self) -> bool:
        return (self.folder / "summary.json").exists()

    def checkpoints(self) -> set[str]:
        return {path.name for path in self.folder.glob("checkpoints/step-*.pt")}


class Job(NamedTuple):
    """A trial that is running."""

    trial: Trial
    env: dict[str, str]
    checkpoints: set[str]  # of before it was started
    process: subprocess.Popen[bytes]


def main(arguments: Sequence[str]) -> None:
    options = command_line(arguments)
    overrides = OverridesParser.create().parse_overrides(options.overrides)
    free = [environment(options, place) for place in range(options.jobs)]
    options.out.mkdir(parents=True, exist_ok=True)
    # The runs inherit the open file: if this process is killed, it stays locked until they end.
    with (options.out / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"out={options.out} belongs to a sweep or to runs that are still going; wait for "
                "their end, or choose another out"
            ) from None
        except OSError:  # a file system without locks
            pass
        train_all(options, overrides, free, lock.fileno())


def train_all(
    options: Options, overrides: list[Override], free: list[dict[str, str]], lock: int
) -> None:
    """Train the runs that have not ended, list all of them, and exit.

    `free` are the environment variables of each of the `jobs` places.
    """
    signals: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as under nohup
            signal.signal(each, lambda number, frame: signals.append(number))

    study: Any = None
    if options.trials:
        file, name = options.out / "trials.log", checksum(options.script, options.overrides)
        study = import_module("sweep_optuna").Study(file, name, overrides, options.jobs)
    known = study.chosen() if study else list(enumerate(combinations(overrides)))
    trials = [make_trial(options, overrides, values, number) for number, values in known]
    waiting = [trial for trial in trials if not trial.has_ended()]
    num_trials = options.trials or len(trials)
    num_ended = len(trials) - len(waiting)
    print(f"{options.out}: {num_trials} runs, {num_ended} have ended already", flush=True)

    running: list[Job] = []
    failed, num_forwarded = False, 0
    while True:
        while free and not signals and (waiting or len(trials) < num_trials):
            if not waiting:
                report(study, trials)
                number, values = study.choose()
                trials.append(make_trial(options, overrides, values, number))
                waiting.append(trials[-1])
            running.append(start(options, waiting.pop(0), free.pop(0), lock))
        if not running:
            break
        for _ in signals[num_forwarded:]:
            num_forwarded += 1
            for job in running:  # saves and exits
                job.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        for job in [job for job in running if job.process.poll() is not None]:
            running.remove(job)
            free.append(job.env)
            trial, code = job.trial, job.process.returncode
            if trial.has_ended():
                print(f"{trial.folder.name}: has ended", flush=True)
            elif trial.checkpoints() != job.checkpoints:  # it was killed
                waiting.insert(0, trial)
            elif not signals:
                failed = True
                last = trial.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
                print(f"{trial.folder.name}: failed with exit code {code}; {trial.log} ends:")
                print("\n".join(f"    {line}" for line in last), flush=True)

    if study:
        report(study, trials)
    print(runs.listing([runs.read_run(trial.folder, options.out) for trial in trials], "best"))
    if signals:
        print(f"stopped by a signal; the same command again continues {options.out}")
        sys.exit(os.EX_TEMPFAIL)  # as a run that a signal has stopped
    sys.exit(failed)


def command_line(arguments: Sequence[str]) -> Options:
    """Read the options and the overrides; raise UserError if they do not fit each other."""
    given, overrides = parse_options(
        __doc__, arguments, script=None, ranks="0", jobs="1", trials="0", out=""
    )
    script = Path(given["script"])
    if not script.is_file():
        raise UserError(f"script={script} is not a file; use a training script, such as train.py")
    for key, least in {"ranks": 0, "jobs": 1, "trials": 0}.items():
        if not given[key].isdecimal() or int(given[key]) < least:
            raise UserError(f"{key}={given[key]} is not valid; use 1 or more")
    ranks, jobs, trials = (int(given[key]) for key in ("ranks", "jobs", "trials"))
    if trials and masked(overrides) != overrides:
        raise UserError(
            "trials= would store the user, password or query of an address in a file; put the "
            "address into an environment variable, for example data.root='${oc.env:NAME}'"
        )
    if any(override.startswith("output_dir=") for override in overrides):
        raise UserError("output_dir= would be the same for all runs; use out=FOLDER")
    default = Path("outputs", "sweep", f"{script.stem}-{checksum(script, overrides)}")
    out = Path(given["out"] or default).expanduser()
    return Options(script, ranks, jobs, trials, out, overrides)


def checksum(script: Path, overrides: list[str]) -> str:
    return f"{crc32(' '.join([str(script), *sorted(masked(overrides))]).encode()):08x}"


def combinations(overrides: list[Override]) -> list[dict[str, str]]:
    """Return the values of the swept keys, one dictionary for each run."""
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
    options: Options, overrides: list[Override], values: dict[str, Any], number: int
) -> Trial:
    """Combine fixed overrides with these values of the swept ones."""
    chosen = [f"{key}={value}" for key, value in values.items()]
    fixed = [str(each.input_line) for each in overrides if not each.is_sweep_override()]
    parts = [str(number), *chosen] if options.trials else chosen
    # Without = and commas, which Hydra would read in output_dir=.
    name = re.sub(r"[^\w.+-]", "_", "-".join(masked(parts)))[:MAX_NAME_LENGTH]
    name = f"{name}-{checksum(options.script, fixed + chosen)}".lstrip("-")
    return Trial(options.out / name, fixed + chosen, number)


def report(study: Any, trials: list[Trial]) -> None:
    """Tell the study the metrics of those of the trials that have ended."""
    for trial in trials:
        if trial.has_ended():
            row = runs.read_run(trial.folder, trial.folder.parent)
            study.tell(trial.number, row.score(row.metric))


def environment(options: Options, place: int) -> dict[str, str]:
    """Return the environment variables of the run in one of the `jobs` places."""
    num_ranks = max(1, options.ranks)
    every = [str(n) for n, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every)).split(",")
    gpus = [gpu for gpu in visible if gpu not in ("", "-1")]
    if not gpus or "device=cpu" in options.overrides:
        num_threads = len(os.sched_getaffinity(0)) // (options.jobs * num_ranks)
        return {"OMP_NUM_THREADS": str(max(1, num_threads)), **os.environ}
    if len(gpus) < options.jobs * num_ranks:
        raise UserError(
            f"jobs={options.jobs} of {num_ranks} ranks need {options.jobs * num_ranks} GPUs, "
            f"but there are {len(gpus)}; use fewer, or device=cpu"
        )
    chosen = gpus[place * num_ranks : (place + 1) * num_ranks]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def start(options: Options, trial: Trial, env: dict[str, str], lock: int) -> Job:
    """Start or resume a run; its output is appended to its log."""
    print(f"{trial.folder.name}: starts", flush=True)
    command = [sys.executable]
    if options.ranks:
        # Ranks on one machine find each other without a port that other runs may have.
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={options.ranks}"]
    folder = QuotedString(str(trial.folder), Quote.single).with_quotes()
    command += [str(options.script), *trial.overrides, f"output_dir={folder}", "resume=auto"]
    checkpoints = trial.checkpoints()
    with trial.log.open("ab") as log:
        # In a session of its own a run gets Ctrl-C once, from here.
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=True, pass_fds=[lock]
        )
    return Job(trial, env, checkpoints, process)


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
