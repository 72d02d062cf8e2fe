"""Keys of the groups of which conf/ has a folder of choices: the data, the loader, the model, the
optimizer and the task.

Keys of one choice are beside its YAML file: those that only `data=NAME` has, in `data/NAME.py`.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from conf.ranges import (
    ABOVE_0,
    BELOW_1,
    BETWEEN_0_AND_1,
    FROM_0,
    FROM_1,
    FROM_2,
    SHARE,
    Allowed,
    are_numbers,
    is_pair,
    key,
    one_of,
)


def is_size(value: Any) -> bool:
    """Return True for a length in pixels, and for [height, width]."""
    sizes = value if are_numbers(value, 2) else [value]
    return all(type(size) is int and size >= 1 for size in sizes)


SIZE = Allowed("an int or [height, width] in pixels", is_size)
SHARES = Allowed("[low, high] with 0 < low <= high <= 1", lambda x: is_pair(x, 1))
VALUE_RANGE = Allowed("[0, 1] or [-1, 1], for example", lambda x: are_numbers(x, 2) and x[0] < x[1])
MEAN = Allowed("one number for each channel", are_numbers)
STD = Allowed("one number above 0 for each channel", lambda x: are_numbers(x) and min(x) > 0)
ANGLE = Allowed("0 to 180 degrees", lambda x: 0 <= x <= 180)
SCALES = Allowed("[low, high] with 0 < low <= high", is_pair)
JITTER = Allowed(
    "three numbers in [0, 1]", lambda x: are_numbers(x, 3) and all(0 <= each <= 1 for each in x)
)
RANDAUGMENT = Allowed(
    "[operations, magnitude] with 1 to 4 and 0 to 30",
    lambda x: are_numbers(x, 2) and x[0] in (1, 2, 3, 4) and 0 <= x[1] <= 30,
)
COLOUR = Allowed(
    "three ints from 0 to 255",
    lambda x: are_numbers(x, 3) and all(type(each) is int and 0 <= each <= 255 for each in x),
)


@dataclass
class DataConfig:
    layout: str = MISSING
    """Layout of the data set on disk, a file in `loaders/layouts/`, such as `imagefolder` (one
    folder per class), `cells` (class folders of TIFFs with any number of channels) and
    `mnist_mini` (embedded)."""

    root: str = MISSING
    """Folder of the data set, relative to the folder that the script is started in, or place of its
    shards: a folder, `http(s)://`, `s3://` or `gs://`."""

    cache_dir: str = "data/cache"
    """Folder of derived files: headers of images, and copies of shards."""

    retry_s: float = key(300.0, FROM_0)
    """Seconds for which requests to a web server or bucket are repeated when it fails or does not
    answer, before the run ends; an object that is forbidden or missing ends it at once."""

    val_fraction: float = key(0.1, BETWEEN_0_AND_1)
    """Share of samples for validation, unless the data is split already, as by folders."""

    val_count: int | None = key(None, FROM_1)
    """Number of samples used for validation, instead of `val_fraction`."""

    split_seed: int = key(0, FROM_0)
    """Seed of the split; separate from `seed`, so that runs with other seeds share the split."""

    fold: int | None = key(None, FROM_0)
    """Number of the fold that validates, from 0 on: `split_seed` divides the samples, or those of
    `train` if there is no `val`, into `num_folds` with equal shares of the classes; null: off."""

    num_folds: int = key(5, FROM_2)
    """Number of folds, for `fold`."""

    shuffle: str = key("full", one_of("full", "window"))
    """Training order: `full` (any sample may follow any other) or, for shards, `window`: the shards
    are shuffled, and then the samples within each window of `shuffle_window` shards."""

    shuffle_window: int = key(8, FROM_1)
    """Number of shards in a window with `shuffle=window`."""

    max_pixels: int = key(100_000_000, FROM_1)
    """Largest number of pixels of an image; protects against decompression bombs."""

    on_error: str = key("raise", one_of("raise", "skip"))
    """Action if the content of a file cannot be decoded: `raise` (stop and name it) or `skip`:
    training takes the next good sample of the index in its place, evaluation leaves it out. Files
    whose headers are already bad belong to no split. DALI cannot skip."""

    leave_out: str | None = None
    """File with the paths of images that belong to no split, one a line, as `python -m
    loaders.check ... out=FILE` writes it; of pairs, one side is enough."""

    background: list[int] = key([255, 255, 255], COLOUR)
    """Colour [red, green, blue] behind transparent pixels, 0 to 255 each. The result is that of
    Pillow's `Image.paste` with the image's transparency as mask."""

    exif: bool | None = None
    """Turn photos, target images and masks upright by their EXIF orientation; false: read them as
    they are stored; null: turn them, but refuse a photo that is turned beside a target that is
    not."""

    resize: Any = key(None, SIZE)
    """Size before the crop, in pixels: null (keep), an int (shorter side) or [height, width]."""

    reduced_decoding: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size if the crop is much larger than the output
    (packing and loader=pytorch). Pixels then differ from full decoding by 0.5 of 255 on average."""

    crop: Any = key(None, SIZE)
    """Size of the model's input in pixels, [height, width] or an int for a square; null: the whole
    (resized) image."""

    random_crop: bool = False
    """Crop at a random position in training; false: at the centre, as in evaluation. Not with
    `random_resized_crop`."""

    random_resized_crop: Any = key(None, SHARES)
    """Crop a random share of the image's area in training, [low, high] in (0, 1], with an aspect
    ratio in [3/4, 4/3], and resize it to `crop`; null: off."""

    hflip: float = key(0.0, SHARE)
    """Probability of a left-right flip in training."""

    vflip: float = key(0.0, SHARE)
    """Probability of an upside-down flip in training."""

    colour_jitter: list[float] = key([0.0, 0.0, 0.0], JITTER)
    """Strengths s of [brightness, contrast, saturation] in training: uniform factors in 1 ± s."""

    randaugment: Any = key(None, RANDAUGMENT)
    """RandAugment in training: [operations, magnitude 0 to 30], as [2, 9], drawn from brightness,
    contrast, colour, sharpness, posterize, solarize, autocontrast, equalize and none; null: off."""

    rotation: float = key(0.0, ANGLE)
    """Largest angle of a rotation about the centre in training, in degrees: uniform in ± this.
    Target images and masks are rotated, too. New pixels are `mean`, in masks `ignore_index`."""

    random_scale: Any = key(None, SCALES)
    """Enlarge about the centre by factors in [low, high] in training, with rotation; null: off."""

    random_erasing: float = key(0.0, SHARE)
    """Probability that in training a rectangle of 2 to 33 % of an input's area becomes `mean`."""

    mixup: float = key(0.0, FROM_0)
    """Alpha of MixUp, such as 0.2: each training sample is mixed with another one of its batch, by
    weights from Beta(alpha, alpha); labels become probabilities. 0: off. Not for masks."""

    cutmix: float = key(0.0, FROM_0)
    """Alpha of CutMix: a rectangle of each training image comes from another one of its batch, and
    labels are mixed by area. 0: off; with `mixup`, half of the samples each. Not for numbers."""

    value_range: list[float] = key([0.0, 1.0], VALUE_RANGE)
    """Values [low, high] of black and full intensity, before `mean` and `std`."""

    mean: list[float] | None = key(None, MEAN)
    """Mean per channel, in units of `value_range`, that is subtracted from the inputs; null: 0."""

    std: list[float] | None = key(None, STD)
    """Standard deviation per channel, in units of `value_range`, that divides inputs; null: 1."""


@dataclass
class LoaderConfig:
    name: str = MISSING
    """Backend, a file in `loaders/backends/`, such as `pytorch` or `synthetic`."""

    num_workers: int | None = key(None, FROM_0)
    """Worker processes per rank, of a backend that has any; 0: threads of the training process;
    null: on a GPU one for each CPU of the rank but one, on a CPU or without images 0. `python -m
    tools.bottleneck` finds the best number."""

    prefetch_factor: int = key(2, FROM_1)
    """Batches prepared ahead by the threads of the training process, or by each worker."""

    num_threads: int = key(0, FROM_0)
    """CPU threads per worker process or, without workers, per rank; 0: all CPUs of the machine,
    divided among its ranks and their workers."""

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
    folder of a run or of a checkpoint; null: random. Tensors of the right name and shape are
    loaded, the others start at random. A resumed run has the weights of its checkpoint instead."""

    freeze: str | None = None
    """`backbone`: train the head (the last layer or layers) alone. `statistics`: train all layers.
    With both, those before the head stay in evaluation mode: BatchNorm keeps its statistics, and
    dropout does nothing. null: neither."""


@dataclass
class OptimizerConfig:
    name: str = MISSING
    """Class of `torch.optim`, in any case: `adamw`, `sgd`, `radam`, ...; or an optimizer of timm:
    `muon`, `lamb`, `lion`, ... (`timm.optim.list_optimizers()`)."""

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

    head_epochs: float = key(0.0, FROM_0)
    """Epochs at the start in which the head alone learns: the rate of all other layers is 0. Their
    BatchNorm statistics follow the data."""

    layer_decay: float = key(1.0, Allowed("a number in (0, 1]", lambda x: 0 < x <= 1))
    """Factor of the learning rate from each layer to the one below it, such as 0.75 for fine-tuning
    of a ViT; 1: all layers have the same rate."""


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
