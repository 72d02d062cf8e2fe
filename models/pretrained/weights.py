"""Weights in files and in the folders of runs."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+")
"""Names that DDP and torch.compile leave in front of those of tensors."""

FACTS = ("target", "in_channels", "dtype", "precision")
"""Keys of the description of its data and precision that a run writes with its weights."""


def read_weights(source: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors by name from a `.safetensors` or `.pt` file, or the folder of a run.

    Returns:
        The tensors, and the values of `FACTS` that a run wrote with them; {} for any other file.

    Raises:
        UserError: there is no such file, or it holds no weights.
    """
    path = Path(source)
    if path.is_dir():
        path = weights_in(path)
    if not path.is_file():
        raise UserError(
            f"model.weights={source}: there is no such file; give imagenet, a .safetensors or .pt "
            "file, or the folder of a run"
        )
    facts: dict[str, Any] = {}
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                saved: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
            # Earlier versions wrote a key for each fact.
            each = {name: json.loads(metadata[name]) for name in FACTS if name in metadata}
            facts = each | dict(json.loads(metadata.get("facts", "{}")))
        else:
            saved = load_tensors(path)
    except Exception as error:  # damaged bytes and foreign classes raise errors of any type
        reason = str(error).partition("\n")[0] or repr(error)
        raise UserError(
            f"model.weights={source}: {path} cannot be read ({reason}); give a .safetensors file, "
            "or a .pt file that holds tensors by name"
        ) from error
    saved = saved if isinstance(saved, dict) else {}
    if "shards" in saved:
        raise UserError(
            f"{path} is in shards; make whole files of the checkpoints "
            "of its run: python -m runtime.whole run=DIR"
        )
    facts = saved.get("facts", facts)
    for key in ("model", "state_dict", "model_state_dict", "net"):  # of a checkpoint
        if isinstance(saved.get(key), dict):
            saved = saved[key]
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    return {WRAPPERS.sub("", str(name)): value for name, value in tensors.items()}, facts


def load_tensors(path: Path) -> Any:
    """Read a file of `torch.save`, to the host.

    Raises:
        ValueError: it holds more than tensors and plain values, which may be code.
        Exception: it is damaged; of any type.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if "weights_only" not in str(error):
            raise
        # PyTorch advises to run whatever is in the file.
        raise ValueError("damaged, or more than tensors and plain values") from error


def weights_in(run: Path) -> Path:
    """Find the best weights in the folder of a run, or else its newest checkpoint.

    Raises:
        UserError: there are none.
    """
    for folder in (run / "checkpoints", run):
        for path in (folder / "model.safetensors", *sorted(folder.glob("step-*.pt"), reverse=True)):
            if path.is_file():
                return path
    raise UserError(
        f"{run} has no weights; expected {run}/checkpoints/model.safetensors, which a run writes "
        "at the end of its first epoch"
    )
