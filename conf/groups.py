"""Keys of the groups of which conf/ has a folder of choices: the data, the loader, the model, the
optimizer and the task."""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from conf import ranges
from conf.ranges import key, one_of


@dataclass
class DataConfig:
    layout: str = MISSING
    """Layout of the data set on disk, a file in `loaders/layouts/`, such as `imagefolder`."""
    root: str = MISSING
    """Folder of the data set, or of its shards: a folder, `http(s)://`, `s3://` or `gs://`."""
    name: str | None = key(None, of="data=own")
    """Name of a file in `loaders/own/`."""
    input_dir: str = key("input", of="data=pairs or data=masks")
    """Folder of the inputs below `root`, or below its `train` and `val`."""
    target_dir: str = key("target", of="data=pairs or data=masks")
    """Folder of the targets, with the same relative paths."""
    num_classes: int | None = key(None, ranges.FROM_2, "data=masks")
    """Number of classes; null: one more than the highest index in the masks."""
    ignore_index: int = key(-100, of="data=masks")
    """Index of pixels without a class, often 255. No mask has the default: all count."""
    table: str | None = key(None, of="data=table")
    """CSV or Parquet file with a line per sample; a column `split` has train, val or test."""
    path_column: str = key("path", of="data=table")
    """Column with the images' paths, relative to `root`."""
    label_columns: list[str] = key(["label"], of="data=table")
    """Columns with the labels."""
    label_kind: str = key("auto", one_of("auto", "classes", "several", "numbers"), "data=table")
    """`classes`, `several` (columns of 0 and 1, or names separated by `;`), `numbers` or `auto`."""

    cache_dir: str = "data/cache"
    """Folder of derived files: headers of images, and copies of shards."""
    retry_s: float = key(300.0, ranges.FROM_0)
    """Seconds for which requests to a web server or bucket that fails are repeated."""

    val_fraction: float = key(0.1, ranges.BETWEEN_0_AND_1)
    """Share of samples for validation, unless the data is split already, as by folders."""
    val_count: int | None = key(None, ranges.FROM_1)
    """Number of samples used for validation, instead of `val_fraction`."""
    split_seed: int = key(0, ranges.FROM_0)
    """Seed of the split; separate from `seed`, so that runs with other seeds share the split."""
    fold: int | None = key(None, ranges.FROM_0)
    """Number of the fold that validates, from 0 on, with equal shares of the classes; null: off."""
    num_folds: int = key(5, ranges.FROM_2, "data.fold=NUMBER")
    """Number of folds, for `fold`."""

    shuffle: str = key("full", one_of("full", "window"), "images")
    """`full`, or for shards `window`: shards, then samples within `shuffle_window` of them."""
    shuffle_window: int = key(8, ranges.FROM_1, "data.shuffle=window")
    """Number of shards in a window."""

    max_pixels: int = key(100_000_000, ranges.FROM_1, "images")
    """Largest number of pixels of an image; protects against decompression bombs."""
    on_error: str = key("raise", one_of("raise", "skip"))
    """If a file cannot be decoded: `raise` (stop, name it) or, not with DALI, `skip`: training
    takes the next good sample in its place, evaluation leaves it out."""
    leave_out: str | None = key(None, of="images")
    """File with paths of images to leave out, as `loaders.check ... out=FILE` writes it."""
    background: list[int] = key([255, 255, 255], ranges.COLOUR)
    """Colour [red, green, blue] behind transparent pixels, 0 to 255 each."""
    exif: bool | None = None
    """Turn images upright by their EXIF orientation; null: but not beside a target without."""

    resize: Any = key(None, ranges.SIZE)
    """Size before the crop, in pixels: null (keep), an int (shorter side) or [height, width]."""
    reduced_decoding: bool = key(True, of="images")
    """Decode JPEGs at 1/2 to 1/8 of their size where the output is that small; not with DALI."""
    crop: Any = key(None, ranges.SIZE)
    """Size of the model's input, [height, width] or an int; null: the whole (resized) image."""
    random_crop: bool = key(False, of="images")
    """Crop at a random position in training; false: at the centre, as in evaluation."""
    random_resized_crop: Any = key(None, ranges.SHARES, "images")
    """Crop a share in [low, high] of the area, 3:4 to 4:3, in training, resized to `crop`."""

    hflip: float = key(0.0, ranges.SHARE, "images")
    """Probability of a left-right flip in training."""
    vflip: float = key(0.0, ranges.SHARE, "images")
    """Probability of an upside-down flip in training."""
    colour_jitter: list[float] = key([0.0, 0.0, 0.0], ranges.STRENGTHS, "images")
    """Strengths s of [brightness, contrast, saturation] in training: uniform factors in 1 ± s."""
    randaugment: Any = key(None, ranges.RANDAUGMENT, "images")
    """RandAugment in training: [operations, magnitude 0 to 30], as [2, 9]; null: off."""
    rotation: float = key(0.0, ranges.FROM_0, "images")
    """Largest angle of a rotation about the centre in training, in degrees; targets turn along."""
    random_scale: Any = key(None, ranges.SCALES, "images")
    """Enlarge about the centre by factors in [low, high] in training, with rotation; null: off."""
    random_erasing: float = key(0.0, ranges.SHARE, "images")
    """Probability that in training a rectangle of 2 to 33 % of an input's area becomes `mean`."""
    mixup: float = key(0.0, ranges.FROM_0, "images")
    """Alpha of MixUp, such as 0.2: mix each training sample and its label with another; 0: off."""
    cutmix: float = key(0.0, ranges.FROM_0, "images")
    """Alpha of CutMix: paste a rectangle of another image, and mix labels by its area; 0: off."""

    value_range: list[float] = key([0.0, 1.0], ranges.LOW_HIGH, "images")
    """Values [low, high] of black and full intensity, before `mean` and `std`."""
    mean: list[float] | None = None
    """Mean per channel, in units of `value_range`, that is subtracted from the inputs; null: 0."""
    std: list[float] | None = key(None, ranges.ALL_ABOVE_0)
    """Standard deviation per channel, in units of `value_range`, that divides inputs; null: 1."""


@dataclass
class LoaderConfig:
    name: str = MISSING
    """Backend, a file in `loaders/backends/`, such as `pytorch` or `synthetic`."""
    pack: str | None = key(None, of="loader=packed")
    """Folder that `python -m loaders.pack ... out=DIR` wrote."""

    num_workers: int | None = key(None, ranges.FROM_0, "loader=pytorch or loader=packed")
    """Worker processes per rank; 0: threads of the training process; null: 0 on a CPU, on a GPU one
    for each CPU of the rank but one. `python -m tools.bottleneck` finds the best number."""
    prefetch_factor: int = key(2, ranges.FROM_1)
    """Batches prepared ahead by each worker or, of files, by threads of the training process."""
    num_threads: int = key(0, ranges.FROM_0, "images")
    """CPU threads per worker or, without workers, per rank; 0: an equal share of all CPUs."""

    channels_last: bool = "${model.channels_last}"  # type: ignore[assignment]
    """Inputs in channels_last; by default, as the model."""

    prefetch_queue_depth: int = key(2, ranges.FROM_1, "loader=dali")
    """Batches prepared ahead."""
    hw_decoder_load: float = key(0.65, ranges.SHARE, "loader=dali")
    """Share of the JPEGs for the GPU's hardware decoder, if it has one."""


@dataclass
class ModelConfig:
    name: str = MISSING
    """Name of a file in `models/`."""
    arch: str | None = None
    """A name of `torchvision.models.list_models()` or `timm.list_models()`, for these models."""

    channels_last: bool = False
    """Weights and activations in channels_last; faster for convolutions under AMP on CUDA."""
    compile: bool = False
    """Fuse operations with torch.compile; the first steps take long; CPUs need a C++ compiler."""

    kwargs: dict[str, Any] = key({})
    """Further arguments of the model's constructor, such as `batch_norm`."""

    weights: str | None = None
    """Initial weights: `imagenet`, a file (`.safetensors`, `.pt`), a run's folder; null: random."""
    freeze: str | None = key(None, one_of("backbone", "statistics"))
    """`backbone`: train the head alone. `statistics`: train all layers. With both, BatchNorm before
    the head keeps its statistics, and dropout there does nothing."""


@dataclass
class OptimizerConfig:
    name: str = MISSING
    """Class of `torch.optim` (`adamw`, `sgd`, ...) or of timm (`timm.optim.list_optimizers()`)."""

    kwargs: dict[str, Any] = key({})
    """Further arguments of the class, such as `momentum`."""

    lr: float = key(MISSING, ranges.ABOVE_0)
    """Peak learning rate, reached at the end of the warm-up."""
    weight_decay: float = key(0.0, ranges.FROM_0)
    """L2 penalty or decoupled decay, as the class defines it."""
    decay_norms_and_biases: bool = True
    """Apply `weight_decay` to parameters with fewer than two dimensions, too."""
    warmup_epochs: float = key(0.0, ranges.FROM_0)
    """Epochs of linear warm-up from 1 % of `lr`."""
    warmup_steps: int | None = key(None, ranges.FROM_0)
    """Steps of the warm-up, instead of `warmup_epochs`."""

    schedule: str = key("cosine", one_of("cosine", "linear", "constant", "step"))
    """After the warm-up: `cosine` or `linear` to 0, `constant` or `step`."""
    step_epochs: int = key(30, ranges.FROM_1)
    """step: epochs after which the learning rate is multiplied by `step_factor`."""
    step_factor: float = key(0.1, ranges.ABOVE_0)
    """step: that factor."""

    backbone_lr_scale: float = key(1.0, ranges.ABOVE_0)
    """Factor of `lr` for all layers but the head, such as 0.1 for fine-tuning."""
    head_epochs: float = key(0.0, ranges.FROM_0)
    """Epochs at the start in which the head alone learns: the rate of all other layers is 0."""
    layer_decay: float = key(1.0, ranges.UP_TO_1)
    """Factor of the learning rate from each layer to the one below it, such as 0.75 for a ViT."""


@dataclass
class TaskConfig:
    name: str = MISSING
    """`classification`, `multilabel`, `regression`, `restoration` or `segmentation`."""
    loss: str = MISSING
    """`cross_entropy`, `bce` (multilabel), `mse` or `l1`, `charbonnier` or `l1` (restoration)."""
    label_smoothing: float = key(0.0, ranges.BELOW_1, "one class per sample")
    """Share of the probability that is spread over all classes."""
