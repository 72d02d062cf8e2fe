"""What a run starts from: the checkpoint that it resumes, if its settings fit, or weights."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conf.check import values_of
from conf.errors import UserError, first_few
from conf.names import file_of
from conf.schema import Config, ModelConfig
from loaders import Loader
from loaders.targets import describe_target
from models.pretrained import fitting_weights, zeros_for_head
from runtime.checkpoint_files import Shards, read_weights, with_shards
from runtime.process_group import ProcessGroup, is_sharded

log = logging.getLogger(__name__)

WITHOUT_EFFECT = (
    *("name", "output_dir", "resume", "overwrite", "max_steps", "data.cache_dir", "data.retry_s"),
    *("loader.", "log.", "checkpoint.", "profile.", "distributed.timeout_s"),
)
"""Prefixes of the keys that change nothing that the rest of the training computes."""

MUST_MATCH = (
    *("model.name", "optimizer.name", "task.name"),
    "epoch_steps",  # places in the data are counted in epochs
    # These decide the optimizer's groups of weights.
    "optimizer.decay_norms_and_biases",
    *("model.freeze", "optimizer.backbone_lr_scale", "optimizer.layer_decay"),
    "optimizer.head_epochs",
    "optimizer.kwargs",  # with some, such as amsgrad, an optimizer keeps other values
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
    position = _fitting_position(cfg, loader, saved)
    saved = with_shards(saved, Path(path))
    changed = listed(changed_keys(saved, cfg, ("model.",))) or "of its code"
    load_model(state["model"], saved["model"], path, f"undo the changes ({changed})")
    loader.load_state_dict(position)
    # The schedule follows from the rows, also where their number per step has changed, but for
    # steps that the loop has left out.
    num_left_out = saved["step"] - saved["scheduler"]["last_epoch"]
    saved["scheduler"]["last_epoch"] = loader.steps_done - num_left_out
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


def load_model(model: nn.Module, saved: dict[str, Any], path: str | Path, fix: str) -> None:
    """Load tensors from a file into a model; a UserError with the fix if they do not fit."""
    try:
        load_into(model, saved)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{path} holds another model ({reason}); {fix}") from error


def load_into(owner: Any, saved: Any) -> None:
    """Load a `state_dict()` that any number of ranks have saved into the owner of such a state; a
    RuntimeError if it is a module that the tensors do not fit."""
    own = owner.state_dict()
    if isinstance(owner, Optimizer):
        parameters = [p for options in owner.param_groups for p in options["params"]]
        values = {
            number: {name: _laid_out(parameters[number], value) for name, value in each.items()}
            for number, each in saved["state"].items()
        }
        # The configuration decides its options, the script its kernels, the schedule the rate.
        saved = saved | {"state": values, "param_groups": own["param_groups"]}
    else:
        saved = {name: _laid_out(own.get(name), value) for name, value in saved.items()}
    owner.load_state_dict(saved)


def _laid_out(own: Any, saved: Any) -> Any:
    """Return a saved value; a tensor, or its `Shards`, is sharded and laid out in memory like a
    tensor `own` of its shape.

    Fused optimizers confuse elements where the layouts differ, as after a change of channels_last.
    """
    if isinstance(saved, Shards):
        saved = saved.whole()
    if not isinstance(saved, Tensor) or not isinstance(own, Tensor) or saved.shape != own.shape:
        return saved  # such as Adam's number of steps
    if not is_sharded(own):
        return torch.empty_like(own, dtype=saved.dtype, requires_grad=False).copy_(saved)
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = own
    # Without a source rank, each takes its own part of what it has read.
    return distribute_tensor(saved, sharded.device_mesh, sharded.placements, src_data_rank=None)


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


def initial_weights(cfg: ModelConfig, in_channels: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `cfg.weights` names, as `read_weights()`, or load `imagenet` weights of the model;
    raise UserError if there are none, or they could not be downloaded."""
    if cfg.weights != "imagenet":
        return read_weights(str(cfg.weights))
    model = file_of("models", cfg.name, "model.name")
    if not hasattr(model, "imagenet_weights"):
        raise UserError(
            f"model.weights=imagenet: there are no such weights for model={cfg.name}; give a file "
            "or the folder of a run, or use model=torchvision or model=timm"
        )
    try:
        return model.imagenet_weights(cfg, in_channels), {}
    except Exception as error:  # of a connection, its library and its cache: of many types
        reason = str(error).partition("\n")[0] or repr(error)
        raise UserError(
            f"model.weights=imagenet: those of model.arch={cfg.arch} could not be loaded "
            f"({reason}); start once with a network, copy the cache of a machine with one "
            "(TORCH_HOME, HF_HOME), or give a file"
        ) from error


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


def _fitting_position(cfg: Config, loader: Loader, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the loader's state in a checkpoint that fits this run; if inputs or the plan of the
    data have changed, which `fresh_epoch` allows, the start of its epoch."""
    never = changed_keys(saved, cfg, MUST_MATCH) | differing_data(saved["facts"], loader)
    restarting = differing(saved["loader"].get("plan", {}), loader.state_dict().get("plan", {}))
    restarting |= changed_keys(saved, cfg, INPUT_KEYS)
    if never or (restarting and not cfg.checkpoint.fresh_epoch):
        fix = "set checkpoint.fresh_epoch=true to restart the epoch with them"
        raise UserError(
            f"{saved['path']} was made with other data or settings ({listed(never or restarting)});"
            f" undo these changes, or {'start another run from its weights' if never else fix}"
        )
    if changed := changed_keys(saved, cfg):
        log.warning("settings that have changed: %s", listed(changed, len(changed)))
    if not restarting:
        return saved["loader"]
    epoch, is_finished = saved["loader"]["epoch"], saved["epoch_is_finished"]
    if not is_finished:
        log.warning("another plan of the data: epoch %d is restarted", epoch + 1)
    loader.plan.begin(epoch)
    if is_finished:
        loader.plan.finish()
    return loader.state_dict()


def changed_keys(
    saved: dict[str, Any], cfg: Config, prefixes: tuple[str, ...] = ("",)
) -> Differences:
    """Return how keys with these prefixes differ between a checkpoint and this run."""
    changed = differing(saved["config"], values_of(cfg))
    names = [key for key in changed if key.startswith(prefixes)]
    return {key: changed[key] for key in names if not key.startswith(WITHOUT_EFFECT)}


def _comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a model's inputs and outputs depend on, with one name for each output."""
    target = facts["target"]
    names = target.get("names", ())
    values = {f"targets' {key}": target.get(key) for key in ("kind", "channels", "size_factor")}
    values |= {f"output {number}": name for number, name in enumerate(names)}
    return values | {"in_channels": facts["in_channels"]}
