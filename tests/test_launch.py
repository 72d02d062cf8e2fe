"""The scripts that start a run on a cluster, as far as a machine without one can check them."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from conf.cli import with_home
from tests.helpers import REPOSITORY, make_config
from tests.processes import wait_for

SBATCH = REPOSITORY / "launch" / "slurm.sbatch"
TRAINJOB = REPOSITORY / "launch" / "trainjob.yaml"
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.slow
RUN = "outputs/train_ddp/4711"

# They write down their arguments; what srun does in place of the step is added.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > srun.txt
env >> srun.txt
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '%s\\n' localhost node-b; exit; fi
echo "$@" >> requeue.txt
exit "$REFUSED"
"""
# srun on two nodes: one torchrun each, all in the environment of their own; signals are passed on.
TWO_NODES = """
while [[ $1 != torchrun ]]; do shift; done
"$@" & first=$!
"$@" & second=$!
trap 'kill -USR1 $first $second' USR1
wait  # until a signal comes
wait $first $second
"""
# A training script that saves for a second when signalled, and then leaves as train_ddp.py does.
TRAIN = """
import os, pathlib, signal, sys, time

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
run, rank = pathlib.Path(sys.argv[1].removeprefix("output_dir=")), os.environ["RANK"]
run.mkdir(parents=True, exist_ok=True)
(run / f"ready{rank}").touch()
signal.sigwait({signal.SIGUSR1})
time.sleep(1)
(run / "requeue").touch()
(run / f"saved{rank}").touch()
sys.exit(75)
"""
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "8",
    "REFUSED": "0",  # what scontrol exits with
}


def run_job(
    folder: Path,
    step: str,
    *overrides: str,
    meanwhile: Callable[[Popen[str]], object] = Popen.poll,
    **variables: str,
) -> tuple[int, str]:
    """Exit code and prints of the batch script, run as Slurm would; `srun` runs `step`."""
    stubs = folder / "bin"
    stubs.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN + step, "scontrol": SCONTROL}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    path = f"{stubs}:{BIN}:{os.environ['PATH']}"
    env = os.environ | SLURM | {"PATH": path, "HOME": str(folder)} | variables
    options: dict[str, Any] = {"cwd": folder, "env": env, "stdout": PIPE, "stderr": STDOUT}
    command = ["bash", str(SBATCH), *overrides]
    with Popen(command, text=True, start_new_session=True, **options) as job:
        try:
            meanwhile(job)
            printed, _ = job.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, printed


def requeued(folder: Path) -> str:
    """What Slurm was asked for."""
    path = folder / "requeue.txt"
    return path.read_text() if path.exists() else ""


def test_every_node_runs_one_torchrun_of_the_script_with_the_overrides(tmp_path) -> None:
    overrides, script = ["epochs=2", "name=two words"], "train_ddp_amp.py"
    variables: Any = {"SCRIPT": script, "SLURM_GPUS_ON_NODE": "4"}
    status, text = run_job(tmp_path, "exit 75", *overrides, **variables)
    assert (status, (tmp_path / "srun.txt").exists()) == (2, False)
    assert f"{script} is not in {tmp_path}; submit in the repository's root" in text
    (tmp_path / script).touch()
    assert run_job(tmp_path, "exit 75", *overrides, **variables)[0] == 75
    assert requeued(tmp_path) == ""
    lines = (tmp_path / "srun.txt").read_text().splitlines()
    start, call = lines.index("torchrun"), lines.index(script)
    expected = {"--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--cpus-per-task=8"}
    assert expected <= set(lines[:start])
    assert {"--nnodes=2", "--nproc_per_node=4", "--max-restarts=3"} <= set(lines[start:call])
    folder = "output_dir=outputs/train_ddp_amp/4711"
    assert lines[call : call + 5] == [script, folder, "resume=auto", *overrides]
    assert {"OMP_NUM_THREADS=2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"} <= set(lines[call:])


PLACES = ["output_dir=a/b", "++output_dir=a", "output_dir=~/a", "output_dir=-rf"]


@pytest.mark.parametrize("override", [f"output_dir={RUN}", *PLACES])
def test_the_job_is_requeued_if_the_run_asks_for_it(override, tmp_path, monkeypatch) -> None:
    """In the folder that the run reads from its command line, and after an earlier start."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / make_config(with_home(override)).output_dir
    run.mkdir(parents=True)
    (run / "requeue").touch()
    (tmp_path / "train_ddp.py").touch()
    asked = shlex.quote(f"{run}/requeue")
    step = f"[[ ! -e {asked} ]] || exit 3; touch {asked}; exit 75"
    overrides = ["a=1"] if RUN in override else [override]
    status, text = run_job(tmp_path, step, *overrides, REFUSED="1")
    assert status == 75, text
    assert requeued(tmp_path) == "requeue 4711\n"
    _, _, again = text.partition("not requeued; submit again with ")
    assert shlex.split(again)[0] == with_home(override).lstrip("+")
    status, text = run_job(tmp_path, "exit 3", "output_dir='a b'")
    assert (status, "without the inner quotes" in text) == (2, True)


def test_a_cancelled_job_is_not_requeued(tmp_path) -> None:
    def cancel(job: Popen[str]) -> None:
        wait_for((tmp_path / "ready").exists, "the ranks")
        job.terminate()

    (tmp_path / "train_ddp.py").touch()
    # Which leaves the job's prints, for whose end this process waits.
    step = f"mkdir -p {RUN}; touch {RUN}/requeue ready; exec sleep 1000 > sleeps 2>&1"
    assert run_job(tmp_path, step, meanwhile=cancel)[0] == -signal.SIGTERM
    assert requeued(tmp_path) == ""


def test_a_signal_reaches_every_rank_of_two_nodes_and_each_has_the_time_to_save(tmp_path) -> None:
    # The job id decides the port: one of its own for every process that runs this test.
    job_id = str(os.getpid())
    run = tmp_path / "outputs" / "train_ddp" / job_id
    (tmp_path / "train_ddp.py").write_text(TRAIN)

    def interrupt(job: Popen[str]) -> None:
        wait_for(lambda: len(list(run.glob("ready*"))) == 4, "four ranks")
        job.send_signal(signal.SIGUSR1)

    status, text = run_job(tmp_path, TWO_NODES, meanwhile=interrupt, SLURM_JOB_ID=job_id)
    assert status == 1, text  # torchrun's own, whatever its ranks return
    assert len(list(run.glob("saved*"))) == 4, text
    assert requeued(tmp_path) == f"requeue {job_id}\n"


def test_the_trainjob_starts_the_script_as_torchrun_and_kubernetes_read_it() -> None:
    runtime, trainjob = yaml.safe_load_all(TRAINJOB.read_text())
    name = trainjob["metadata"]["name"]
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    node = job["template"]["spec"]["template"]["spec"]
    [container] = node["containers"]
    options = parse_args(container["command"][1:])
    # Pods are named JOBSET-JOB-JOB'S NUMBER-POD'S NUMBER, and the JobSet as the TrainJob.
    assert options.rdzv_endpoint.startswith(f"{name}-{job['name']}-0-0.{name}:")
    assert options.nnodes.partition(":")[2] == str(trainjob["spec"]["trainer"]["numNodes"])
    assert options.training_script_args == [f"output_dir=outputs/train_ddp/{name}", "resume=auto"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < node["terminationGracePeriodSeconds"]
