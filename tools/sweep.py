"""Train a run for each combination of values, several at a time, each on one or several ranks.

    python -m tools.sweep script=train.py optimizer.lr=0.1,0.01 seed=1,2
    python -m tools.sweep script=train_ddp.py ranks=2 jobs=2 optimizer.lr=0.1,0.01 seed=1,2
    python -m tools.sweep script=train.py trials=20 jobs=4 \\
        'optimizer.lr=tag(log,interval(1e-4,1e-1))' optimizer=adamw,sgd

Values are separated by commas, as in Hydra's -m. `ranks=N` starts each run by torchrun with N
ranks; `jobs=N` trains N runs at a time, which share no GPU. With `trials=N`, Optuna chooses N
combinations by the metric of the best epoch of earlier runs. Each run has a folder below `out`
(default: outputs/sweep/...) and a log next to it, both named after its values and a checksum of the
script and all overrides. The same command continues the sweep, with the runs that were killed or
failed. At the end the runs are listed, the best first.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString

from conf.cli import parse_options, user_errors
from conf.errors import UserError, counted
from tools import runs

NUM_LOG_LINES = 12
MAX_NAME_LENGTH = 100
POLL_S = 0.1


class Trial(NamedTuple):
    """One run of the sweep."""

    overrides: list[str]
    folder: Path
    number: int | None  # Optuna's

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def has_ended(self) -> bool:
        return (self.folder / "summary.json").exists()


class Sweep:
    """The trials of a command line."""

    def __init__(self, script: Path, texts: list[str], out: str, num_trials: int) -> None:
        """Split the overrides; UserError if there is nothing to choose, or too much for a grid."""
        self.script = script
        name = self.checksum(texts)
        self.out = Path(out or f"outputs/sweep/{script.stem}-{name}").expanduser()
        self.out.mkdir(parents=True, exist_ok=True)
        overrides = OverridesParser.create().parse_overrides(texts)
        self.fixed = [str(each.input_line) for each in overrides if not each.is_sweep_override()]
        self.swept = {
            each.get_key_element(): each for each in overrides if each.is_sweep_override()
        }
        self.study: Any = None
        if num_trials and not self.swept:
            raise UserError("trials= needs a key such as 'optimizer.lr=interval(1e-4,1e-1)'")
        if num_trials:
            self.study = open_study(self.out, name)
            # A sweep that was killed may have left a trial without all of its values.
            complete = [t for t in self.study.trials if t.params.keys() == self.swept.keys()]
            self.trials = [self.make_trial(t.params, t.number) for t in complete]
        else:
            self.trials = [self.make_trial(values) for values in combinations(self.swept)]
        self.num_trials = num_trials or len(self.trials)

    def checksum(self, overrides: list[str]) -> str:
        content = " ".join([str(self.script), *sorted(overrides)])
        return f"{crc32(content.encode()):08x}"

    def make_trial(self, values: dict[str, Any], number: int | None = None) -> Trial:
        """Combine fixed overrides with these values of the swept ones."""
        chosen = [f"{key}={value}" for key, value in values.items()]
        overrides = self.fixed + chosen
        parts = chosen if number is None else [str(number), *chosen]
        # Without = and commas, which Hydra would read in output_dir=.
        name = re.sub(r"[^\w.+-]", "_", "-".join(parts))[:MAX_NAME_LENGTH]
        folder = self.out / f"{name}-{self.checksum(overrides)}".lstrip("-")
        return Trial(overrides, folder, number)

    def trials_in_turn(self) -> Iterator[Trial]:
        """Yield the trials that have not ended: those that are known, then those that Optuna
        chooses when their turn comes."""
        yield from [trial for trial in self.trials if not trial.has_ended()]
        while len(self.trials) < self.num_trials:
            self.report()
            chosen = self.study.ask()
            values = {key: suggestion(chosen, key, each) for key, each in self.swept.items()}
            self.trials.append(self.make_trial(values, chosen.number))
            yield self.trials[-1]

    def report(self) -> None:
        """Tell Optuna's study the metrics of the trials that have ended."""
        for trial in self.trials:
            if self.study and trial.has_ended():
                # NaN, of a run without a metric, counts as failed.
                score = runs.read_run(trial.folder, self.out).score("best")
                self.study.tell(trial.number, score, skip_if_finished=True)


def combinations(swept: dict[str, Override]) -> list[dict[str, str]]:
    """Return the values of the swept keys, one dictionary for each run."""
    for override in swept.values():
        if not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line} has infinitely many values; use trials=NUMBER, or a list"
            )
    values = [override.sweep_string_iterator() for override in swept.values()]
    return [dict(zip(swept, chosen, strict=True)) for chosen in itertools.product(*values)]


def open_study(folder: Path, name: str) -> Any:
    """Open Optuna's study of a sweep, in a file of its folder."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "trials.log")))
    study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", load_if_exists=True
    )
    # Another seed after each start, or the values of the first one would be drawn again.
    seed = len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return study


def suggestion(trial: Any, key: str, override: Override) -> Any:
    """Return the value that Optuna chooses for a key."""
    values: Any = override.value()
    if not isinstance(values, IntervalSweep):
        return trial.suggest_categorical(key, list(override.sweep_string_iterator()))
    suggest = trial.suggest_int if isinstance(values.start, int) else trial.suggest_float
    return suggest(key, values.start, values.end, log="log" in values.tags)


def train_all(sweep: Sweep, num_ranks: int, places: list[dict[str, str]]) -> int:
    """Train the trials, each with the environment variables of a free place; return the exit code.

    After a signal, the running ones save and exit, and no other one starts.
    """
    signals: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as under nohup
            signal.signal(each, lambda number, frame: signals.append(number))
    waiting = sweep.trials_in_turn()
    running: dict[subprocess.Popen[bytes], tuple[Trial, dict[str, str]]] = {}
    code, is_stopping = 0, False
    try:
        while True:
            while places and not signals and (trial := next(waiting, None)):
                print(f"{trial.folder.name}: starts", flush=True)
                place = places.pop(0)
                running[start(trial, sweep.script, num_ranks, place)] = trial, place
            if not running:
                return os.EX_TEMPFAIL if signals else code  # the former as of a stopped run
            time.sleep(POLL_S)
            if signals and not is_stopping:
                is_stopping = True
                for process in running:
                    process.terminate()
            for process in [each for each in running if each.poll() is not None]:
                trial, place = running.pop(process)
                places.append(place)
                if trial.has_ended():
                    print(f"{trial.folder.name}: has ended", flush=True)
                elif not signals:
                    code = 1
                    last = trial.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
                    said = f"{trial.folder.name}: failed with exit code {process.returncode}"
                    print("\n    ".join([f"{said}; {trial.log} ends:", *last]), flush=True)
    finally:  # after an error they save and exit, too
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def start(
    trial: Trial, script: Path, num_ranks: int, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start or resume a trial, whose output is appended to its log."""
    command = [sys.executable]
    if num_ranks:
        # Ranks on one machine find each other without a port that other runs may have.
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    folder = QuotedString(str(trial.folder), Quote.single).with_quotes()
    command += [str(script), *trial.overrides, f"output_dir={folder}", "resume=auto"]
    with trial.log.open("ab") as log:
        # In a session of its own a run gets no Ctrl-C of the terminal, but one SIGTERM.
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def environments(jobs: int, num_ranks: int, on_cpu: bool) -> list[dict[str, str]]:
    """Return the environment variables of the runs in each of the `jobs` places."""
    every = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    gpus = [gpu for gpu in visible if gpu not in ("", "-1")]
    if not gpus or on_cpu:
        num_threads = max(1, len(os.sched_getaffinity(0)) // (jobs * num_ranks))
        return [{"OMP_NUM_THREADS": str(num_threads), **os.environ}] * jobs
    if len(gpus) < jobs * num_ranks:
        raise UserError(
            f"jobs={jobs} of {counted(num_ranks, 'rank')} needs {jobs * num_ranks} GPUs, "
            f"but the number of visible GPUs is {len(gpus)}; use fewer jobs, or device=cpu"
        )
    places = [gpus[place * num_ranks :][:num_ranks] for place in range(jobs)]
    return [{**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(place)} for place in places]


def main(arguments: Sequence[str]) -> None:
    options, overrides = parse_options(
        __doc__, arguments, script=None, ranks="0", jobs="1", trials="0", out=""
    )
    script = Path(options["script"])
    if not script.is_file():
        raise UserError(f"script={script} is not a file; use a training script, such as train.py")
    for key, least in {"ranks": 0, "jobs": 1, "trials": 0}.items():
        if not options[key].isdecimal() or int(options[key]) < least:
            raise UserError(f"{key}={options[key]} is not valid; use {least} or more")
    if any(override.startswith("output_dir=") for override in overrides):
        raise UserError("output_dir= would be the same for all runs; use out=FOLDER")
    jobs, num_ranks = int(options["jobs"]), int(options["ranks"])  # 0 ranks: no torchrun
    places = environments(jobs, max(1, num_ranks), "device=cpu" in overrides)
    sweep = Sweep(script, overrides, options["out"], int(options["trials"]))
    num_ended = sum(trial.has_ended() for trial in sweep.trials)
    trials = counted(sweep.num_trials, "run")
    print(f"{sweep.out}: {trials}, {num_ended} ended already", flush=True)
    code = train_all(sweep, num_ranks, places)
    sweep.report()
    print(runs.listing([runs.read_run(t.folder, sweep.out) for t in sweep.trials], "best"))
    if code == os.EX_TEMPFAIL:
        print(f"stopped by a signal; the same command again continues {sweep.out}")
    sys.exit(code)


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
