"""The typed configuration: keys, types, defaults, meanings and ranges.

Hydra checks the YAML files and the command line against these classes: a wrong key or type fails at the start.
The YAML files in this folder only hold values.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from conf.errors import UserError

INF = math.inf


def shown(value: Any) -> str:
    """Write a value as on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def are_numbers(values: Any, count: int | None = None) -> bool:
    """Return True for a list of `count` finite numbers; by default, of one or more."""
    return (
        isinstance(values, list)
        and len(values) == (count or max(1, len(values)))
        and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    )


def is_pair(values: Any, high: float = INF) -> bool:
    """Return True for a list of two finite numbers with 0 < first <= second <= high."""
    return are_numbers(values, 2) and 0 < values[0] <= values[1] <= high


def is_size(value: Any) -> bool:
    """Return True for a length in pixels, and for [height, width]."""
    sizes = value if are_numbers(value, 2) else [value]
    return all(type(size) is int and size >= 1 for size in sizes)


def at_least(low: float) -> Callable[[float], bool]:
    return lambda value: low <= value < INF


def is_above_0(value: float) -> bool:
    return 0 < value < INF


def is_share(value: float) -> bool:
    return 0 <= value <= 1


class Group:
    """Base of the groups of keys, with the check of their ranges."""

    prefix = ""

    def check(self, allowed: str, is_allowed: Callable[[Any], bool], *keys: str) -> None:
        """Raise UserError if the value of one of these keys is not allowed; null is, if it is the default.

        Args:
            allowed: description of the allowed values.
            is_allowed: returns True for them.
            keys: of this group.
        """
        for key in keys:
            value, is_optional = getattr(self, key), getattr(type(self), key, "") is None
            if not (is_optional and value is None) and not is_allowed(value):
                end = ", or null" if is_optional else ""
                name = f"{self.prefix}{key}={shown(value)}"
                raise UserError(f"{name} is not possible; use {allowed}{end}")

    def check_name(self, key: str, *names: str) -> None:
        """Raise UserError if the value of a key is none of these names."""
        self.check(f"{', '.join(names[:-1])} or {names[-1]}", names.__contains__, key)


@dataclass
class DataConfig(Group):
    prefix = "data."

    layout: str = MISSING
    """Layout of the data set on disk: `imagefolder` (one folder per class), `pairs` (two folders with images
    of the same names), `cells` (class folders of TIFFs with any number of channels), `table` (a
    file that lists images and labels), `masks` (two folders with images and the classes of their pixels),
    `caltech256`, `mnist_mini` (embedded), `mnist`, or `own` (ordinary Datasets)."""

    name: str | None = None
    """own: key of `loaders.own.OWN`."""

    root: str = MISSING
    """Folder of the data set, relative to the folder that the script is started in, or place of its shards:
    a folder, `http(s)://`, `s3://` or `gs://`."""

    cache_dir: str = "data/cache"
    """Folder of derived files: image sizes and copies of shards."""

    cache_gb: float | None = None  # part: shards
    """Gigabytes (1e9 bytes) for copies of shards of a web server or bucket in `cache_dir`/shards, for all runs of
    the machine; the least recently used copies are removed first. null: as many as this run needs, two windows
    and two shards with `shuffle=window`, all shards with `shuffle=full`."""

    retry_s: float = 300.0  # part: shards
    """Seconds for which requests to a web server or bucket are repeated when it fails or does not answer, before
    the run ends; an object that is forbidden or missing ends it at once."""

    index: str | None = None
    """Folder that `python -m loaders.index ... out=DIR` wrote: training starts without listing the data set;
    null: list it at each start."""

    check_files: bool = True
    """Compare the size and modification time of every file with the index at the start; false: only when the
    file is read."""

    val_fraction: float = 0.1
    """Share of the samples used for validation, if there are no folders `train` and `val` (or `test`)."""

    val_count: int | None = None
    """Number of samples used for validation, instead of `val_fraction`."""

    split_seed: int = 0
    """Seed of the split; separate from `seed`, for runs with different seeds to have the same split."""

    input_dir: str = "input"  # part: pairs
    """pairs, masks: folder of the inputs."""

    target_dir: str = "target"  # part: pairs
    """pairs, masks: folder of the targets, with the same relative paths."""

    table: str | None = None  # part: table
    """table: CSV or Parquet file with one line per sample. An optional column `split` holds `train`, `val` or
    `test`; without lines of `val`, those of `test` are used for validation."""

    path_column: str = "path"  # part: table
    """table: column with the images' paths, relative to `root`."""

    label_columns: list[str] = field(default_factory=lambda: ["label"])  # part: table
    """table: columns with the labels."""

    label_kind: str = "auto"  # part: table
    """table: `classes` (names or integers in one column), `several` (columns of 0 and 1, or names separated by
    `;` in one column, a `;` alone for none), `numbers`, or `auto`: inferred from the cells."""

    num_classes: int | None = None  # part: masks
    """masks: number of classes; null: one more than the highest index in the masks."""

    ignore_index: int = -100
    """masks: index of pixels that belong to no class, often 255; -100, which no mask holds: none."""

    shuffle: str = "full"
    """Training order: `full` (any sample may follow any other) or, for shards, `window`: the shards are
    shuffled, and then the samples within each window of `shuffle_window` shards."""

    shuffle_window: int = 8
    """Number of shards in a window with `shuffle=window`."""

    max_pixels: int = 100_000_000
    """Largest number of pixels of an image; protects against decompression bombs."""

    on_error: str = "raise"
    """Action for a file that cannot be decoded: `raise` (stop and name it) or `skip` (training takes the next
    good sample of its shard instead, evaluation leaves it out; with a bad header it is no sample at all)."""

    max_bad_samples: int = 10
    """Number of bad samples that a split may have with `on_error=skip`, over all ranks and resumes, before the
    run stops; `summary.json` counts them."""

    resize: Any = None
    """Size before the crop, in pixels: null (keep), an int (length of the shorter side) or [height, width]."""

    reduced_decoding: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size if the cropped region is much larger than the output (packing
    and loader=pytorch). Its pixels then differ from those of full decoding by 0.5 of 255 on average."""

    crop: Any = None
    """Size of the model's input in pixels, [height, width] or an int for a square; null: the whole (resized)
    image."""

    random_crop: bool = False
    """Crop at a random position in training; false: at the centre, as in evaluation."""

    random_resized_crop: Any = None
    """Crop a random share of the image's area in training, [low, high] in (0, 1], with an aspect ratio
    in [3/4, 4/3], and resize it to `crop`; null: off."""

    hflip: float = 0.0
    """Probability of a left-right flip in training."""

    vflip: float = 0.0
    """Probability of an upside-down flip in training."""

    colour_jitter: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # part: colour
    """Strength of [brightness, contrast, saturation] in training: factors are uniform in 1 ± strength."""

    randaugment: Any = None  # part: colour
    """RandAugment in training, [operations, magnitude 0 to 30], such as [2, 9]: operations drawn from
    brightness, contrast, colour, sharpness, posterize, solarize, autocontrast, equalize and none; null: off."""

    gaussian_blur: list[float] = field(default_factory=lambda: [0.0, 0.1, 2.0])  # part: spatial
    """Blur of inputs in training: [probability, smallest, largest standard deviation in pixels]."""

    rotation: float = 0.0  # part: spatial
    """Largest angle of a rotation about the centre in training, in degrees: uniform in ± this. Target images and
    masks are rotated with their inputs. New pixels are `mean`, in masks `ignore_index`."""

    random_scale: Any = None  # part: spatial
    """Enlarge about the centre by a factor in [low, high] in training, together with the rotation; null: off."""

    random_erasing: float = 0.0  # part: spatial
    """Probability that a rectangle of an input, 2 to 33 % of its area, becomes `mean` in training."""

    mixup: float = 0.0  # part: mixing
    """Alpha of MixUp, such as 0.2: each training sample is mixed with another one of its batch, by weights from
    Beta(alpha, alpha); labels become probabilities. 0: off. Not for masks."""

    cutmix: float = 0.0  # part: mixing
    """Alpha of CutMix: a rectangle of each training image is replaced by that of another one of its batch, and
    labels are mixed by area. 0: off; with `mixup`, half of the samples each. Not for numbers."""

    value_range: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Values [low, high] of black and full intensity, before `mean` and `std`."""

    mean: list[float] | None = None
    """Mean per channel, in units of `value_range`, that is subtracted from the inputs; null: 0."""

    std: list[float] | None = None
    """Standard deviation per channel, in units of `value_range`, that divides the inputs; null: 1."""

    def __post_init__(self) -> None:
        self.check("0 or more", at_least(0), "split_seed", "max_bad_samples")
        self.check("0 or more", at_least(0), "cache_gb", "retry_s")  # part: shards
        self.check("0 or more", at_least(0), "mixup", "cutmix")  # part: mixing
        self.check("1 or more", at_least(1), "val_count", "shuffle_window", "max_pixels")
        self.check("a number in (0, 1)", lambda x: 0 < x < 1, "val_fraction")
        self.check("a number in [0, 1]", is_share, "hflip", "vflip")
        self.check("a number in [0, 1]", is_share, "random_erasing")  # part: spatial
        self.check("0 to 180 degrees", lambda x: 0 <= x <= 180, "rotation")  # part: spatial
        self.check_name("shuffle", "full", "window")
        self.check_name("on_error", "raise", "skip")
        self.check("an int or [height, width] in pixels", is_size, "resize", "crop")
        self.check(
            "[low, high] with 0 < low <= high <= 1", lambda x: is_pair(x, 1), "random_resized_crop"
        )
        self.check("[low, high] with 0 < low <= high", is_pair, "random_scale")  # part: spatial
        self.check(  # part: colour
            "three numbers in [0, 1]",
            lambda x: are_numbers(x, 3) and all(map(is_share, x)),
            "colour_jitter",
        )
        self.check(  # part: colour
            "[operations, magnitude] with 1 to 4 and 0 to 30",
            lambda x: are_numbers(x, 2) and x[0] in (1, 2, 3, 4) and 0 <= x[1] <= 30,
            "randaugment",
        )
        self.check(  # part: spatial
            "[probability, low, high] with 0 < low <= high pixels",
            lambda x: are_numbers(x, 3) and is_share(x[0]) and is_pair(x[1:]),
            "gaussian_blur",
        )
        self.check(
            "[0, 1] or [-1, 1], for example",
            lambda x: are_numbers(x, 2) and x[0] < x[1],
            "value_range",
        )
        self.check("one number for each channel", are_numbers, "mean")
        self.check(
            "one number above 0 for each channel", lambda x: are_numbers(x) and min(x) > 0, "std"
        )


@dataclass
class LoaderConfig(Group):
    prefix = "loader."

    name: str = MISSING
    """Backend: `pytorch`, `dali`, `packed` or `synthetic`."""

    num_workers: Any = 0
    """pytorch, packed: worker processes per rank; 0: threads of the training process. `auto`: a measurement of
    some seconds chooses workers and threads (dali: threads)."""

    prefetch_factor: int = 2
    """pytorch, packed: batches that each worker prepares ahead."""

    num_threads: int = 0
    """pytorch, packed: threads per worker process; dali: CPU threads per rank; 0: all CPUs of the
    machine, divided among its ranks and their workers."""

    prefetch_queue_depth: int = 2
    """dali: batches prepared ahead."""

    reader: str = "plan"
    """dali: `plan` (order of all backends) or `native` (DALI's own file reader, shuffling and crops)."""

    hw_decoder_load: float = 0.65  # part: dali
    """dali: share of the JPEGs for the GPU's hardware decoder, if it has one."""

    pack: str | None = None  # part: packed
    """packed: folder that `python -m loaders.pack ... out=DIR` wrote."""

    channels_last: bool = "${model.channels_last}"  # type: ignore[assignment]
    """Inputs in channels_last; by default, as the model."""

    def __post_init__(self) -> None:
        self.check(
            "0 or more, or auto",
            lambda x: x == "auto" or (type(x) is int and x >= 0),
            "num_workers",
        )
        self.check("0 or more", at_least(0), "num_threads")
        self.check("1 or more", at_least(1), "prefetch_factor", "prefetch_queue_depth")
        self.check_name("reader", "plan", "native")
        self.check("a number in [0, 1]", is_share, "hw_decoder_load")  # part: dali


@dataclass
class ModelConfig:
    name: str = MISSING
    """Key of `models.MODELS`."""

    arch: str | None = None
    """Architecture, with the model `torchvision`: any name of `torchvision.models.list_models()` that classifies images."""

    channels_last: bool = False
    """Weights and activations in channels_last; faster for convolutions under AMP on CUDA."""

    compile: bool = False
    """Fuse the model's operations with torch.compile. The first steps then take up to minutes, and the
    CPU needs a C++ compiler."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's constructor, such as `batch_norm`."""

    weights: str | None = None
    """Initial weights: `imagenet` (torchvision's), a `.safetensors` or `.pt` file, or the folder of a run; null:
    random. Tensors that fit are loaded; a resumed run ignores it."""

    freeze: str | None = None
    """`backbone`: train the head (the last layer) alone; BatchNorm statistics before it stay fixed. null: train
    all layers."""


@dataclass
class OptimizerConfig(Group):
    prefix = "optimizer."

    name: str = MISSING
    """`sgd` (Nesterov momentum) or `adamw`."""

    lr: float = MISSING
    """Peak learning rate, reached at the end of the warm-up."""

    weight_decay: float = 0.0
    """L2 penalty (`sgd`) or decoupled decay (`adamw`)."""

    momentum: float = 0.9
    """`sgd` only."""

    warmup_epochs: float = 0.0
    """Epochs of linear warm-up from 1 % of `lr`; then a cosine to 0 at the end of the last epoch."""

    backbone_lr_scale: float = 1.0
    """Learning rate of all layers but the head, divided by `lr`; 0.1, for example, for fine-tuning."""

    def __post_init__(self) -> None:
        self.check_name("name", "sgd", "adamw")
        self.check("a number above 0", is_above_0, "lr", "backbone_lr_scale")
        self.check("0 or more", at_least(0), "weight_decay", "warmup_epochs")
        self.check("a number in [0, 1)", lambda x: 0 <= x < 1, "momentum")


@dataclass
class TaskConfig(Group):
    prefix = "task."

    name: str = MISSING
    """Task, by the targets of the data: `classification` (one label), `multilabel` (several), `regression`
    (numbers), `restoration` (images) or `segmentation` (masks)."""

    loss: str = MISSING
    """`cross_entropy` for classification and segmentation; `bce` for multilabel; `mse` or `l1` for
    regression; `charbonnier` or `l1` for restoration."""

    label_smoothing: float = 0.0
    """Classification, segmentation: share of the probability that is spread over all classes."""

    def __post_init__(self) -> None:
        self.check("a number in [0, 1)", lambda x: 0 <= x < 1, "label_smoothing")


@dataclass
class LossConfig:
    weights: Any = None
    """Weights of the classes, for classes with few images or pixels: null (equal), `auto` (inverse to their
    frequency in the training labels) or one number for each class."""


@dataclass
class CheckpointConfig(Group):
    prefix = "checkpoint."

    every_steps: int | None = None
    """Steps between two checkpoints, in addition to those at the end of each epoch; null: none."""

    every_minutes: float | None = None
    """Minutes between two checkpoints, in addition to those at the end of each epoch; null: none."""

    keep: int = 2
    """Number of newest checkpoints that are kept; a run resumes from the one before a damaged one."""

    best: bool = True
    """Keep the checkpoint of the epoch with the best value of the task's main metric, too."""

    on_error: str = "raise"
    """Action when a checkpoint cannot be written (a full disk): `raise` or `warn`."""

    fresh_epoch: bool = False
    """Resume although the data or its plan differ from the checkpoint's, from the beginning of its epoch."""

    def __post_init__(self) -> None:
        self.check("1 or more", at_least(1), "every_steps", "keep")
        self.check("a number above 0", is_above_0, "every_minutes")
        self.check_name("on_error", "raise", "warn")


@dataclass  # part: amp
class AmpConfig(Group):
    prefix = "amp."

    dtype: str = "auto"
    """`float16` (with loss scaling), `bfloat16` (without: it has the range of float32) or `auto`: float16 on
    CUDA, bfloat16 on a CPU."""

    init_scale: float = 65536.0
    """First loss scale; halved at each overflow, doubled after 2,000 steps without one."""

    def __post_init__(self) -> None:
        self.check_name("dtype", "auto", "float16", "bfloat16")
        self.check("a number above 0", is_above_0, "init_scale")


@dataclass  # part: ema
class EmaConfig(Group):
    prefix = "ema."

    decay: float = 0.999
    """Share of the average that is kept in a step; smaller in the first steps."""

    def __post_init__(self) -> None:
        self.check("a number in [0, 1)", lambda x: 0 <= x < 1, "decay")


@dataclass  # part: ranks
class DistributedConfig(Group):
    prefix = "distributed."

    backend: str = "auto"
    """`auto` (NCCL on CUDA, gloo on the CPU), `nccl` or `gloo`."""

    sync_batchnorm: bool = True
    """BatchNorm with the statistics of the global batch, on CUDA. Each such layer exchanges sums and waits for
    the GPU; false: each rank normalises by its own part, and rank 0's statistics are kept."""

    timeout_s: float = 600.0
    """Seconds after which a collective that some rank has not joined fails on the other ranks."""

    def __post_init__(self) -> None:
        self.check_name("backend", "auto", "nccl", "gloo")
        self.check("a number above 0", is_above_0, "timeout_s")


@dataclass
class EarlyStoppingConfig(Group):
    prefix = "early_stopping."

    patience: int | None = None
    """The run ends after this many epochs in a row without a better best metric; null: never."""

    def __post_init__(self) -> None:
        self.check("1 or more", at_least(1), "patience")


@dataclass
class LogConfig(Group):
    prefix = "log."

    to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Loggers: any of tensorboard, csv, wandb and mlflow."""

    every_steps: int = 20
    """Steps between two log points, where values are fetched from the device."""

    images: int = 16
    """Number of images in the grids of inputs and of predictions, of these at most 16; 0: none."""

    progress: bool = True
    """Progress bar on a terminal; false, or without a terminal: plain lines."""

    def __post_init__(self) -> None:
        self.check("1 or more", at_least(1), "every_steps")
        self.check("0 or more", at_least(0), "images")


@dataclass
class Config(Group):
    data: DataConfig = MISSING
    loader: LoaderConfig = MISSING
    model: ModelConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    task: TaskConfig = MISSING
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    amp: AmpConfig = field(default_factory=AmpConfig)  # part: amp
    ema: EmaConfig = field(default_factory=EmaConfig)  # part: ema
    distributed: DistributedConfig = field(default_factory=DistributedConfig)  # part: ranks
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    log: LogConfig = field(default_factory=LogConfig)

    name: str = "${run_stamp:}"
    """Name of the run; default: its start time."""

    output_dir: str = "outputs/${script:}/${name}"
    """Folder of the run: resolved config, log, TensorBoard events, checkpoints, summary."""

    epochs: int = 4
    """Number of passes over the training split."""

    max_steps: int | None = None
    """Number of optimizer steps after which the run ends early; the schedule stays that of `epochs`."""

    global_batch_size: int = 64
    """Number of samples per optimizer step over all devices."""

    accumulate_steps: int = 1  # part: accumulate
    """Number of parts of a batch whose gradients are added up (`train_accumulate.py`)."""

    max_bad_steps: int = 25
    """Number of consecutive steps with a gradient norm that is not finite after which the run ends; each of them
    is skipped."""

    clip_grad_norm: float = float("inf")
    """Largest L2 norm of all gradients together; larger gradients are scaled down."""

    resume: str | None = None
    """Checkpoint to resume from: `auto` (the newest one in `output_dir`, if any), or the path of a checkpoint or
    another run, unless this run has a checkpoint of its own; null: a fresh run."""

    overwrite: bool = False
    """Remove the checkpoints and TensorBoard events of an earlier run in `output_dir`; false: refuse to start
    there."""

    device: str = "auto"
    """`auto` (CUDA if there is one, else the CPU), `cpu`, `cuda` or `cuda:1`."""

    fp32_precision: str | None = None
    """Precision of matrix products and convolutions in float32 on CUDA: `ieee` (float32) or `tf32` (10 bits of
    mantissa, several times as fast); null: PyTorch's defaults, convolutions in tf32, products in ieee."""

    deterministic: bool = False
    """Use deterministic algorithms on CUDA: the same bits in each run on the same GPU, at lower speed. Operations
    without such an algorithm raise an error."""

    seed: int = 0
    """Seed of the initial weights and, with the epoch, of the plan of the data."""

    def __post_init__(self) -> None:
        self.check("1 or more", at_least(1), "epochs", "max_steps", "global_batch_size")
        self.check("1 or more", at_least(1), "max_bad_steps")
        self.check("1 or more", at_least(1), "accumulate_steps")  # part: accumulate
        self.check("a number above 0, or inf", lambda x: x > 0, "clip_grad_norm")
        self.check(
            "auto, cpu, cuda or cuda:1",
            lambda x: re.fullmatch(r"auto|cpu|cuda(:\d+)?", x) is not None,
            "device",
        )
        self.check_name("fp32_precision", "ieee", "tf32")
        self.check("0 to 2**63 - 1", lambda x: 0 <= x < 2**63, "seed")


def run_stamp() -> str:
    """Current time, by which runs are named."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def script() -> str:
    """Name of the running script, such as `train`; Hydra's own is not known yet when a multirun starts."""
    return Path(sys.argv[0]).stem


# Cached: `name` is the same wherever it is read. Under torchrun, runtime/ replaces it by one time for all ranks.
OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
OmegaConf.register_new_resolver("script", script, replace=True)

store = ConfigStore.instance()
store.store(name="schema", node=Config)
for group, node in [
    ("data", DataConfig),
    ("loader", LoaderConfig),
    ("model", ModelConfig),
    ("optimizer", OptimizerConfig),
    ("task", TaskConfig),
]:
    store.store(group=group, name="schema", node=node)
