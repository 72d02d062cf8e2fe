"""Augmentations do what torchvision's functions and the papers do, as often as they are asked to.

That they are the same with every backend, on any ranks and after any resume is in test_contract.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import Tensor
from torch.nn.functional import one_hot
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from tests.helpers import refused
from tests.images import loaders_of
from tests.kinds import IGNORED, KINDS, Place

Epoch = tuple[np.ndarray, Tensor, Tensor]
"""Rows, inputs in [0, 1] and targets of an epoch."""

OPERATIONS: list[tuple[str, list[Any]]] = [
    *(("identity", []), ("adjust_brightness", []), ("adjust_contrast", [])),
    *(("adjust_saturation", []), ("adjust_sharpness", []), ("posterize", [7])),
    *(("solarize", [0.7]), ("autocontrast", []), ("equalize", [])),
]
"""Those of RandAugment, and what they get at magnitude 9; `adjust_*` get 1.27 or 0.73."""


def epoch_of(place: Place, *options: str, epoch: int = 0) -> Epoch:
    """20 samples, in batches of four."""
    samples = place.epoch("threads", epoch, *options)
    rows = np.array([sample.row for sample in samples])
    inputs, targets = (
        torch.stack(values) for values in zip(*(s[2:] for s in samples), strict=True)
    )
    return rows, inputs, targets


def digits(*options: str, epochs: int = 1) -> tuple[np.ndarray, Tensor]:
    """Rows and inputs of 10,000 digits an epoch, of which the mean, 0, is no value of a pixel."""
    loader = loaders_of("global_batch_size=500", "data.mean=[0.5]", "data.std=[1]", *options)[0]
    rows, batches = [], []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for inputs, _ in loader:
            rows.append(loader.last_rows.copy())
            batches.append(inputs.clone())
    return np.concatenate(rows), torch.cat(batches)


@pytest.mark.parametrize(
    "kind", [kind for kind in ("pairs, targets twice as large", "masks") if kind in KINDS]
)
def test_affine_is_torchvisions(kind: str, places) -> None:
    place = places(kind)
    _, *plain = epoch_of(place)
    rows, inputs, targets = epoch_of(place, "data.rotation=180", "data.random_scale=[0.6,1.7]")
    assert (np.abs(rows["angle"]).max() > 150, rows["scale"].min() < 0.7) == (True, True)

    def moved(tensors: Tensor, mode: str, fill: int = 0) -> Tensor:
        how = {"interpolation": v2.InterpolationMode(mode), "fill": [fill]}
        parts = zip(tensors, rows["angle"].tolist(), rows["scale"].tolist(), strict=True)
        return torch.stack([functional.affine(t, a, [0, 0], s, [0, 0], **how) for t, a, s in parts])

    if kind == "masks":
        expected = moved(plain[1][:, None], "nearest", fill=IGNORED)[:, 0]
        assert (targets == expected).float().mean() > 0.995  # ties
        assert {*targets.unique().tolist()} == {*expected.unique().tolist()}
        return
    for found, given in zip((inputs, targets), plain, strict=True):
        # torchvision mixes what it fills in by itself; the line where the image ends differs.
        ends = moved(torch.ones_like(given), "bilinear") < 1
        expected = moved(given, "bilinear").masked_fill(ends, 0)
        torch.testing.assert_close(found.masked_fill(ends, 0), expected, rtol=0, atol=1e-4)


def test_random_erasing_sets_the_papers_shares_to_the_mean() -> None:
    """2 to 33 % of every fourth image, at any place."""
    plain, inputs = (digits(*more)[1] for more in ([], ["data.random_erasing=0.25"]))
    erased = inputs[:, 0] == 0
    assert torch.equal(inputs, plain.masked_fill(erased[:, None], 0))
    assert erased.any(dim=0).all()
    erased = erased[erased.any(dim=2).any(dim=1)]
    assert len(erased) == pytest.approx(2500, rel=0.05)
    lines, columns = (erased.any(dim=dim).sum(dim=1) for dim in (2, 1))
    assert torch.equal(erased.sum(dim=(1, 2)), lines * columns)  # they are rectangles
    shares = lines * columns / 28**2
    assert 0.015 < shares.min() < 0.025  # in whole pixels
    assert 0.31 < shares.max() < 0.36


@pytest.mark.parametrize(
    "kind", ["cells of one channel", "photos", "cells of 8 bits, not compressed"]
)
def test_operations_of_randaugment_are_torchvisions(kind: str, places) -> None:
    """Of magnitude 9, with the signs that were drawn."""
    drawn = set()
    for epoch in range(4):
        _, plain, _ = epoch_of(places(kind), epoch=epoch)
        rows, inputs, _ = epoch_of(places(kind), "data.randaugment=[1,9]", epoch=epoch)
        for row, image, found in zip(rows, plain, inputs, strict=True):
            name, amounts = OPERATIONS[row["operations"][0]]
            if name.startswith("adjust"):
                amounts = [1.27 if row["amounts"][0] > 1 else 0.73]
            if len(image) == 5:
                image, found = image[:, None], found[:, None]
            wanted = image if name == "identity" else getattr(functional, name)(image, *amounts)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
            drawn.add((name, *amounts))
    assert len(drawn) == 9 + 4  # four have both signs


def test_batches_take_other_factors_of_colour_each_as_torchvision_does(places) -> None:
    _, plain, _ = epoch_of(places("photos"))
    rows, inputs, _ = epoch_of(places("photos"), "data.colour_jitter=[0.5,0.5,0.5]")
    for row, image, found in zip(rows, plain, inputs, strict=True):
        for name in ("brightness", "contrast", "saturation"):
            assert 0.5 <= row[name] <= 1.5
            image = getattr(functional, f"adjust_{name}")(image, float(row[name]))
        torch.testing.assert_close(found, image, rtol=0, atol=1e-3)  # other weights of grey


def test_half_of_the_samples_are_cut_and_the_others_have_beta_distributed_weights() -> None:
    """And operations of RandAugment are alike often."""
    options = ["data.mixup=0.2", "data.cutmix=1", "data.randaugment=[2,9]", "loader=synthetic"]
    rows, _ = digits(*options, epochs=5)
    is_cut = rows["cut_share"] > 0
    assert is_cut.mean() == pytest.approx(0.5, abs=0.01)
    assert (rows["weight"][is_cut] == 1).all()
    values = np.linspace(0.05, 0.95, 19)
    shares = (rows["weight"][~is_cut][:, None] < values).mean(axis=0)
    assert shares == pytest.approx(beta(0.2, 0.2).cdf(values), abs=0.01)
    for drawn in rows["operations"][:, :2].T:
        assert np.bincount(drawn) == pytest.approx([50_000 / 9] * 9, rel=0.05)


MIXED = ["photos", "several labels", "pairs, targets twice as large"]
MIXTURES = [(kind, name) for kind in MIXED for name in ("mixup", "cutmix")]
MIXTURES += [("numbers", "mixup"), ("masks", "cutmix")]  # the others are refused


@pytest.mark.parametrize(("kind", "name"), [row for row in MIXTURES if row[0] in KINDS])
def test_targets_are_mixed_as_inputs_are(kind: str, name: str, places) -> None:
    """With those half a batch further."""
    _, plain, values = epoch_of(places(kind))
    rows, inputs, targets = epoch_of(places(kind), f"data.{name}=1.0")
    if kind == "photos":
        values = one_hot(values, 3).float()

    def partners(tensors: Tensor) -> Tensor:
        return tensors.unflatten(0, (5, 4)).roll(2, dims=1).flatten(0, 1)

    own = torch.from_numpy(rows["weight"].copy()).view(-1, 1, 1, 1).repeat(1, 1, *plain.shape[2:])
    if name == "cutmix":
        for share, changed in zip(own, (inputs != plain).any(dim=1), strict=True):
            lines, columns = (torch.where(changed.any(dim=dim))[0] for dim in (1, 0))
            if len(lines):
                share[:, lines[0] : lines[-1] + 1, columns[0] : columns[-1] + 1] = 0
    assert ((own == 0).any() and (own == 1).any()) == (name == "cutmix")
    torch.testing.assert_close(inputs, own * plain + (1 - own) * partners(plain))
    if kind == "masks":
        own = own[:, 0].long()
    elif values.ndim == 4:
        own = own.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    else:
        own = own.mean(dim=(1, 2, 3)).view(-1, 1)
    torch.testing.assert_close(targets, own * values + (1 - own) * partners(values))


@pytest.mark.parametrize(
    ("kind", "option", "shown"),
    [
        ("masks", "data.mixup=0.2", ["data.mixup=0.2", "data.mixup=0"]),
        ("numbers", "data.cutmix=1.0", ["data.cutmix=1.0", "data.cutmix=0"]),
        ("pairs", "data.randaugment=[2,9]", ["data.randaugment=[2, 9]", "colour_jitter"]),
        ("photos", "data.mixup=1.0", ["global_batch_size=6", "world_size=2", "use 8"]),
    ],
)
def test_what_cannot_be_augmented_so_is_refused(kind: str, option: str, shown, places) -> None:
    """The share of one of two ranks in a batch of six has no two halves."""
    if kind in KINDS:
        with refused(*shown):
            places(kind).loaders("threads", option, "global_batch_size=6", num_ranks=2)
