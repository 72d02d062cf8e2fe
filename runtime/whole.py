"""Make the checkpoints of a finished run of `train_fsdp.py` whole, for every script to read.

    python -m runtime.whole run=outputs/mine

Its `step-*.pt` and `best.pt` then hold their sharded tensors themselves, and `model.safetensors`
the best weights. That needs as much memory as the tensors of one checkpoint.
"""

import sys
from pathlib import Path

import torch

from conf.cli import user_errors
from conf.errors import UserError
from conf.files import write_atomically
from conf.options import parse_options
from models.pretrained import load_tensors
from runtime.checkpoint import link, newest_first, publish
from runtime.fsdp import read_whole
from runtime.run_dir import lock_run_dir
from runtime.shards import remove_shards


def make_whole(run: Path) -> list[Path]:
    """Replace the sharded checkpoints of a run; returns their paths.

    Raises:
        UserError: there is no checkpoint, or one is damaged.
    """
    folder = run / "checkpoints"
    files = newest_first(folder)
    if not files:
        raise UserError(f"run={run}: there is no checkpoint in {folder}")
    replaced = []
    for path in [*files, *folder.glob("best.pt")]:
        try:
            state = load_tensors(path)
            if "shards" not in state:
                continue
            state = read_whole(state, path)
        except UserError:
            raise
        except Exception as error:  # damaged bytes raise errors of any type
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{path} is damaged ({reason}); remove it to continue without it"
            ) from error
        weights = state.pop("weights", state["model"])
        if path.name == "best.pt":  # first: a second start leaves out what is whole
            with write_atomically(folder / "model.safetensors") as file:
                publish(weights, state["facts"], file)
        with write_atomically(path) as file:
            torch.save(state, file)
        replaced.append(path)
    link(files[0], folder / "last.pt")
    remove_shards(folder)
    return replaced


if __name__ == "__main__":
    with user_errors():
        folder = Path(parse_options(__doc__, sys.argv[1:], run=None)[0]["run"])
        if folder.is_dir():
            lock_run_dir(folder)
        for path in make_whole(folder):
            print(path)
