"""What a run starts from: the checkpoint that it resumes, if its settings fit, or weights."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UserError, first_few
from conf.schema import Config
from loaders import Loader
from loaders.targets import describe_target
from models.pretrained import fitting_weights, initial_weights, with_shards, zeros_for_head
from runtime.process_group import ProcessGroup
from runtime.progress import steps_done
from runtime.shards import load_into

log = logging.getLogger(__name__)

COMPARED = (
    *("model.", "optimizer.", "task.", "amp.", "ema."),
    *("data.mean", "data.std", "data.value_range", "data.reduced_decoding"),
    *("data.background", "data.exif"),
    *("global_batch_size", "epochs", "clip_grad_norm", "accumulate_steps"),
)
"""Prefixes of the keys that affect the rest of the training, besides the plan of the data."""

MUST_MATCH = (
    *("model.name", "optimizer.name", "task.name"),
    "epoch_steps",  # places in the data are counted in epochs
    # These decide the optimizer's groups of weights.
    "optimizer.decay_norms_and_biases",
    *("model.freeze", "optimizer.backbone_lr_scale", "optimizer.layer_decay"),
    "optimizer.head_epochs",
    "optimizer.kwargs.",  # with some, such as amsgrad, an optimizer keeps other values
)
"""Prefixes of the keys that a resume must not change."""

INPUT_KEYS = ("data.mean", "data.std", "data.value_range")
"""Keys that change the inputs; with `checkpoint.fresh_epoch`, they and the plan may differ."""

Differences = dict[str, tuple[Any, Any]]
"""What was and what is, by name, such as `{"output 0": ("cat", "cow")}`."""


def restore(cfg: Config, state: dict[str, Any], saved: dict[str, Any], group: ProcessGroup) -> None:
    """Load a checkpoint into the objects of a run and into this rank's random generators; an object
    that it lacks keeps its first state. Raises a UserError if it does not fit the run."""
    path, loader = saved["path"], state["loader"]
    changed = differing(_by_key(saved["config"]), _by_key(asdict(cfg)))
    changed = {key: changed[key] for key in changed if key.startswith((*COMPARED, *MUST_MATCH))}
    position = _fitting_position(cfg, loader, saved, changed)
    saved = with_shards(saved, Path(path))
    try:
        load_into(state["model"], saved["model"])
    except RuntimeError as error:
        keys = [f"{key}={then}" for key, (then, _) in changed.items() if key.startswith("model.")]
        raise UserError(
            f"{path} holds another model than model={cfg.model.name} "
            f"({str(error).splitlines()[-1].strip()}); resume with "
            f"{' '.join(keys) or 'the code of its run'}"
        ) from error
    loader.load_state_dict(position)
    # The schedule follows from the rows, also where their number per step has changed, but for
    # steps that the loop has left out.
    num_left_out = saved["step"] - saved["scheduler"]["last_epoch"]
    saved["scheduler"]["last_epoch"] = steps_done(loader) - num_left_out
    for name, owner in state.items():
        if name in ("model", "loader"):
            continue
        if saved.get(name):
            load_into(owner, saved[name])
        elif owner.state_dict():
            log.warning("%s holds no %s state: the %s starts fresh", path, name, name)
    if group.rank < len(saved["rng"]):
        rng = saved["rng"][group.rank]
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(rng["cuda"])


def rng_state() -> dict[str, Tensor]:
    """Return the states of this process's random generators, by device."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def start_from_weights(cfg: Config, model: nn.Module, loader: Loader, group: ProcessGroup) -> None:
    """Load the `cfg.model.weights` that fit the model, if any are named; the head only if its
    outputs are the same. Raises a UserError if none fit."""
    if cfg.model.weights is None:
        if cfg.model.arch is not None:  # ImageNet has weights of such models
            log.info("model.weights=null: starts at random; experiment=finetune needs less data")
        return
    saved, facts = group.broadcast_from_rank0(
        lambda: initial_weights(cfg.model, loader.in_channels)
    )
    changed = differing_data(facts, loader).keys() if facts else set()
    fitting = fitting_weights(model, cfg.model, saved, with_head=changed <= {"in_channels"})
    load_into(model, model.state_dict() | fitting | zeros_for_head(model, fitting))


def facts_of(loader: Loader) -> dict[str, Any]:
    """Describe the data that a model is trained on; written with its weights."""
    info = loader.info
    target = describe_target(info.target) if info.target else {}
    return {"target": target, "in_channels": info.in_channels, "dtype": info.dtype}


def differing_data(facts: dict[str, Any], loader: Loader) -> Differences:
    """Return how the data of a loader differ from those that `facts_of()` described."""
    return differing(_comparable(facts), _comparable(facts_of(loader)))


def differing(then: dict[str, Any], now: dict[str, Any]) -> Differences:
    """Return the two values of the keys in which they differ."""
    pairs = {key: (then.get(key), now.get(key)) for key in now | then}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def listed(differences: Differences, most: int = 6) -> str:
    """Return the first ones as text, such as `output 0: cat then, cow now`."""
    return first_few((f"{key}: {a} then, {b} now" for key, (a, b) in differences.items()), most)


def _fitting_position(
    cfg: Config, loader: Loader, saved: dict[str, Any], changed: Differences
) -> dict[str, Any]:
    """Return the loader's state in a checkpoint that fits this run; if inputs or the plan of the
    data have changed, which `fresh_epoch` allows, the start of its epoch."""
    restarting = differing(saved["loader"].get("plan", {}), loader.state_dict().get("plan", {}))
    restarting |= {key: changed[key] for key in changed if key.startswith(INPUT_KEYS)}
    never = {key: changed[key] for key in changed if key.startswith(MUST_MATCH)}
    never |= differing_data(saved["facts"], loader)
    if never or (restarting and not cfg.checkpoint.fresh_epoch):
        fix = "set checkpoint.fresh_epoch=true to restart the epoch with them"
        raise UserError(
            f"{saved['path']} was made with other data or settings ({listed(never or restarting)});"
            f" undo these changes, or {'start another run from its weights' if never else fix}"
        )
    if changed:
        log.warning("settings that have changed: %s", listed(changed, len(changed)))
    if not restarting:
        return saved["loader"]
    epoch, is_finished = saved["loader"]["epoch"], saved["epoch_is_finished"]
    if not is_finished:
        log.warning("another plan of the data: epoch %d is restarted", epoch + 1)
    return loader.state_at(epoch, is_finished)


def _comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a model's inputs and outputs depend on, with one name for each output."""
    target = facts["target"]
    names = target.get("names", ())
    values = {f"targets' {key}": target.get(key) for key in ("kind", "channels", "size_factor")}
    values |= {f"output {number}": name for number, name in enumerate(names)}
    return values | {"in_channels": facts["in_channels"]}


def _by_key(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by keys such as `optimizer.kwargs.momentum`."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            values |= _by_key(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values
