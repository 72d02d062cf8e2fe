"""`loader.num_workers=auto`."""

import logging

import pytest
import torch

from loaders.backends import build_loaders
from runtime.setup import resolve_device
from tests.helpers import DEVICES, make_config
from tests.parts import rows_of


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loader", ["pytorch", *dict(rows_of("WAYS"))])
def test_the_fastest_setting_is_chosen(loader: str, device: str, caplog) -> None:
    """Every speed is logged, and the batches of a rank stay as they are."""
    options = ["loader.num_threads=1", f"loader={loader}", "data.random_crop=true"]
    cfg = make_config("loader.num_workers=auto", *options)
    with caplog.at_level(logging.INFO):
        measured, _ = build_loaders(cfg, resolve_device(device), 1, 2)
    fixed, _ = build_loaders(make_config(*options), resolve_device(device), 1, 2)
    for batch, other in zip(measured, fixed, strict=True):
        assert all(map(torch.equal, batch, other))
    chosen = measured.cfg.loader
    assert cfg.loader.num_workers == "auto"  # what the user gave stays as it is
    speeds = caplog.text.partition("images/s by setting: ")[2].split(", ")
    with_workers = {"loader.num_workers=" in speed for speed in speeds}
    assert with_workers == ({False, True} if loader == "pytorch" else {False})
    images_per_s = {name: int(speed) for name, _, speed in (s.rpartition(" ") for s in speeds)}
    name = f"loader.num_workers={chosen.num_workers} " if chosen.num_workers else ""
    # A little less with fewer workers is as good.
    assert images_per_s[f"{name}loader.num_threads=1"] >= 0.96 * max(images_per_s.values())
