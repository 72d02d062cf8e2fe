"""The typed configuration: every key, its type, its default and what it means.

Hydra checks the YAML files and the command line against these classes, so that a wrong key or type
fails at start. The YAML files beside this one only hold values.
"""

import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from conf.mistakes import end_in_a_few_lines


@dataclass
class DataConfig:
    layout: str = MISSING
    """How the samples lie on disk: `imagefolder` (one folder per class), `pairs` (two folders with images
    of the same names), `cells` (class folders of TIFFs with any number of channels), `table` (a
    file that lists images and labels), `masks` (two folders with images and the classes of their pixels),
    `caltech256`, `mnist_mini` (embedded) or `mnist`."""

    root: str = MISSING
    """Folder of the data set, relative to the folder that the script is started in; or where shards of it lie:
    a folder, `http(s)://`, `s3://` or `gs://`."""

    cache_dir: str = "data/cache"
    """Where derived files go: image sizes, and what `loader.num_workers=auto` found."""

    cache_gb: float = 0.0
    """Gigabytes (1e9 bytes) of copies of what is read from a web server or bucket, kept whole in
    `cache_dir`/shards and shared by all runs of the machine; the least recently used go first. 0: none."""

    retry_s: float = 300.0
    """Seconds for which a web server or bucket may fail or not answer, request by request, before the run
    ends; what it forbids or lacks ends it at once."""

    index: str | None = None
    """Folder that `python -m loaders.index ... out=DIR` wrote: training starts from it without a look at the
    data set's folders; null: they are gone through at each start."""

    check_files: bool = True
    """Compare size and time of change of every file at start with what is known of it; false: only when it
    is read."""

    val_fraction: float = 0.1
    """Share of the samples that validates, where there are no folders `train` and `val` (or `test`)."""

    val_count: int | None = None
    """Number of samples that validate, instead of `val_fraction`."""

    split_seed: int = 0
    """Chooses the samples that validate; apart from `seed`, so that runs can be compared."""

    input_dir: str = "input"
    """pairs, masks: the folder of the inputs."""

    target_dir: str = "target"
    """pairs, masks: the folder of the targets, with the same relative paths."""

    table: str | None = None
    """table: the CSV or Parquet file, one line a sample. An optional column `split` holds `train`, `val` or
    `test`; the lines of `test` validate where none are of `val`."""

    path_column: str = "path"
    """table: the column with the images' paths, relative to `root`."""

    label_columns: list[str] = field(default_factory=lambda: ["label"])
    """table: the columns with the labels."""

    label_kind: str = "auto"
    """table: `classes` (names or integers in one column), `several` (columns of 0 and 1, or names with `;`
    between them in one column, a `;` alone for none), `numbers`, or `auto`: what the cells look like."""

    num_classes: int | None = None
    """masks: the number of classes; null: one more than the highest index in the masks."""

    ignore_index: int = -100
    """masks: the index of pixels that belong to no class, often 255; -100, which no mask holds: none."""

    shuffle: str = "full"
    """Training order: `full` (any sample may follow any other) or, of shards, `window`: the shards are
    shuffled, and then the samples within each window of `shuffle_window` of them."""

    shuffle_window: int = 8
    """Shards from which samples come at a time with `shuffle=window`."""

    max_pixels: int = 100_000_000
    """Largest image that is accepted, in pixels; protects from files that explode when decoded."""

    on_error: str = "raise"
    """A file that cannot be decoded: `raise` (stop and name it) or `skip` (training takes the next good
    sample of its shard instead, evaluation leaves it out; one whose header is bad is no sample at all)."""

    max_bad_samples: int = 10
    """With `on_error=skip`: bad samples that a split may have, over all ranks and resumes, before the run
    stops; `summary.json` counts them."""

    resize: Any = None
    """Before the crop: null (keep), an int (length of the shorter side) or [height, width]; pixels."""

    reduced_decoding: bool = True
    """Packing and loader=pytorch: a JPEG of which much more than the output is cut is decoded at 1/2, 1/4 or
    1/8 of its size. Its pixels then differ from those of whole decoding by 0.5 of 255 on average; false:
    whole decoding."""

    crop: Any = None
    """[height, width] of what the model sees, in pixels, or an int: a square; null: the whole (resized)
    image."""

    random_crop: bool = False
    """Training crops at a random position; off: at the centre, as evaluation does."""

    random_resized_crop: Any = None
    """Training crops a random share of the image's area, [low, high] in (0, 1], with an aspect ratio
    in [3/4, 4/3], and resizes it to `crop`; null: off."""

    hflip: float = 0.0
    """Probability of a left-right flip in training."""

    vflip: float = 0.0
    """Probability of an upside-down flip in training."""

    colour_jitter: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Strength of [brightness, contrast, saturation]: factors are uniform in 1 ± strength."""

    randaugment: Any = None
    """Training changes each input by [operations, magnitude 0 to 30], such as [2, 9]: operations drawn from
    brightness, contrast, colour, sharpness, posterize, solarize, autocontrast, equalize and none; null: off."""

    gaussian_blur: list[float] = field(default_factory=lambda: [0.0, 0.1, 2.0])
    """Inputs blurred in training: [probability, smallest, largest standard deviation in pixels]."""

    rotation: float = 0.0
    """Largest angle of a rotation about the centre in training, in degrees: uniform in ± this. A target image
    turns with its input, and so does a mask. What comes from outside is `mean`, in masks without a class."""

    random_scale: Any = None
    """Training enlarges about the centre by a factor in [low, high], together with the rotation; null: off."""

    random_erasing: float = 0.0
    """Probability that a rectangle of an input, 2 to 33 % of its area, becomes `mean` in training."""

    mixup: float = 0.0
    """alpha of MixUp: each training sample is mixed with one of the same batch, by weights from
    Beta(alpha, alpha), such as 0.2; its labels become probabilities. 0: off. Not for masks."""

    cutmix: float = 0.0
    """alpha of CutMix: a rectangle of each training image is that of another one of the same batch, its
    labels are mixed by area. 0: off; with `mixup`, half of the samples each. Not for numbers."""

    value_range: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """[low, high] that black and full intensity map to, before `mean` and `std`."""

    mean: list[float] | None = None
    """Per channel, in units of `value_range`: subtracted from the inputs; null: 0."""

    std: list[float] | None = None
    """Per channel, in units of `value_range`: divides the inputs; null: 1."""


@dataclass
class LoaderConfig:
    name: str = MISSING
    """The backend that executes the plan: `pytorch`, `dali`, `packed` or `synthetic`."""

    num_workers: Any = 0
    """pytorch, packed: worker processes per rank; 0 loads with threads of the training process. `auto`:
    a measurement of some seconds chooses the workers and threads (dali: the threads), and is kept."""

    prefetch_factor: int = 2
    """pytorch, packed: batches that each worker prepares ahead."""

    num_threads: int = 0
    """pytorch, packed: threads per worker process; dali: CPU threads per rank; 0: all CPUs of the
    machine, divided among its ranks and their workers."""

    prefetch_queue_depth: int = 2
    """dali: batches prepared ahead."""

    reader: str = "plan"
    """dali: `plan` (the order of all backends) or `native` (DALI's own file reader, shuffling and crops)."""

    hw_decoder_load: float = 0.65
    """dali: share of the JPEGs that the GPU's hardware decoder takes, where it has one."""

    pack: str | None = None
    """packed: the folder that `python -m loaders.pack ... out=DIR` wrote."""

    channels_last: bool = "${model.channels_last}"  # type: ignore[assignment]
    """Memory format of the inputs; follows the model."""


@dataclass
class ModelConfig:
    name: str = MISSING
    """A key of `models.MODELS`."""

    channels_last: bool = False
    """Memory format of weights and activations; faster for convolutions under AMP on CUDA."""

    compile: bool = False
    """Fuse the model's operations with torch.compile. The first steps then take up to minutes, and the
    CPU needs a C++ compiler."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's constructor, such as `batch_norm`."""

    weights: str | None = None
    """What the model starts from: `imagenet` (torchvision's), a `.safetensors` or `.pt` file, or the folder
    of a run; null: fresh weights. What fits is loaded; a resumed run has its own."""

    freeze: str | None = None
    """`backbone`: the head, which is the last layer, alone learns; BatchNorm statistics before it stay as
    they are. null: all learns."""


@dataclass
class OptimizerConfig:
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
    """Learning rate of all layers but the head, divided by `lr`; 0.1, for example, when fine-tuning."""


@dataclass
class TaskConfig:
    name: str = MISSING
    """By the data's targets: `classification` (one label), `multilabel` (several), `regression` (numbers),
    `restoration` (images) or `segmentation` (masks)."""

    loss: str = MISSING
    """`cross_entropy` for classification and segmentation; `bce` for multilabel; `mse` or `l1` for
    regression; `charbonnier` or `l1` for restoration."""

    label_smoothing: float = 0.0
    """Classification, segmentation: share of the target's probability spread over all classes."""


@dataclass
class LossConfig:
    weights: Any = None
    """Of the classes, where some have few images or pixels: null (all alike), `auto` (from the training
    labels: each class counts as much as any other) or one number for each class."""


@dataclass
class CheckpointConfig:
    every_steps: int | None = None
    """Also save after so many steps, besides at the end of each epoch; null: do not."""

    every_minutes: float | None = None
    """Also save when so many minutes have passed since the last time; null: do not."""

    keep: int = 2
    """Number of newest checkpoints that stay; a damaged newest one is replaced by the one before it."""

    best: bool = True
    """Also keep the checkpoint of the epoch with the best value of the task's main metric."""

    on_error: str = "raise"
    """`raise` or `warn`: what to do when a checkpoint could not be written (a full disk)."""

    fresh_epoch: bool = False
    """Resume although the data or its plan differ from the checkpoint's; its epoch starts anew."""


@dataclass
class AmpConfig:
    dtype: str = "auto"
    """`float16` (loss scaling on), `bfloat16` (same range as float32: the scaler is disabled) or `auto`:
    float16 on CUDA, bfloat16 on a CPU."""

    init_scale: float = 65536.0
    """First loss scale; halved at each overflow, doubled after 2,000 steps without one."""


@dataclass
class EmaConfig:
    decay: float = 0.999
    """Share of the average that stays in a step; less in the first steps, so that it forgets the start."""


@dataclass
class DistributedConfig:
    backend: str = "auto"
    """`auto` (NCCL on CUDA, gloo on the CPU), `nccl` or `gloo`."""

    sync_batchnorm: bool = True
    """On CUDA, BatchNorm with the statistics of the global batch. Each such layer exchanges sums and waits
    for the GPU; off: each rank normalises by its own part, and keeps rank 0's statistics."""

    timeout_s: float = 600.0
    """Seconds after which a collective that some rank never joined fails on the others."""


@dataclass
class LogConfig:
    every_steps: int = 20
    """Steps between two log points; only then are values fetched from the device."""

    images: int = 16
    """Images in TensorBoard's grids of inputs and of predictions, at most 16 of the latter; 0: none."""

    progress: bool = True
    """Progress bar on a terminal; without a terminal, plain lines."""


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

    name: str = "${run_stamp:}"
    """Name of the run; default: the time at which it was started."""

    output_dir: str = "outputs/${script:}/${name}"
    """The run's one folder: resolved config, log, TensorBoard events, checkpoints, summary."""

    epochs: int = 4
    """Passes over the training split."""

    max_steps: int | None = None
    """End early after so many optimizer steps in all; the schedule stays that of `epochs`."""

    global_batch_size: int = 64
    """Samples per optimizer step over all devices; the size per device follows from it."""

    accumulate_steps: int = 1
    """Parts of a batch whose gradients are added up to one optimizer step (`train_accumulate.py`)."""

    max_bad_steps: int = 25
    """Steps in a row whose gradient norm is not finite, each of them skipped, that end the run."""

    clip_grad_norm: float = float("inf")
    """Largest L2 norm of all gradients together; larger ones are scaled down to it."""

    resume: str | None = None
    """null: start anew; `auto`: go on with the newest checkpoint in `output_dir`, if there is one;
    or the path of a checkpoint or another run, from which this run starts and, restarted, goes on."""

    overwrite: bool = False
    """A fresh run in the folder of an earlier one: remove that one's checkpoints and TensorBoard events
    first. Without it, such a run is refused."""

    device: str = "auto"
    """`auto` (CUDA if there is one, else the CPU), `cpu`, `cuda` or `cuda:1`."""

    fp32_precision: str | None = None
    """What CUDA's matrix products and convolutions in float32 compute in: `ieee` (float32) or `tf32` (10
    bits of mantissa, several times as fast); null: as PyTorch does, convolutions in tf32, products in ieee."""

    deterministic: bool = False
    """The same bits in each run on the same GPU: only algorithms that give them, which takes longer. What has
    none raises an error; the CPU needs no such choice."""

    seed: int = 0
    """Decides the initial weights and, with the epoch, the whole plan of the data."""


def run_stamp() -> str:
    """Start time of the run, as runs are named."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def script() -> str:
    """Name of the running script, such as `train`; Hydra's own is not known yet when a multirun starts."""
    return Path(sys.argv[0]).stem


# Cached, because every look at `name` has to give the same; runtime/distributed.py asks the other ranks.
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

# Beside a training script, not under pytest or `python -m`.
if Path(sys.argv[0]).suffix == ".py" and Path(sys.argv[0]).with_name("conf").is_dir():
    end_in_a_few_lines()
