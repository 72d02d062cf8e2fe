"""What a run starts from: the checkpoint that it resumes, if its settings fit, or weights."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conf.credentials import masked
from conf.errors import UserError
from conf.schema import Config
from loaders import Loader
from models.pretrained import (
    Shards,
    fitting_weights,
    initial_weights,
    with_shards,
    zeros_for_head,
)
from runtime.data_metadata import Differences, check_facts, differences, facts_of, listed
from runtime.process_group import ProcessGroup
from runtime.progress import steps_done
from runtime.shards import is_sharded

log = logging.getLogger(__name__)

COMPARED = (
    *("model.", "optimizer.", "task.", "amp.", "ema."),
    *("data.mean", "data.std", "data.value_range", "data.reduced_decoding"),
    *("global_batch_size", "clip_grad_norm", "accumulate_steps"),
)
"""Prefixes of the keys that affect the rest of the training, besides the plan of the data."""

MUST_MATCH = (
    *("model.name", "optimizer.name", "task.name"),
    # These decide the optimizer's groups of weights.
    "optimizer.decay_norms_and_biases",
    *("model.freeze", "optimizer.backbone_lr_scale", "optimizer.layer_decay"),
    "optimizer.head_epochs",
    "optimizer.kwargs.",  # with some, such as amsgrad, an optimizer keeps other values
)
"""Prefixes of those that a resume must not change."""

INPUT_KEYS = ("data.mean", "data.std", "data.value_range")
"""Keys that change the inputs; with `checkpoint.fresh_epoch`, they and the plan may differ."""


def settings(cfg: Config) -> Any:
    """Return the configuration as nested dictionaries, as it is written to files."""
    return masked(asdict(cfg))


def tensor_like(example: Any, saved: Any) -> Any:
    """Return a saved value as the owner of `example`, a value of its own, can load it.

    Args:
        example: a tensor, sharded or not, or any other value.
        saved: a tensor, or its `Shards` in the files of any number of ranks; if `example` is not
            sharded, any other value, too.
    """
    if not is_sharded(example):
        return saved.whole() if isinstance(saved, Shards) else saved
    saved = Shards([saved]) if isinstance(saved, Tensor) else saved
    mesh = example.device_mesh
    size = -(-saved.shape[0] // mesh.size())  # as `torch.chunk` divides it
    start = mesh.get_local_rank() * size
    rows = saved.rows(start, start + size).to(example.device)
    whole = torch.empty(saved.shape, device="meta")
    layout = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    return type(example).from_local(rows, mesh, example.placements, **layout)


def load_into(owner: Any, saved: Any) -> None:
    """Load a `state_dict()` that any number of ranks have saved into the owner of such a state.

    Raises:
        RuntimeError: the owner is a module that the saved tensors do not fit.
    """
    own = owner.state_dict()
    if not isinstance(owner, Optimizer):
        saved = {name: tensor_like(own.get(name), value) for name, value in saved.items()}
    else:
        parameters = [p for options in owner.param_groups for p in options["params"]]
        values = {
            number: {name: _laid_out(parameters[number], value) for name, value in each.items()}
            for number, each in saved["state"].items()
        }
        # The configuration decides its options, the script its kernels, the schedule the rate.
        saved = saved | {"state": values, "param_groups": own["param_groups"]}
    owner.load_state_dict(saved)


def _laid_out(parameter: Tensor, value: Any) -> Any:
    """Shard an optimizer's value like its parameter, and lay it out in memory like it.

    Fused optimizers confuse elements where the layouts differ, as after a change of channels_last.
    """
    if isinstance(value, Tensor) and value.shape != parameter.shape:
        return value  # a number, such as Adam's of its steps
    value = tensor_like(parameter, value)
    if is_sharded(value) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value  # a shard has that layout already
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def restore(cfg: Config, state: dict[str, Any], saved: dict[str, Any], group: ProcessGroup) -> None:
    """Load a checkpoint into the objects of a run and into this rank's random generators.

    An object that the checkpoint lacks keeps its first state.

    Raises:
        UserError: the checkpoint is of another model, optimizer, task, data or plan, or other
            weights of the model were learning.
    """
    path, loader = saved["path"], state["loader"]
    changed = _changed_settings(cfg, saved)
    position = _fitting_position(cfg, loader, saved, changed)
    try:
        saved = with_shards(saved, Path(path))
    except Exception as error:  # damaged bytes raise errors of any type
        raise UserError(
            f"{path}: its shards cannot be read on rank {group.rank} ({error}); all ranks need the "
            "folder, on a common file system"
        ) from error
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
    schedule = saved["scheduler"] | {"last_epoch": steps_done(loader) - num_left_out}
    for name, owner in state.items():
        if name in ("model", "loader"):
            continue
        if saved.get(name):
            load_into(owner, schedule if name == "scheduler" else saved[name])
        elif owner.state_dict():
            log.warning("%s holds no %s state: the %s starts fresh", path, name, name)
    if group.rank < len(saved["rng"]):
        rng = saved["rng"][group.rank]
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(rng["cuda"])


def start_from_weights(cfg: Config, model: nn.Module, loader: Loader, group: ProcessGroup) -> None:
    """Load the `cfg.model.weights` that fit the model, if any are named; the head only if its
    outputs are the same. Raises as `initial_weights()` and `fitting_weights()`."""
    if cfg.model.weights is None:
        if cfg.model.arch is not None:  # ImageNet has weights of such models
            log.info("model.weights=null: starts at random; experiment=finetune needs less data")
        return
    saved, facts = group.broadcast_from_rank0(
        lambda: initial_weights(cfg.model, loader.in_channels)
    )
    if facts:
        check_facts(facts, str(cfg.model.weights))
    differing = differences(facts, facts_of(loader)).keys() if facts else set()
    fitting = fitting_weights(model, cfg.model, saved, with_head=differing <= {"in_channels"})
    load_into(model, model.state_dict() | fitting | zeros_for_head(model, fitting))


def _changed_settings(cfg: Config, saved: dict[str, Any]) -> Differences:
    """Return the compared keys whose values differ from those of the checkpoint."""
    then, now = _by_key(saved["config"]), _by_key(settings(cfg))
    keys = [key for key in now | then if key.startswith(COMPARED)]
    return {k: (then.get(k), now.get(k)) for k in keys if then.get(k) != now.get(k)}


def _by_key(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by keys such as `optimizer.kwargs.momentum`."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        is_group = isinstance(value, dict)
        values |= _by_key(value, f"{prefix}{name}.") if is_group else {prefix + name: value}
    return values


def _fitting_position(
    cfg: Config, loader: Loader, saved: dict[str, Any], changed: Differences
) -> dict[str, Any]:
    """Return the loader's state in a checkpoint that fits this run; if inputs or the plan of the
    data have changed, which `fresh_epoch` allows, the start of its epoch."""
    then, now = (state.get("plan", {}) for state in (saved["loader"], loader.state_dict()))
    plan = {key: (then.get(key), now[key]) for key in now if then.get(key) != now[key]}
    restarting = plan | {key: changed[key] for key in changed if key.startswith(INPUT_KEYS)}
    never = {key: changed[key] for key in changed if key.startswith(MUST_MATCH)}
    never |= differences(saved["facts"], facts_of(loader))
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


def rng_state() -> dict[str, Tensor]:
    """Return the states of this process's random generators, by device."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
