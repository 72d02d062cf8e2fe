"""One place checks the whole configuration before anything is built: values, ranges and combinations.

A check that needs the data is made where the data is read.
"""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf

from conf.mistakes import Mistake, end, is_mistake, what_is_unknown

if TYPE_CHECKING:
    from conf.schema import Config

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is right, and what is."""


def one_of(*names: str) -> Rule:
    return lambda value: value in names, f"use one of {', '.join(names)}"


def whole(least: int) -> Rule:
    return lambda value: _is_whole(value) and value >= least, f"use a whole number from {least} on"


def share(low: str, high: str) -> Rule:
    """An interval from 0 to 1 with these brackets."""
    return (
        lambda x: (
            _is_number(x) and (0 <= x <= 1) and (x, low) != (0, "(") and (x, high) != (1, ")")
        ),
        f"use a number in {low}0, 1{high}",
    )


def numbers(is_right: Callable[..., bool], words: str) -> Rule:
    """A list of numbers; `is_right` is given them one by one, and takes as many as there may be."""

    def holds(value: Any) -> bool:
        try:
            return all(map(_is_number, value)) and bool(is_right(*value))
        except TypeError:  # it is no list, or has another length
            return False

    return holds, f"use {words}"


def optional(rule: Rule) -> Rule:
    return lambda value: value is None or rule[0](value), f"{rule[1]}, or null"


def either(one: Rule, other: Rule) -> Rule:
    return (
        lambda value: one[0](value) or other[0](value),
        f"{one[1]}, or {other[1].removeprefix('use ')}",
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


POSITIVE: Rule = (lambda x: _is_number(x) and x > 0, "use a number above 0")
NOT_NEGATIVE: Rule = (lambda x: _is_number(x) and x >= 0, "use 0 or more")
SIZE = either(
    numbers(
        lambda h, w: _is_whole(h) and _is_whole(w) and min(h, w) >= 1, "[height, width] in pixels"
    ),
    whole(1),
)
A_LIST = numbers(lambda *values: len(values) > 0, "a list of one number for each channel")

RULES: dict[str, Rule] = {
    "data.cache_gb": NOT_NEGATIVE,
    "data.retry_s": NOT_NEGATIVE,
    "data.val_fraction": share("(", ")"),
    "data.val_count": optional(whole(1)),
    "data.split_seed": whole(0),
    "data.shuffle": one_of("full", "window"),
    "data.shuffle_window": whole(1),
    "data.max_pixels": whole(1),
    "data.on_error": one_of("raise", "skip"),
    "data.max_bad_samples": whole(0),
    "data.resize": optional(SIZE),
    "data.crop": optional(SIZE),
    "data.random_resized_crop": optional(
        numbers(lambda low, high: 0 < low <= high <= 1, "[low, high] with 0 < low <= high <= 1")
    ),
    "data.hflip": share("[", "]"),
    "data.vflip": share("[", "]"),
    "data.colour_jitter": numbers(
        lambda a, b, c: 0 <= min(a, b, c) and max(a, b, c) <= 1, "three numbers in [0, 1]"
    ),
    "data.randaugment": optional(
        numbers(
            lambda count, size: _is_whole(count) and 1 <= count <= 4 and 0 <= size <= 30,
            "[operations, magnitude]: 1 to 4, and 0 to 30",
        )
    ),
    "data.gaussian_blur": numbers(
        lambda chance, low, high: 0 <= chance <= 1 and 0 < low <= high,
        "[probability, low, high] with 0 < low <= high pixels",
    ),
    "data.rotation": (lambda x: _is_number(x) and 0 <= x <= 180, "use 0 to 180 degrees"),
    "data.random_scale": optional(
        numbers(lambda low, high: 0 < low <= high, "[low, high] with 0 < low <= high")
    ),
    "data.random_erasing": share("[", "]"),
    "data.mixup": NOT_NEGATIVE,
    "data.cutmix": NOT_NEGATIVE,
    "data.value_range": numbers(lambda low, high: low < high, "[0, 1] or [-1, 1]: [low, high]"),
    "data.mean": optional(A_LIST),
    "data.std": optional(
        numbers(lambda *values: min(values, default=0) > 0, "numbers above 0, one for each channel")
    ),
    "loader.num_workers": either(whole(0), (lambda value: value == "auto", "auto")),
    "loader.prefetch_factor": whole(1),
    "loader.num_threads": whole(0),
    "loader.prefetch_queue_depth": whole(1),
    "loader.reader": one_of("plan", "native"),
    "loader.hw_decoder_load": share("[", "]"),
    "optimizer.name": one_of("sgd", "adamw"),
    "optimizer.lr": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.momentum": share("[", ")"),
    "optimizer.warmup_epochs": NOT_NEGATIVE,
    "task.label_smoothing": share("[", ")"),
    "checkpoint.every_steps": optional(whole(1)),
    "checkpoint.every_minutes": optional(POSITIVE),
    "checkpoint.keep": whole(1),
    "checkpoint.on_error": one_of("raise", "warn"),
    "amp.dtype": one_of("auto", "float16", "bfloat16"),
    "amp.init_scale": POSITIVE,
    "ema.decay": share("[", ")"),
    "distributed.backend": one_of("auto", "nccl", "gloo"),
    "distributed.timeout_s": POSITIVE,
    "log.every_steps": whole(1),
    "log.images": whole(0),
    "epochs": whole(1),
    "max_steps": optional(whole(1)),
    "global_batch_size": whole(1),
    "accumulate_steps": whole(1),
    "max_bad_steps": whole(1),
    "clip_grad_norm": (lambda x: isinstance(x, float) and x > 0, "use a number above 0, or inf"),
    "device": (
        lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None,
        "use auto, cpu, cuda or cuda:1",
    ),
    "fp32_precision": optional(one_of("ieee", "tf32")),
    "seed": (lambda x: _is_whole(x) and 0 <= x < 2**63, "use 0 to 2**63 - 1"),
}

# A key of a technique, and what a script has that knows it. Of one's own technique: one line more.
TECHNIQUES = {
    "accumulate_steps": "cfg.accumulate_steps",
    "amp": "cfg.amp.",
    "ema": "cfg.ema.",
    "distributed": "init_process_group(cfg",
}

# The sizes of the published sets; for paired folders the name of the inputs' folder tells the set.
GENERATED = {
    ("cells", "input"): "cells --root {root} --size 90000",
    ("pairs", "blurry"): "deblur --root {root} --size 3214",
    ("pairs", "low"): "lowlight --root {root} --size 153856",
}
NEED_A_FOLDER = ("imagefolder", "pairs", "masks", "table", "cells")


def check(cfg: "Config", overrides: Iterable[str] = ()) -> None:
    """Look at all values of a configuration, and whether they go together.

    Args:
        cfg: the whole configuration.
        overrides: of the command line; with a plus sign, Hydra takes any key.

    Raises:
        Mistake: the first one that cannot be right.
    """
    unknown = what_is_unknown(overrides)
    if unknown:
        raise Mistake(unknown)
    config = cast(DictConfig, cfg)
    for key, (is_right, fix) in (_names() | RULES).items():
        value = (
            None if OmegaConf.is_missing(*_place(config, key)) else OmegaConf.select(config, key)
        )
        if not is_right(value):
            raise Mistake(f"{key}={_shown(value)} is not possible; {fix}")
    for is_wrong, message in _combinations(cfg):
        if is_wrong:
            raise Mistake(message)


def _place(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    group, _, name = key.rpartition(".")
    return (config[group] if group else config), name


def _shown(value: Any) -> str:
    """As it is written on a command line."""
    if isinstance(value, ListConfig | list):
        return f"[{','.join(map(_shown, value))}]"
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )


def _names() -> dict[str, Rule]:
    """What is looked up by name, from the tables where it is."""
    from loaders import BACKENDS
    from loaders.layouts import LAYOUTS
    from models import MODELS

    return {
        "data.layout": one_of(*LAYOUTS),
        "loader.name": one_of(*(name for name in BACKENDS if " " not in name)),
        "model.name": one_of(*MODELS),
    }


def _combinations(cfg: "Config") -> Iterable[tuple[bool, str]]:
    """Whether values do not go together, and the message then."""
    from loaders.layouts.files import or_generate

    data, loader = cfg.data, cfg.loader
    yield (
        cfg.optimizer.warmup_epochs >= cfg.epochs,
        f"optimizer.warmup_epochs={cfg.optimizer.warmup_epochs} leaves nothing of epochs={cfg.epochs}; "
        "use a smaller value",
    )
    yield (
        data.mean is not None
        and data.std is not None
        and len({len(data.mean), len(data.std), 1}) > 2,
        f"data.mean={_shown(data.mean)} and data.std={_shown(data.std)} have other lengths; use one "
        "number for each channel in both",
    )
    yield (
        loader.reader == "native" and loader.name != "dali",
        f"loader.reader=native is DALI's; with loader={loader.name} use loader.reader=plan",
    )
    yield (
        loader.name == "packed" and loader.pack is None,
        "loader=packed needs loader.pack=DIR, made by python -m loaders.pack ... out=DIR",
    )
    yield (
        OmegaConf.is_missing(cast(DictConfig, data), "root"),
        f"data.root is not set; set data.root=FOLDER to the folder of the data ({data.layout})",
    )
    is_afar = "://" in data.root
    yield (
        is_afar and data.index is not None,
        f"data.index={data.index} is that of files; with shards, which have their own, leave it out",
    )
    root, name = Path(data.root), (data.layout, data.input_dir)
    yield (
        data.layout in NEED_A_FOLDER
        and loader.name != "packed"
        and not is_afar
        and not root.is_dir(),
        f"data.root={root} is not a folder; set data.root to the data set's folder"
        + (or_generate(GENERATED[name].format(root=root)) if name in GENERATED else ""),
    )


# What only a run has


def check_run(cfg: "Config", overrides: Iterable[str]) -> None:
    """As `check`, and whether the script, its launcher, its folder and the overrides fit each other.

    Raises:
        Mistake: the first thing that cannot be right.
    """
    check(cfg, overrides)
    script, world_size = Path(sys.argv[0]), int(os.environ.get("WORLD_SIZE", "1"))
    text = script.read_text() if script.suffix == ".py" and script.is_file() else ""
    if world_size > 1 and text and TECHNIQUES["distributed"] not in text:
        raise Mistake(
            f"{script.name} is for one process, but torchrun has started {world_size}; start it with "
            f"python {script.name}, or use torchrun with train_ddp.py"
        )
    for override in overrides if text else ():
        root = re.split(r"[.=]", override.lstrip("+"))[0]
        if root in TECHNIQUES and TECHNIQUES[root] not in text:
            raise Mistake(f"{override} does nothing in {script.name}; {_script_with(root, script)}")
    if cfg.overwrite and cfg.resume is not None:
        raise Mistake(
            f"overwrite=true would remove what resume={cfg.resume} goes on with; leave out one of them"
        )
    per_rank = cfg.global_batch_size // world_size
    if TECHNIQUES["accumulate_steps"] in text and per_rank % cfg.accumulate_steps:
        raise Mistake(
            f"accumulate_steps={cfg.accumulate_steps} does not divide the {per_rank} samples that each "
            f"rank has of global_batch_size={cfg.global_batch_size}; use 1 or another divisor"
        )
    folder = Path(cfg.output_dir).absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        what = "cannot be written to" if above.is_dir() else "is not a folder"
        raise Mistake(f"output_dir={cfg.output_dir}: {above} {what}; choose another output_dir")


def _script_with(key: str, script: Path) -> str:
    """The advice to use a script that knows a technique's key, and all that this script does."""
    has = [mark for mark in TECHNIQUES.values() if mark in script.read_text()]
    wanted = {*has, TECHNIQUES[key]}
    scripts = {path: path.read_text() for path in script.parent.glob("train*.py")}
    fitting = [path.name for path, text in scripts.items() if all(mark in text for mark in wanted)]
    if fitting:
        return f"use {min(fitting, key=lambda name: (len(name), name))}"
    some = min((p.stem for p, text in scripts.items() if TECHNIQUES[key] in text), default=key)
    ours, other = script.stem.removeprefix("train_"), some.removeprefix("train_")
    return f"merge the two: python compose.py {ours.replace('_', ' ')} {other} -o {script.stem}_{other}.py"


class CheckedRun(Callback):
    """Hydra's hooks around a script's `main`: the configuration is checked, and mistakes end the run."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check(config)  # before the run's folder is made

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check(config)  # each job of a multirun

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        error = job_return._return_value
        if job_return.status == JobStatus.FAILED and is_mistake(error):
            end(error)

    def _check(self, config: DictConfig) -> None:
        try:
            check_run(cast("Config", config), config.hydra.overrides.task)
        except Exception as error:
            if not is_mistake(error):
                raise
            end(error)
