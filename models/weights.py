"""Starting a model from weights that are there already, and training its head only."""

from __future__ import annotations

import logging
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

if TYPE_CHECKING:
    from conf.schema import ModelConfig

log = logging.getLogger(__name__)

NAMED = 6
"""Parameters that a log line names."""


def start_from(model: nn.Module, cfg: ModelConfig) -> None:
    """Load what fits of `cfg.weights` into the model, and say in two lines what was and what was not.

    A first convolution that only differs in its input channels gets the mean over those of the file,
    so that an image alike in all channels has the same response. A run that is resumed has its weights
    from its checkpoint: then nothing is loaded.

    Raises:
        FileNotFoundError: there is no such file, or it could not be downloaded.
        ValueError: nothing in the file fits, or it holds no weights.
    """
    if cfg.weights is None or _is_resumed(cfg):
        return
    saved = read_weights(cfg.weights, cfg.name)
    own = model.state_dict()
    parameters = {name: own[name] for name, _ in model.named_parameters()}
    fitting = {name: saved[name] for name in own if _shape(saved.get(name)) == own[name].shape}
    first, note = first_convolution(model), ""
    if first in saved and first not in fitting and _fits_but_for_channels(saved[first], own[first]):
        there, here = saved[first].shape[1], own[first].shape[1]
        fitting[first] = saved[first].mean(dim=1, keepdim=True).expand_as(own[first]) * there / here
        note = f"; {first} is adapted from {there} to {here} channels (mean over channels)"
    loaded = [name for name in parameters if name in fitting]
    if all(own[name].ndim < 2 for name in loaded):  # a bias of the right size is no fit
        raise ValueError(
            f"model.weights={cfg.weights}: nothing fits model={cfg.name}; the file has {_some(dict(sorted(saved.items())))}, "
            f"the model {_some(parameters)}; use the weights of such a model, with the same model.kwargs"
        )
    fresh = {name: own[name] for name in parameters if name not in fitting}
    model.load_state_dict(own | fitting)
    log.info(
        "model.weights=%s: %d of %d parameter tensors are loaded%s",
        *(cfg.weights, len(loaded), len(parameters), note),
    )
    log.info(
        "model.weights=%s: %s", cfg.weights, f"{_some(fresh) if fresh else 'nothing'} starts fresh"
    )


def read_weights(source: str, model_name: str) -> dict[str, Tensor]:
    """Tensors by name: of `imagenet`, a `.safetensors` or `.pt` file, or the folder of a run.

    Args:
        source: `model.weights`.
        model_name: whose weights `imagenet` means.

    Raises:
        FileNotFoundError, ValueError: as `start_from()`.
    """
    if source == "imagenet":
        return imagenet(model_name)
    path = Path(source)
    if path.is_dir():
        path = weights_in(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"model.weights={source}: there is no such file; give imagenet, a .safetensors or .pt file, "
            "or the folder of a run"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            saved: Any = load_file(path)
        else:
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes and foreign classes raise errors of any type
        reason = str(error).partition("\n")[0] or repr(error)
        raise ValueError(
            f"model.weights={source}: {path} cannot be read ({reason}); give a .safetensors file, or a .pt "
            "file that holds tensors by name"
        ) from error
    for key in ("model", "state_dict"):  # of a checkpoint
        if isinstance(saved, dict) and isinstance(saved.get(key), dict):
            saved = saved[key]
    tensors = saved.items() if isinstance(saved, dict) else ()
    # Wrappers of other scripts leave their names in front.
    return {
        str(name).removeprefix("module.").removeprefix("_orig_mod."): value
        for name, value in tensors
        if isinstance(value, Tensor)
    }


def weights_in(run: Path) -> Path:
    """The best weights in the folder of a run, or those of its newest checkpoint.

    Raises:
        FileNotFoundError: there are none.
    """
    for folder in (run / "checkpoints", run):
        for path in (folder / "model.safetensors", *sorted(folder.glob("step-*.pt"), reverse=True)):
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"{run} has no weights; expected {run}/checkpoints/model.safetensors, which a run writes at the "
        "end of its first epoch"
    )


def imagenet(name: str) -> dict[str, Tensor]:
    """torchvision's newest weights of its model `name`, downloaded once.

    Raises:
        FileNotFoundError: they could not be downloaded; the message says where to put the file.
        ValueError: torchvision has no such model.
    """
    import torchvision.models  # here: importing it takes seconds, and other models do not need it
    from filelock import FileLock

    if name not in torchvision.models.list_models():
        raise ValueError(
            f"model.weights=imagenet: torchvision has no weights for model={name}; use model=resnet18, "
            "model=resnet50 or model=alexnet, or the weights of a run"
        )
    weights = torchvision.models.get_model_weights(name).DEFAULT
    folder = Path(torch.hub.get_dir(), "checkpoints")
    file = folder / weights.url.rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):  # of several ranks, one downloads
            return weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"model.weights=imagenet: {file} is not there, or not whole, and could not be downloaded "
            f"({error}); download {weights.url} and put it there"
        ) from error


def head_of(model: nn.Module) -> str:
    """Name of the head: what the model's attribute `head_name` says, else its last layer with parameters."""
    if isinstance(named := getattr(model, "head_name", None), str):
        return named
    return _layers(model)[-1][0]


def is_in(name: str, module: str) -> bool:
    """Whether a parameter or module of this name is, or lies in, the module of that name."""
    return f"{name}.".startswith(f"{module}.")


def first_convolution(model: nn.Module) -> str:
    """Name of the weight that sees the channels of the input; empty if it is no convolution's."""
    name, module = _layers(model)[0]
    return f"{name}.weight" if isinstance(module, nn.Conv2d) else ""


def freeze_backbone(model: nn.Module) -> None:
    """Let the head alone learn: all else gets no gradients and stays in evaluation mode, in which
    BatchNorm keeps its statistics and dropout does nothing."""
    head = head_of(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_in(name, head))
    # A method, which copies of the model take along; bound to the copy.
    model.train = MethodType(_train_head, model)  # type: ignore[method-assign]
    model.train(model.training)


def _train_head(model: nn.Module, mode: bool = True) -> nn.Module:
    nn.Module.train(model, mode)
    head = head_of(model)
    for name, module in model.named_modules():
        # What holds the head is in its mode, too: it is what tells evaluation from training.
        if not is_in(name, head) and not is_in(head, name) and name:
            module.training = False
    return model


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that have parameters of their own, by name, in the order in which they were made."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]


def _is_resumed(cfg: ModelConfig) -> bool:
    """Whether the run goes on from a checkpoint; `cfg` alone, without the other keys, says no."""
    node: Any = cfg
    if not OmegaConf.is_config(node) or node._get_parent() is None:
        return False
    resume = OmegaConf.select(node, "..resume")
    checkpoints = Path(str(OmegaConf.select(node, "..output_dir") or ""), "checkpoints")
    if resume is None or (resume == "auto" and not any(checkpoints.glob("step-*.pt"))):
        return False
    log.info("model.weights=%s is not loaded: the run is resumed", cfg.weights)
    return True


def _shape(value: Tensor | None) -> torch.Size | None:
    return None if value is None else value.shape


def _fits_but_for_channels(saved: Tensor, own: Tensor) -> bool:
    return saved.shape[:1] + saved.shape[2:] == own.shape[:1] + own.shape[2:]


def _some(tensors: dict[str, Tensor]) -> str:
    """`fc.weight (5x512), fc.bias (5)`, up to six of them."""
    shown = [
        f"{name} ({'x'.join(map(str, tensor.shape))})"
        for name, tensor in list(tensors.items())[:NAMED]
    ]
    more = len(tensors) - len(shown)
    return (", ".join(shown) or "no tensors") + (f" and {more} more" if more > 0 else "")
