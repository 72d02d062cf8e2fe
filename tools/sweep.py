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
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString

from conf.cli import parse_options, user_errors
from conf.errors import UserError, counted
from tools import runs

NUM_LOG_LINES = 12
MAX_NAME_LENGTH = 100


class Trial(NamedTuple):
    """One run of the sweep."""

    number: int
    """Its place in the grid, or Optuna's number."""
    overrides: list[str]
    folder: Path
    log: Path
    """File next to the folder that gets the output."""

    def has_ended(self) -> bool:
        return (self.folder / "summary.json").exists()


class Sweep:
    """The trials of a command line, which `jobs` threads train, each one after another."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Read the options and the overrides; raise UserError if they do not fit each other."""
        given, texts = parse_options(
            __doc__, arguments, script=None, ranks="0", jobs="1", trials="0", out=""
        )
        self.script = Path(given["script"])
        if not self.script.is_file():
            raise UserError(
                f"script={self.script} is not a file; use a training script, such as train.py"
            )
        for key, least in {"ranks": 0, "jobs": 1, "trials": 0}.items():
            if not given[key].isdecimal() or int(given[key]) < least:
                raise UserError(f"{key}={given[key]} is not valid; use {least} or more")
        if any(text.startswith("output_dir=") for text in texts):
            raise UserError("output_dir= would be the same for all runs; use out=FOLDER")
        self.ranks, self.jobs = int(given["ranks"]), int(given["jobs"])  # 0 ranks: no torchrun
        self.environments = environments(self.jobs, max(1, self.ranks), "device=cpu" in texts)

        name = self.checksum(texts)
        default = Path("outputs", "sweep", f"{self.script.stem}-{name}")
        self.out = Path(given["out"] or default).expanduser()
        self.out.mkdir(parents=True, exist_ok=True)
        overrides = OverridesParser.create().parse_overrides(texts)
        self.fixed = [str(each.input_line) for each in overrides if not each.is_sweep_override()]
        swept = {each.get_key_element(): each for each in overrides if each.is_sweep_override()}
        self.study: Any = None
        if int(given["trials"]):
            self.study = import_module("tools.sweep_optuna").Study(self.out, name, swept)
            known = self.study.chosen()
        else:
            known = dict(enumerate(combinations(swept)))
        self.trials = [self.make_trial(number, values) for number, values in known.items()]
        self.num_trials = int(given["trials"]) or len(self.trials)
        self.waiting = self.trials_in_turn()
        self.choosing, self.stopping = threading.Lock(), threading.Event()
        self.running: set[subprocess.Popen[bytes]] = set()

    def checksum(self, overrides: list[str]) -> str:
        content = " ".join([str(self.script), *sorted(overrides)])
        return f"{crc32(content.encode()):08x}"

    def make_trial(self, number: int, values: dict[str, Any]) -> Trial:
        """Combine fixed overrides with these values of the swept ones."""
        chosen = [f"{key}={value}" for key, value in values.items()]
        overrides = self.fixed + chosen
        parts = [str(number), *chosen] if self.study else chosen
        # Without = and commas, which Hydra would read in output_dir=.
        name = re.sub(r"[^\w.+-]", "_", "-".join(parts))[:MAX_NAME_LENGTH]
        name = f"{name}-{self.checksum(overrides)}".lstrip("-")
        return Trial(number, overrides, self.out / name, self.out / f"{name}.log")

    def trials_in_turn(self) -> Iterator[Trial]:
        """Yield the trials that have not ended: those that are known, then those that Optuna
        chooses when their turn comes."""
        yield from [trial for trial in self.trials if not trial.has_ended()]
        while len(self.trials) < self.num_trials:
            self.report()
            self.trials.append(self.make_trial(*self.study.choose()))
            yield self.trials[-1]

    def report(self) -> None:
        """Tell Optuna's study the metrics of the trials that have ended."""
        for trial in self.trials:
            if trial.has_ended():
                row = runs.read_run(trial.folder, self.out)
                self.study.tell(trial.number, row.score(row.metric))

    def train(self, env: dict[str, str]) -> bool:
        """Train one trial after another with these environment variables, until none is left or a
        signal has come; return False if one failed."""
        failed = False
        while not self.stopping.is_set():
            with self.choosing:
                trial = next(self.waiting, None)
            if trial is None:
                break
            print(f"{trial.folder.name}: starts", flush=True)
            code = self.run(trial, env)
            if trial.has_ended():
                print(f"{trial.folder.name}: has ended", flush=True)
            elif not self.stopping.is_set():
                failed = True
                last = trial.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
                said = f"{trial.folder.name}: failed with exit code {code}; {trial.log} ends:"
                print("\n    ".join([said, *last]), flush=True)
        return not failed

    def run(self, trial: Trial, env: dict[str, str]) -> int:
        """Start or resume a trial, whose output is appended to its log; return its exit code."""
        command = [sys.executable]
        if self.ranks:
            # Ranks on one machine find each other without a port that other runs may have.
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={self.ranks}"]
        folder = QuotedString(str(trial.folder), Quote.single).with_quotes()
        command += [str(self.script), *trial.overrides, f"output_dir={folder}", "resume=auto"]
        with trial.log.open("ab") as log:
            # In a session of its own a run gets Ctrl-C once, from `stop`.
            process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.running.add(process)
        if self.stopping.is_set():  # just now: `stop` may not have seen it
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        self.running.remove(process)
        return code

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the running trials save and exit, and no other one starts."""
        self.stopping.set()
        for process in list(self.running):
            process.send_signal(signal.SIGTERM)


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


def combinations(swept: dict[str, Override]) -> list[dict[str, str]]:
    """Return the values of the swept keys, one dictionary for each run."""
    for override in swept.values():
        if not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line} has infinitely many values; use trials=NUMBER, or a list"
            )
    values = [override.sweep_string_iterator() for override in swept.values()]
    return [dict(zip(swept, chosen, strict=True)) for chosen in itertools.product(*values)]


def main(arguments: Sequence[str]) -> None:
    sweep = Sweep(arguments)
    num_ended = sum(trial.has_ended() for trial in sweep.trials)
    trials = counted(sweep.num_trials, "run")
    print(f"{sweep.out}: {trials}, {num_ended} ended already", flush=True)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as under nohup
            signal.signal(each, sweep.stop)
    with ThreadPoolExecutor(sweep.jobs) as pool:
        succeeded = all(list(pool.map(sweep.train, sweep.environments)))
    if sweep.study:
        sweep.report()
    print(runs.listing([runs.read_run(t.folder, sweep.out) for t in sweep.trials], "best"))
    if sweep.stopping.is_set():
        print(f"stopped by a signal; the same command again continues {sweep.out}")
        sys.exit(os.EX_TEMPFAIL)  # as a run that a signal has stopped
    sys.exit(not succeeded)


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
