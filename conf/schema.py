"""The typed configuration: keys, types, defaults, meanings and ranges.

Hydra checks the YAML files and the command line against these classes: a wrong key or type fails
at the start. The YAML files in this folder only hold values.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf


@dataclass(frozen=True)
class Allowed:
    """Range of a key: a description for messages, and the test of a value."""

    description: str
    contains: Callable[[Any], bool]


def key(default: Any, allowed: Allowed | None = None) -> Any:
    """Declare a key with its default and range; null is allowed if it is the default."""
    metadata = {"allowed": allowed}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(*names: str) -> Allowed:
    return Allowed(f"{', '.join(names[:-1])} or {names[-1]}", names.__contains__)


def are_numbers(values: Any, count: int | None = None) -> bool:
    """Return True for a list of `count` finite numbers; by default, of one or more."""
    return (
        isinstance(values, list)
        and len(values) == (count or max(1, len(values)))
        and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    )


def is_pair(values: Any, high: float = math.inf) -> bool:
    """Return True for a list of two finite numbers with 0 < first <= second <= high."""
    return are_numbers(values, 2) and 0 < values[0] <= values[1] <= high


def is_size(value: Any) -> bool:  # part: images
    """Return True for a length in pixels, and for [height, width]."""
    sizes = value if are_numbers(value, 2) else [value]
    return all(type(size) is int and size >= 1 for size in sizes)


FROM_0 = Allowed("0 or more", lambda x: 0 <= x < math.inf)
FROM_1 = Allowed("1 or more", lambda x: 1 <= x < math.inf)
ABOVE_0 = Allowed("a number above 0", lambda x: 0 < x < math.inf)
SHARE = Allowed("a number in [0, 1]", lambda x: 0 <= x <= 1)
BELOW_1 = Allowed("a number in [0, 1)", lambda x: 0 <= x < 1)
BETWEEN_0_AND_1 = Allowed("a number in (0, 1)", lambda x: 0 < x < 1)
FOLDER_BELOW = Allowed(  # part: pairs
    "a folder below data.root, without ..",
    lambda x: not Path(x).is_absolute() and ".." not in Path(x).parts,
)
NAMES = Allowed("one name or more, as [label]", bool)  # part: table
LABEL_KINDS = one_of("auto", "classes", "several", "numbers")  # part: table
FROM_2 = Allowed("2 or more", lambda x: x >= 2)  # part: masks
SIZE = Allowed("an int or [height, width] in pixels", is_size)  # part: images
SHARES = Allowed("[low, high] with 0 < low <= high <= 1", lambda x: is_pair(x, 1))  # part: images
VALUE_RANGE = Allowed("[0, 1] or [-1, 1], for example", lambda x: are_numbers(x, 2) and x[0] < x[1])
MEAN = Allowed("one number for each channel", are_numbers)  # part: images
STD = Allowed(  # part: images
    "one number above 0 for each channel",
    lambda x: are_numbers(x) and min(x) > 0,
)
WORKERS = Allowed(
    "0 or more, or auto",
    lambda x: x == "auto" or (type(x) is int and x >= 0),
)
CLIP = Allowed("a number above 0, or inf", lambda x: x > 0)
DEVICE = Allowed(
    "auto, cpu, cuda or cuda:1", lambda x: re.fullmatch(r"auto|cpu|cuda(:\d+)?", x) is not None
)
SEED = Allowed("0 to 2**63 - 1", lambda x: 0 <= x < 2**63)
ANGLE = Allowed("0 to 180 degrees", lambda x: 0 <= x <= 180)  # part: spatial
SCALES = Allowed("[low, high] with 0 < low <= high", is_pair)  # part: spatial
BLUR = Allowed(  # part: spatial
    "[probability, low, high] with 0 < low <= high pixels",
    lambda x: are_numbers(x, 3) and 0 <= x[0] <= 1 and is_pair(x[1:]),
)
JITTER = Allowed(  # part: colour
    "three numbers in [0, 1]", lambda x: are_numbers(x, 3) and all(0 <= each <= 1 for each in x)
)
RANDAUGMENT = Allowed(  # part: colour
    "[operations, magnitude] with 1 to 4 and 0 to 30",
    lambda x: are_numbers(x, 2) and x[0] in (1, 2, 3, 4) and 0 <= x[1] <= 30,
)


@dataclass
class DataConfig:
    layout: str = MISSING
    """Layout of the data set on disk: `imagefolder` (one folder per class), `pairs` (two folders
    with images of the same names), `cells` (class folders of TIFFs with any number of channels),
    `table` (a file of images and labels), `masks` (two folders with images and the classes of their
    pixels), `caltech256`, `mnist_mini` (embedded), `mnist`, or `own` (ordinary Datasets)."""

    name: str | None = None
    """own: name of a file in `loaders/own/`."""

    root: str = MISSING
    """Folder of the data set, relative to the folder that the script is started in, or place of its
    shards: a folder, `http(s)://`, `s3://` or `gs://`."""

    cache_dir: str = "data/cache"
    """Folder of derived files: image sizes and copies of shards."""

    cache_gb: float | None = key(None, FROM_0)  # part: shards
    """Gigabytes (1e9 bytes) for copies of shards of a web server or bucket in `cache_dir`/shards,
    for all runs of the machine; the least recently used are removed first. null: as many as this
    run needs, two windows and two shards with `shuffle=window`, all shards with `shuffle=full`."""

    retry_s: float = key(300.0, FROM_0)  # part: shards
    """Seconds for which requests to a web server or bucket are repeated when it fails or does not
    answer, before the run ends; an object that is forbidden or missing ends it at once."""

    index: str | None = None  # part: index
    """Folder that `python -m loaders.index ... out=DIR` wrote: training starts without listing the
    data set; null: list it at each start."""

    check_files: bool = True
    """Compare the size and modification time of every file with the index at the start; false: only
    when the file is read."""

    val_fraction: float = key(0.1, BETWEEN_0_AND_1)
    """Share of samples for validation, unless the data is split already, as by folders."""

    val_count: int | None = key(None, FROM_1)  # part: images
    """Number of samples used for validation, instead of `val_fraction`."""

    split_seed: int = key(0, FROM_0)  # part: images
    """Seed of the split; separate from `seed`, so that runs with other seeds share the split."""

    input_dir: str = key("input", FOLDER_BELOW)  # part: pairs
    """pairs, masks: folder of the inputs below `root`, or below its `train` and `val`."""

    target_dir: str = key("target", FOLDER_BELOW)  # part: pairs
    """pairs, masks: folder of the targets, with the same relative paths."""

    table: str | None = None  # part: table
    """table: CSV or Parquet file with one line per sample. An optional column `split` holds
    `train`, `val` or `test`; without lines of `val`, those of `test` are used for validation."""

    path_column: str = "path"  # part: table
    """table: column with the images' paths, relative to `root`."""

    label_columns: list[str] = key(["label"], NAMES)  # part: table
    """table: columns with the labels."""

    label_kind: str = key("auto", LABEL_KINDS)  # part: table
    """table: `classes` (names or integers in one column), `several` (columns of 0 and 1, or one of
    names separated by `;`, a `;` alone for none), `numbers`, or `auto`: inferred from the cells."""

    num_classes: int | None = key(None, FROM_2)  # part: masks
    """masks: number of classes; null: one more than the highest index in the masks."""

    ignore_index: int = -100
    """masks: index of pixels without a class, often 255. No mask has the default: all count."""

    shuffle: str = key("full", one_of("full", "window"))  # part: shards
    """Training order: `full` (any sample may follow any other) or, for shards, `window`: the shards
    are shuffled, and then the samples within each window of `shuffle_window` shards."""

    shuffle_window: int = key(8, FROM_1)  # part: shards
    """Number of shards in a window with `shuffle=window`."""

    max_pixels: int = key(100_000_000, FROM_1)  # part: images
    """Largest number of pixels of an image; protects against decompression bombs."""

    on_error: str = key("raise", one_of("raise", "skip"))
    """Action if a file cannot be decoded: `raise` (stop and name it) or `skip`: training takes the
    rank's next good sample in its place, evaluation leaves it out. Files whose headers are already
    bad belong to no split."""

    max_bad_samples: int = key(10, FROM_0)
    """Number of bad samples that a split may have with `on_error=skip`, over all ranks and resumes,
    before the run stops; `summary.json` counts them."""

    resize: Any = key(None, SIZE)  # part: images
    """Size before the crop, in pixels: null (keep), an int (shorter side) or [height, width]."""

    reduced_decoding: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size if the crop is much larger than the output
    (packing and loader=pytorch). Pixels then differ from full decoding by 0.5 of 255 on average."""

    crop: Any = key(None, SIZE)  # part: images
    """Size of the model's input in pixels, [height, width] or an int for a square; null: the whole
    (resized) image."""

    random_crop: bool = False  # part: images
    """Crop at a random position in training; false: at the centre, as in evaluation."""

    random_resized_crop: Any = key(None, SHARES)  # part: images
    """Crop a random share of the image's area in training, [low, high] in (0, 1], with an aspect
    ratio in [3/4, 4/3], and resize it to `crop`; null: off."""

    hflip: float = key(0.0, SHARE)  # part: images
    """Probability of a left-right flip in training."""

    vflip: float = key(0.0, SHARE)  # part: images
    """Probability of an upside-down flip in training."""

    colour_jitter: list[float] = key([0.0, 0.0, 0.0], JITTER)  # part: colour
    """Strengths s of [brightness, contrast, saturation] in training: uniform factors in 1 ± s."""

    randaugment: Any = key(None, RANDAUGMENT)  # part: colour
    """RandAugment in training: [operations, magnitude 0 to 30], as [2, 9], drawn from brightness,
    contrast, colour, sharpness, posterize, solarize, autocontrast, equalize and none; null: off."""

    gaussian_blur: list[float] = key([0.0, 0.1, 2.0], BLUR)  # part: spatial
    """Blur of inputs in training: [probability, smallest, largest standard deviation in pixels]."""

    rotation: float = key(0.0, ANGLE)  # part: spatial
    """Largest angle of a rotation about the centre in training, in degrees: uniform in ± this.
    Target images and masks are rotated, too. New pixels are `mean`, in masks `ignore_index`."""

    random_scale: Any = key(None, SCALES)  # part: spatial
    """Enlarge about the centre by factors in [low, high] in training, with rotation; null: off."""

    random_erasing: float = key(0.0, SHARE)  # part: spatial
    """Probability that in training a rectangle of 2 to 33 % of an input's area becomes `mean`."""

    mixup: float = key(0.0, FROM_0)  # part: mixing
    """Alpha of MixUp, such as 0.2: each training sample is mixed with another one of its batch, by
    weights from Beta(alpha, alpha); labels become probabilities. 0: off. Not for masks."""

    cutmix: float = key(0.0, FROM_0)  # part: mixing
    """Alpha of CutMix: a rectangle of each training image comes from another one of its batch, and
    labels are mixed by area. 0: off; with `mixup`, half of the samples each. Not for numbers."""

    value_range: list[float] = key([0.0, 1.0], VALUE_RANGE)
    """Values [low, high] of black and full intensity, before `mean` and `std`."""

    mean: list[float] | None = key(None, MEAN)  # part: images
    """Mean per channel, in units of `value_range`, that is subtracted from the inputs; null: 0."""

    std: list[float] | None = key(None, STD)  # part: images
    """Standard deviation per channel, in units of `value_range`, that divides inputs; null: 1."""


@dataclass
class LoaderConfig:
    name: str = MISSING
    """Backend: `pytorch`, `dali`, `dali_reader`, `packed` or `synthetic`."""

    num_workers: Any = key(None, WORKERS)
    """pytorch, packed: worker processes per rank; 0: threads of the training process; null: on a
    GPU one for each CPU of the rank but one, on a CPU or without images 0. `auto`: a measurement of
    some seconds chooses workers and threads (dali: threads)."""

    prefetch_factor: int = key(2, FROM_1)
    """pytorch, packed: batches prepared ahead. Workers that cannot share a batch, because it is
    small or not of images, prepare so many each."""

    num_threads: int = key(0, FROM_0)  # part: images
    """pytorch, packed: threads per worker process; dali: CPU threads per rank; 0: all CPUs of the
    machine, divided among its ranks and their workers."""

    prefetch_queue_depth: int = key(2, FROM_1)  # part: dali|tune
    """dali: batches prepared ahead."""

    hw_decoder_load: float = key(0.65, SHARE)  # part: dali
    """dali: share of the JPEGs for the GPU's hardware decoder, if it has one."""

    pack: str | None = None  # part: packed
    """packed: folder that `python -m loaders.pack ... out=DIR` wrote."""

    channels_last: bool = "${model.channels_last}"  # type: ignore[assignment]
    """Inputs in channels_last; by default, as the model."""


@dataclass
class ModelConfig:
    name: str = MISSING
    """Name of a file in `models/`."""

    arch: str | None = None
    """Architecture, with the models `torchvision` and `timm`: a name of
    `torchvision.models.list_models()` that classifies images, or of `timm.list_models()`."""

    channels_last: bool = False
    """Weights and activations in channels_last; faster for convolutions under AMP on CUDA."""

    compile: bool = False
    """Fuse operations with torch.compile; the first steps take long; CPUs need a C++ compiler."""

    kwargs: dict[str, Any] = key({})
    """Further arguments of the model's constructor, such as `batch_norm`."""

    weights: str | None = None
    """Initial weights: `imagenet` (torchvision's or timm's), a `.safetensors` or `.pt` file, or the
    folder of a run; null: random. Tensors of the right name and shape are loaded, the others start
    at random. A resumed run has the weights of its checkpoint instead."""

    freeze: str | None = None
    """`backbone`: train the head (the last layer or layers) alone; BatchNorm statistics before it
    stay fixed. null: train all layers."""


@dataclass
class OptimizerConfig:
    name: str = MISSING
    """Class of `torch.optim`, in any case: `adamw`, `sgd`, `radam`, `muon` (matrices only), ..."""

    kwargs: dict[str, Any] = key({})
    """Further arguments of the class, such as `momentum`."""

    lr: float = key(MISSING, ABOVE_0)
    """Peak learning rate, reached at the end of the warm-up."""

    weight_decay: float = key(0.0, FROM_0)
    """L2 penalty or decoupled decay, as the class defines it."""

    decay_norms_and_biases: bool = True
    """Apply `weight_decay` to parameters with fewer than two dimensions, too."""

    warmup_epochs: float = key(0.0, FROM_0)
    """Epochs of linear warm-up from 1 % of `lr`."""

    warmup_steps: int | None = key(None, FROM_0)
    """Steps of the warm-up, instead of `warmup_epochs`."""

    schedule: str = key("cosine", one_of("cosine", "linear", "constant", "step"))
    """Learning rate after the warm-up: `cosine` or `linear` (to 0 at the end of the last epoch),
    `constant`, or `step` (times `step_factor` after every `step_epochs` epochs)."""

    step_epochs: int = key(30, FROM_1)
    """step: epochs between two changes of the learning rate."""

    step_factor: float = key(0.1, ABOVE_0)
    """step: factor of each change."""

    backbone_lr_scale: float = key(1.0, ABOVE_0)
    """Factor of `lr` for all layers but the head, such as 0.1 for fine-tuning."""


@dataclass
class TaskConfig:
    name: str = MISSING
    """Task, by the targets of the data: `classification` (one label), `multilabel` (several),
    `regression` (numbers), `restoration` (images) or `segmentation` (masks)."""

    loss: str = MISSING
    """`cross_entropy` for classification and segmentation; `bce` for multilabel; `mse` or `l1` for
    regression; `charbonnier` or `l1` for restoration."""

    label_smoothing: float = key(0.0, BELOW_1)
    """Classification, segmentation: share of the probability that is spread over all classes."""


@dataclass
class LossConfig:
    weights: Any = None
    """Weights of the classes, for classes with few images or pixels: null (equal), `auto` (inverse
    to their frequency in the training labels) or one number for each class."""


@dataclass
class CheckpointConfig:
    every_steps: int | None = key(None, FROM_1)
    """Steps between two checkpoints, in addition to those at the end of each epoch; null: none."""

    every_minutes: float | None = key(None, ABOVE_0)
    """Minutes between two checkpoints, in addition to those at the end of epochs; null: none."""

    keep: int = key(2, FROM_1)
    """Number of newest checkpoints to keep; if one is damaged, a run resumes from an older one."""

    best: bool = True
    """Keep the checkpoint of the epoch with the best value of the task's main metric, too; among
    equal ones, of that with the lowest `val/loss`."""

    on_error: str = key("raise", one_of("raise", "warn"))
    """Action when a checkpoint cannot be written (a full disk): `raise` or `warn`."""

    fresh_epoch: bool = False
    """Resume even if the data or its plan have changed, from the beginning of the epoch."""


@dataclass
class AmpConfig:
    dtype: str = key("auto", one_of("auto", "float16", "bfloat16", "float32"))
    """`float16` (with loss scaling), `bfloat16` (without: it has the range of float32), `float32`
    (off) or `auto`: float16 on CUDA, bfloat16 on a CPU."""

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
    """The run ends after so many epochs in a row in which the task's best metric did not improve;
    null: never."""


@dataclass
class LogConfig:
    to: list[str] = key(["tensorboard"])
    """Loggers: any of tensorboard, csv, wandb and mlflow."""

    every_steps: int = key(20, FROM_1)
    """Steps between two log points, where values are fetched from the device."""

    images: int = key(16, FROM_0)
    """Number of images in the grids of inputs, and, up to 16, in those of the validation's worst
    predictions; 0: none."""

    progress: bool = True
    """Progress bar on a terminal; false, or without a terminal: plain lines."""


@dataclass
class ProfileConfig:
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
    """Number of passes over the training split."""

    max_steps: int | None = key(None, FROM_1)
    """Number of optimizer steps after which the run ends; the schedule stays that of `epochs`."""

    global_batch_size: int = key(64, FROM_1)
    """Number of samples per optimizer step over all devices."""

    accumulate_steps: int = key(1, FROM_1)
    """Number of parts of a batch whose gradients are added up, in scripts that accumulate them."""

    max_bad_steps: int = key(25, FROM_1)
    """Steps whose gradient norm is not finite are skipped; so many of them in a row end the run."""

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
