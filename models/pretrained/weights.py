"""Weights in files and in the folders of runs."""

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.errors import UserError
from models.pretrained.checkpoints import (
    MANIFEST,
    Shards,
    best_of,
    load_tensors,
    newest_first,
    read_state,
    with_shards,
)

WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+")
"""Names that DDP and torch.compile leave in front of those of tensors."""


def read_weights(source: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors by name from a `.safetensors` or `.pt` file, a checkpoint, or the folder of a
    run.

    Returns:
        The tensors, and the facts about its data that a run wrote with them; {} for any other file.

    Raises:
        UserError: there is no such file, or it holds no weights.
    """
    path = Path(source)
    if path.is_dir():
        path = weights_in(path)
    if not path.exists():
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
                facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        elif path.is_dir():
            saved = with_shards(read_state(path), path)
            facts = saved["facts"]
            saved = saved.get("weights", saved["model"])
        else:
            saved = load_tensors(path)
    except Exception as error:  # damaged bytes and foreign classes raise errors of any type
        reason = str(error).partition("\n")[0] or repr(error)
        raise UserError(
            f"model.weights={source}: {path} cannot be read ({reason}); give a .safetensors file, "
            "or a .pt file that holds tensors by name"
        ) from error
    saved = saved if isinstance(saved, dict) else {}
    for key in ("model", "state_dict", "model_state_dict", "net"):  # of any library
        if isinstance(saved.get(key), dict):
            saved = saved[key]
    saved = {n: value.whole() if isinstance(value, Shards) else value for n, value in saved.items()}
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    return {WRAPPERS.sub("", str(name)): value for name, value in tensors.items()}, facts


def weights_in(run: Path) -> Path:
    """Find the best weights in the folder of a run, or else its newest checkpoint, which it may be.

    Raises:
        UserError: there are none.
    """
    if (run / MANIFEST).exists():
        return run
    for folder in (run / "checkpoints", run):
        published, checkpoints = folder / "model.safetensors", newest_first(folder)
        if published.is_file():
            return published
        if checkpoints:
            return best_of(checkpoints) or checkpoints[0]
    raise UserError(
        f"{run} has no weights; expected {run}/checkpoints/model.safetensors, which a run writes "
        "at the end of its first epoch"
    )
