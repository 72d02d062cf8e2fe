"""The tree of keys, with types, defaults, ranges and meanings.

Hydra checks the YAML files and the command line against these classes. `conf/groups.py` has the
keys of the groups with a folder of choices, `conf/ranges.py` the ranges.
"""

import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from conf import ranges
from conf.groups import DataConfig, LoaderConfig, ModelConfig, OptimizerConfig, TaskConfig
from conf.ranges import key, one_of


@dataclass
class LossConfig:
    weights: Any = key(None, of="classes")
    """Weights of the classes: null (equal), `auto` (inverse to their frequency) or one each."""


@dataclass
class CheckpointConfig:
    every_steps: int | None = key(None, ranges.FROM_1)
    """Steps between two checkpoints, in addition to those at each validation; null: none."""
    every_minutes: float | None = key(None, ranges.ABOVE_0)
    """Minutes between two checkpoints, in addition to those at validations; null: none."""
    keep: int = key(2, ranges.FROM_1)
    """Number of newest checkpoints to keep; if one is damaged, a run resumes from an older one."""
    best: bool = True
    """Keep the checkpoint of the validation with the best value of the task's main metric, too."""
    on_error: str = key("raise", one_of("raise", "warn"))
    """Action when a checkpoint cannot be written (a full disk): `raise` or `warn`."""
    fresh_epoch: bool = False
    """Resume even if the data or its plan have changed, from the beginning of the epoch."""


@dataclass
class AmpConfig:
    dtype: str = key("auto", one_of("auto", "float16", "bfloat16", "float32"))
    """`float16`, `bfloat16`, `float32` (off) or `auto`: float16 on CUDA, bfloat16 on CPUs that have
    instructions for it."""
    init_scale: float = key(65536.0, ranges.ABOVE_0)
    """First loss scale; halved at each overflow, doubled after 2,000 steps without one."""


@dataclass
class EmaConfig:
    decay: float = key(0.999, ranges.BELOW_1)
    """Share of the average that is kept in a step; smaller in the first steps."""


@dataclass
class DistributedConfig:
    backend: str = key("auto", one_of("auto", "nccl", "gloo"))
    """`auto` (NCCL on CUDA, gloo on the CPU), `nccl` or `gloo`."""
    sync_batchnorm: bool = True
    """BatchNorm with statistics of the global batch, on CUDA; false: of each rank's own part."""
    timeout_s: float = key(600.0, ranges.ABOVE_0)
    """Seconds after which a collective that some rank has not joined fails on the other ranks."""


@dataclass
class LogConfig:
    to: list[str] = key(["tensorboard"])
    """Loggers: names of files in `runtime/loggers/`, such as [tensorboard,csv]."""

    every_steps: int = key(20, ranges.FROM_1)
    """Steps between two log points, which have the means since the last one."""
    images: int = key(16, ranges.FROM_0)
    """Number of images in the grids of inputs and of a validation's first predictions; 0: none."""
    progress: bool = True
    """Progress bar on a terminal; false, or without a terminal: plain lines."""


@dataclass
class ProfileConfig:
    memory: bool = key(False, of="profile.steps=[SKIP,RECORD]")
    """Record memory, too: on a GPU as a snapshot for https://pytorch.org/memory_viz."""
    steps: list[int] | None = key(None, ranges.SKIP_AND_RECORD)
    """[skip, record], such as [10,5]: after so many steps, trace so many; null: none."""


@dataclass
class EarlyStoppingConfig:
    patience: int | None = key(None, ranges.FROM_1)
    """Validations in a row without a better value after which the run ends; null: never."""


@dataclass
class Config:
    name: str = "${run_stamp:}"
    """Name of the run; default: its start time."""
    output_dir: str = "outputs/${script:}/${name}"
    """Folder of the run: resolved config, log, TensorBoard events, checkpoints, summary."""

    epochs: int = key(4, ranges.FROM_1)
    """Number of epochs: passes over the training split, unless `epoch_steps` is set."""
    epoch_steps: int | None = key(None, ranges.FROM_1)
    """Optimizer steps of an epoch, where a pass takes long; null: an epoch is one pass."""
    max_steps: int | None = key(None, ranges.FROM_1)
    """Number of optimizer steps after which the run ends; the schedule stays that of `epochs`."""

    global_batch_size: int = key(64, ranges.FROM_1)
    """Samples per optimizer step over all devices; an epoch ends without a smaller batch."""
    accumulate_steps: Any = key(1, ranges.MICRO_BATCHES)
    """Parts of a batch whose gradients are added up; `auto`: the fewest that fit into memory."""
    accumulate_margin: float = key(0.1, ranges.BELOW_1)
    """auto: share of a GPU's memory that has to stay free."""

    clip_grad_norm: float = key(float("inf"), ranges.ABOVE_0)
    """Largest L2 norm of all gradients together; inf: the norm is only measured."""

    resume: str | None = None
    """`auto`: go on from the newest checkpoint in `output_dir`, if there is one; or the path of a
    run or checkpoint: start from it while `output_dir` has none. null: a fresh run."""
    overwrite: bool = False
    """Remove checkpoints and TensorBoard events in `output_dir`; false: refuse to start if any."""

    device: str = key("auto", ranges.DEVICE)
    """`auto` (CUDA if there is one, else the CPU), `cpu`, `cuda` or `cuda:1`."""
    fp32_precision: str | None = key(None, one_of("ieee", "tf32"))
    """Precision of float32 products on CUDA: `ieee` or `tf32` (10 bits); null: PyTorch's."""
    cudnn_benchmark: bool = True
    """Time cuDNN's algorithms for each new shape; false for inputs of many sizes."""
    deterministic: bool = False
    """Use deterministic algorithms on CUDA: the same bits in each run, at lower speed."""

    seed: int = key(0, ranges.FROM_0)
    """Seed of the initial weights and, with the epoch, of the plan of the data."""
    data: DataConfig = field(default_factory=DataConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    amp: AmpConfig = field(default_factory=AmpConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)


def run_stamp() -> str:
    """Return the current time, by which runs are named."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")


# Cached: `name` is the same wherever it is read. Under torchrun, runtime/ gives all ranks the same.
OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
# The name of the script, such as `train`; Hydra does not know it before a multirun.
OmegaConf.register_new_resolver("script", lambda: Path(sys.argv[0]).stem, replace=True)

ConfigStore.instance().store(name="schema", node=Config)
