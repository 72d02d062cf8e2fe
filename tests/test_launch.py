"""The scripts that start a run on a cluster, as far as a machine without one can check them."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

from tests.helpers import REPOSITORY, script_for, wait_for

SBATCH = REPOSITORY / "launch" / "slurm.sbatch"
TRAINJOB = REPOSITORY / "launch" / "trainjob.yaml"
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.slow
RUN = "outputs/train_ddp/4711"

# Both write down their arguments. What srun does in place of the step is added.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > srun.txt
env > environment.txt
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

asked = {signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, asked)
run = pathlib.Path(sys.argv[1].removeprefix("output_dir="))
run.mkdir(parents=True, exist_ok=True)
rank, num_ranks, starts = map(os.getenv, ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
(run / f"ready{rank}").touch()
received = signal.Signals(signal.sigtimedwait(asked, 120).si_signo).name
time.sleep(1)
(run / "requeue").touch()
(run / f"saved{rank}").write_text(f"{received} {num_ranks} {starts}")
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


def start_job(folder: Path, step: str, *overrides: str, **variables: str) -> subprocess.Popen[str]:
    """Start the batch script in `folder` as Slurm would, with `srun` and `scontrol` replaced."""
    stubs = folder / "bin"
    stubs.mkdir()
    for name, text in {"srun": SRUN + step, "scontrol": SCONTROL}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    (folder / "train_ddp.py").touch()
    return subprocess.Popen(
        ["bash", str(SBATCH), *overrides],
        cwd=folder,
        env=os.environ | SLURM | {"PATH": f"{stubs}:{BIN}:{os.environ['PATH']}"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of the batch script and what it printed."""
    try:
        printed, _ = job.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, printed


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_shellcheck_finds_nothing_in_a_script():
    scripts = [SBATCH, *REPOSITORY.glob("benchmarks/*.sh")]
    result = subprocess.run([BIN / "shellcheck", *scripts], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_every_node_runs_one_torchrun_of_the_script_with_the_overrides(tmp_path):
    (tmp_path / "train_ddp_amp.py").touch()
    overrides, script = ["epochs=2", "name=two words"], "train_ddp_amp.py"
    job = start_job(tmp_path, "exit 0", *overrides, SCRIPT=script, SLURM_GPUS_ON_NODE="4")
    assert finish(job)[0] == 0
    arguments = lines_of(tmp_path / "srun.txt")
    assert arguments[-5:-2] == [script, "output_dir=outputs/train_ddp_amp/4711", "resume=auto"]
    assert arguments[-2:] == overrides
    of_srun = {"--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=180"}
    assert {*of_srun, "--cpus-per-task=8"} <= set(arguments[: arguments.index("torchrun")])
    assert {"--nnodes=2", "--nproc_per_node=4", "--max-restarts=3"} <= set(arguments)
    expected = {"OMP_NUM_THREADS=2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"}
    expected |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110"}  # less than Slurm's notice before SIGKILL
    assert expected <= set(lines_of(tmp_path / "environment.txt"))


def test_a_job_submitted_elsewhere_says_where_to_submit_it(tmp_path):
    status, text = finish(start_job(tmp_path, "exit 0", SCRIPT="nowhere.py"))
    assert status == 2
    assert f"nowhere.py is not in {tmp_path}; submit in the repository's root" in text
    assert not (tmp_path / "srun.txt").exists()


@pytest.mark.parametrize(
    ("override", "step", "refused", "expected", "requeued"),
    [
        ("a=1", f"touch {RUN}/requeue; exit 75", "0", 75, True),
        ("a=1", "exit 75", "0", 75, False),
        ("output_dir=elsewhere", "mkdir elsewhere; touch elsewhere/requeue", "0", 0, True),
        ("a=1", f"touch {RUN}/requeue; exit 1", "1", 1, True),
        ('output_dir="a (1)"', "mkdir 'a (1)'; touch 'a (1)/requeue'", "0", 0, True),
        ("output_dir='it is'", "mkdir 'it is'; touch 'it is/requeue'", "0", 0, True),
        ("output_dir=~/a", "mkdir a; touch a/requeue", "0", 0, True),
    ],
)
def test_the_job_is_requeued_exactly_when_the_run_asks_for_it(
    tmp_path, override, step, refused, expected, requeued
):
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "requeue").touch()  # left by an earlier start, which says nothing now
    home = {"HOME": str(tmp_path)}
    status, text = finish(start_job(tmp_path, step, override, REFUSED=refused, **home))
    assert status == expected
    assert lines_of(tmp_path / "requeue.txt") == (["requeue 4711"] if requeued else [])
    assert (f"submit again with 'output_dir=\"{RUN}\"'" in text) == (refused == "1")


def test_a_cancelled_job_is_not_requeued(tmp_path):
    job = start_job(tmp_path, f"mkdir -p {RUN}; touch {RUN}/requeue ready; sleep 0.5")
    wait_for((tmp_path / "ready").exists, "the ranks")
    job.terminate()
    assert finish(job)[0] == -signal.SIGTERM
    assert not (tmp_path / "requeue.txt").exists()


def test_a_signal_reaches_every_rank_of_two_nodes_and_each_has_the_time_to_save(tmp_path):
    (tmp_path / "train_ddp.py").write_text(TRAIN)
    # The job id decides the port: one of its own for every process that runs this test.
    job_id = str(os.getpid())
    job = start_job(tmp_path, TWO_NODES, SLURM_JOB_ID=job_id)
    run = tmp_path / "outputs" / "train_ddp" / job_id
    wait_for(lambda: len(list(run.glob("ready*"))) == 4, "four ranks")
    job.send_signal(signal.SIGUSR1)
    status, text = finish(job)
    assert status == 1, text  # torchrun's own, whatever its ranks return
    saved = {path.name: path.read_text() for path in run.glob("saved*")}
    assert saved == {f"saved{rank}": "SIGUSR1 4 0" for rank in range(4)}, text
    assert lines_of(tmp_path / "requeue.txt") == [f"requeue {job_id}"]


def test_the_trainjob_fits_its_runtime_the_image_and_the_batch_script() -> None:
    runtime, job = yaml.safe_load_all(TRAINJOB.read_text())
    name = job["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    jobs = runtime["spec"]["template"]["spec"]
    place, node = (part["template"]["spec"] for part in jobs["replicatedJobs"])
    assert jobs["successPolicy"]["targetReplicatedJobs"] == ["node"]
    pod = node["template"]["spec"]
    (container,), (meeting,) = pod["containers"], place["template"]["spec"]["containers"]

    image = meeting["image"]
    assert container["image"] == image
    assert f"IMAGE ?= {image}\n" in (REPOSITORY / "launch" / "image.mk").read_text()
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    assert "\nWORKDIR /workspace\n" in dockerfile
    assert f"\nUSER {pod['securityContext']['fsGroup']}\n" in dockerfile

    python, script, port = meeting["command"]
    assert (python, script) == ("python", "launch/rendezvous.py")
    assert container["command"][:2] == ["python", "launch/elastic_torchrun.py"]
    options = parse_args(container["command"][2:])
    # Pods are named JOBSET-JOB-JOB'S NUMBER-POD'S NUMBER, and the JobSet as the TrainJob.
    assert options.rdzv_endpoint == f"{name}-rendezvous-0-0.{name}:{port}"
    assert options.nnodes.partition(":")[2] == str(job["spec"]["trainer"]["numNodes"])
    for path in (script, container["command"][1], options.training_script):
        assert (REPOSITORY / script_for(path)).is_file()
    run = f"outputs/train_ddp/{name}"
    assert options.training_script_args == [f"output_dir={run}", "resume=auto"]

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounts["/workspace/outputs"]

    env = {variable["name"]: variable["value"] for variable in container["env"]}
    timeout = env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(timeout) < pod["terminationGracePeriodSeconds"]
    assert f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={timeout}\n" in SBATCH.read_text()
