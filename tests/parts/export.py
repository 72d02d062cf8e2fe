"""Exported files."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@cache
def exported(run: Path) -> Any:
    """The model in the exported file of a run."""
    extra = {"metadata.json": ""}
    program = torch.export.load(f"{run}.pt2", extra_files=extra).module()
    assert '"in_channels": "3"' in extra["metadata.json"]
    return program


def answer_of(run: Path, images: Tensor) -> np.ndarray:
    """What the exported file answers to the first of these images."""
    return exported(run)(images)[0].detach().numpy()


EXPORTED = [("export.py run={run} format=torch out={run}.pt2", answer_of)]
MISTAKES_OF_USE = {
    "export.py format=onyx": "format=onyx",
    "export.py format=torch": ".pt2",
    "export.py format=safetensors data.root=OTHERS": "output 0: digit 0 then, digit 1 now",
}
