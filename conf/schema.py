"""The typed configuration: keys, types, defaults, meanings and ranges.

Hydra checks the YAML files and the command line against these classes: a wrong key or type fails
at the start. The YAML files in this folder only hold values. `conf/groups.py` has the keys of the
groups with a folder of such files, and `data/NAME.py` those that only `data=NAME` has.
"""

import re
import sys
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from conf.groups import DataConfig, LoaderConfig, ModelConfig, OptimizerConfig, TaskConfig
from conf.names import find, names_in
from conf.ranges import ABOVE_0, BELOW_1, FROM_0, FROM_1, Allowed, key, one_of

CLIP = Allowed("a number above 0, or inf", lambda x: x > 0)
DEVICE = Allowed(
    "auto, cpu, cuda or cuda:1", lambda x: re.fullmatch(r"auto|cpu|cuda(:\d+)?", x) is not None
)
MICRO_BATCHES = Allowed("1 or more, or auto", lambda x: x == "auto" or (type(x) is int and x >= 1))
SEED = Allowed("0 to 2**63 - 1", lambda x: 0 <= x < 2**63)


@dataclass
class LossConfig:
    weights: Any = None
    """Weights of the classes, for classes with few images or pixels: null (equal), `auto` (inverse
    to their frequency in the training labels) or one number for each class."""


@dataclass
class CheckpointConfig:
    every_steps: int | None = key(None, FROM_1)
    """Steps between two checkpoints, in addition to those at each validation; null: none."""

    every_minutes: float | None = key(None, ABOVE_0)
    """Minutes between two checkpoints, in addition to those at validations; null: none."""

    keep: int = key(2, FROM_1)
    """Number of newest checkpoints to keep; if one is damaged, a run resumes from an older one."""

    best: bool = True
    """Keep the checkpoint of the validation with the best value of the task's main metric, too;
    among equal ones, of that with the lowest `val/loss`."""

    on_error: str = key("raise", one_of("raise", "warn"))
    """Action when a checkpoint cannot be written (a full disk): `raise` or `warn`."""

    fresh_epoch: bool = False
    """Resume even if the data or its plan have changed, from the beginning of the epoch."""


@dataclass
class AmpConfig:
    dtype: str = key("auto", one_of("auto", "float16", "bfloat16", "float32"))
    """`float16` (with loss scaling), `bfloat16` (without: it has the range of float32), `float32`
    (off) or `auto`: float16 on CUDA; on a CPU bfloat16, or float32 if it has no instructions for
    bfloat16."""

    init_scale: float = key(65536.0, ABOVE_0)
    """First loss scale; halved at each overflow, doubled after 2,000 steps without one."""


@dataclass
class EmaConfig:
    decay: float = key(0.999, BELOW_1)
    """Share of the average that is kept in a step; smaller in the first steps."""


@dataclass
class DistributedConfig:
    backend: str = key("auto", one_of("auto", "nccl", "gloo"))
    """`auto` (NCCL on CUDA, gloo on the CPU), `nccl` or `gloo`."""

    sync_batchnorm: bool = True
    """BatchNorm with statistics of the global batch, on CUDA. Each such layer exchanges sums and
    waits for the GPU; false: ranks normalise by their own parts, rank 0's statistics are kept."""

    timeout_s: float = key(600.0, ABOVE_0)
    """Seconds after which a collective that some rank has not joined fails on the other ranks."""


@dataclass
class EarlyStoppingConfig:
    patience: int | None = key(None, FROM_1)
    """The run ends after so many validations in a row in which the task's best metric did not
    improve; null: never."""


@dataclass
class LogConfig:
    to: list[str] = key(["tensorboard"])
    """Loggers: names of files in `runtime/loggers/`, such as [tensorboard,csv]."""

    every_steps: int = key(20, FROM_1)
    """Steps between two log points, where values are fetched from the device: `train/loss` is the
    mean since the last one. `train/epoch_loss`, at a validation, is that of the epoch so far."""

    images: int = key(16, FROM_0)
    """Number of images in the grids of inputs, and, up to 16, in those of the validation's first
    predictions; 0: none."""

    progress: bool = True
    """Progress bar on a terminal; false, or without a terminal: plain lines."""


@dataclass
class ProfileConfig:
    memory: bool = False
    """Record memory, too: on a GPU as a snapshot for https://pytorch.org/memory_viz, written beside
    the trace, and where memory runs out; on a CPU in the trace."""

    steps: list[int] | None = key(
        None,
        Allowed(
            "[skip, record] with 0 or more and 1 or more",
            lambda x: len(x) == 2 and x[0] >= 0 and x[1] >= 1,
        ),
    )
    """[skip, record], such as [10,5]: after so many steps of the process, write a trace of so many
    further ones on each rank, for Perfetto; null: none."""


@dataclass
class Config:
    data: DataConfig = MISSING
    loader: LoaderConfig = MISSING
    model: ModelConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    task: TaskConfig = MISSING
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    amp: AmpConfig = field(default_factory=AmpConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)

    name: str = "${run_stamp:}"
    """Name of the run; default: its start time."""

    output_dir: str = "outputs/${script:}/${name}"
    """Folder of the run: resolved config, log, TensorBoard events, checkpoints, summary."""

    epochs: int = key(4, FROM_1)
    """Number of epochs: passes over the training split, unless `epoch_steps` is set."""

    epoch_steps: int | None = key(None, FROM_1)
    """Optimizer steps of an epoch, for data of which a pass takes long: an epoch goes on where the
    one before it ended. null: an epoch is one pass."""

    max_steps: int | None = key(None, FROM_1)
    """Number of optimizer steps after which the run ends; the schedule stays that of `epochs`."""

    global_batch_size: int = key(64, FROM_1)
    """Number of samples per optimizer step over all devices; of photos, pairs and masks 16 by
    default. Each epoch of training drops the samples that do not fill the last batch."""

    accumulate_steps: Any = key(1, MICRO_BATCHES)
    """Number of parts of a batch whose gradients are added up, in scripts that accumulate them;
    `auto`: the fewest that fit into the memory of every rank, tried before the first step."""

    accumulate_margin: float = key(0.1, BELOW_1)
    """auto: share of a GPU's memory that has to stay free."""

    clip_grad_norm: float = key(float("inf"), CLIP)
    """Largest L2 norm of all gradients together, to which larger ones are scaled down; inf: the
    norm is only measured."""

    resume: str | None = None
    """`auto`: continue from the newest checkpoint in `output_dir`, if there is one. The path of a
    checkpoint or of a run: start from it while `output_dir` has none. null: a fresh run."""

    overwrite: bool = False
    """Remove checkpoints and TensorBoard events in `output_dir`; false: refuse to start if any."""

    device: str = key("auto", DEVICE)
    """`auto` (CUDA if there is one, else the CPU), `cpu`, `cuda` or `cuda:1`."""

    fp32_precision: str | None = key(None, one_of("ieee", "tf32"))
    """Precision of float32 matrix products and convolutions on CUDA: `ieee` (float32) or `tf32` (10
    bits of mantissa, several times as fast); null: as in PyTorch, tf32 for convolutions alone."""

    cudnn_benchmark: bool = True
    """Time cuDNN's algorithms for each new shape of a convolution and use the fastest; false for
    inputs of many sizes, each of which is timed. With `deterministic`, it has no effect."""

    deterministic: bool = False
    """Use deterministic algorithms on CUDA: the same bits in each run on the same GPU, at lower
    speed. Operations without such an algorithm raise an error."""

    seed: int = key(0, SEED)
    """Seed of the initial weights and, with the epoch, of the plan of the data."""


NAMED_BY = {"data": "layout", "loader": "name"}
"""Key that names the choice, of groups where some choices have keys of their own."""


def own_classes(group: str) -> dict[str, type]:
    """Return the classes of such choices by name, as `NameConfig` of `conf/data/name.py`."""
    package = f"conf.{group}"
    return {name: find(package, name, group, "{}Config") for name in names_in(package)}


def run_stamp() -> str:
    """Return the current time, by which runs are named; two that start together differ in the
    microseconds."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")


# Cached: `name` is the same wherever it is read. Under torchrun, runtime/ gives all ranks the same.
OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
# The name of the script, such as `train`; Hydra does not know it before a multirun.
OmegaConf.register_new_resolver("script", lambda: Path(sys.argv[0]).stem, replace=True)

store = ConfigStore.instance()
store.store(name="schema", node=Config)
for group in fields(Config):
    if group.default is MISSING:
        store.store(group=group.name, name="schema", node=group.type)


def register_choices() -> None:
    """Give Hydra the classes of choices with keys of their own; before it composes a configuration.

    In `conf/data/name.yaml`, `defaults: [schema/name]` is the class of `conf/data/name.py`.
    """
    for group in NAMED_BY:
        for name, node in own_classes(group).items():
            store.store(group=f"{group}/schema", name=name, node=node, package=group)
