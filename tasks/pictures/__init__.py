"""Drawing of images, classes and charts for the loggers."""

import colorsys
from collections.abc import Iterable

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

LINE = 12  # pixels of a line of text
MIN_WIDTH = 96  # of an image with text
# Pixels of a confusion matrix: all cells, largest cell, names.
CHART, MAX_CELL, NAMES = 480, 48, 120


def as_pictures(images: Tensor) -> Tensor:
    """Clamp to [0, 1] and keep the first channel unless there are 3; (N, 1 or 3, H, W) float32."""
    images = images.detach().float().clamp(0, 1)
    return images if images.shape[1] in (1, 3) else images[:, :1]


def with_answers(pictures: Tensor, true: Iterable[str], predicted: Iterable[str]) -> Tensor:
    """Draw the true and the predicted answer below each picture, which is enlarged if small.

    Returns:
        (N, 3, H, W) in [0, 1].
    """
    factor = -(-MIN_WIDTH // pictures.shape[-1])
    pictures = F.interpolate(as_pictures(pictures), scale_factor=float(factor))
    height = pictures.shape[-2]
    pictures = F.pad(pictures, (0, 0, 0, 3 * LINE)).expand(-1, 3, -1, -1)
    drawn = []
    pixels = (255 * pictures).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    for array, answer, guess in zip(pixels, true, predicted, strict=True):
        image = Image.fromarray(array)
        _write(image, (2, height), f"true {answer}\npred {guess}")
        drawn.append(np.array(image))
    return _floats(np.stack(drawn))


def class_colours(num_classes: int) -> np.ndarray:
    """Return one colour per class, (num_classes, 3) uint8; the first is black, for background."""
    golden = 0.618033988749895  # each hue far from those before it
    colours = [
        colorsys.hsv_to_rgb(number * golden % 1, 0.5 + 0.5 * (number % 2), 1 - 0.2 * (number % 3))
        for number in range(num_classes)
    ]
    return (255 * np.array([(0, 0, 0), *colours[1:]])).round().astype(np.uint8)


def coloured(indices: Tensor, colours: np.ndarray, ignore_index: int = -1) -> Tensor:
    """Draw class indices (N, H, W) in the colours of the classes, others and the `ignore_index` in
    white; (N, 3, H, W)."""
    table = np.concatenate([colours, np.full((1, 3), 255, np.uint8)])
    indices = indices.cpu()
    is_class = (indices >= 0) & (indices < len(colours)) & (indices != ignore_index)
    return _floats(table[torch.where(is_class, indices, len(colours)).numpy()])


def confusion_matrix(counts: Tensor, names: tuple[str, ...]) -> Tensor:
    """Draw the share of predicted classes (columns) in true classes (rows), 1 dark; (1, 3, H, W).

    Up to 40 classes have their names.
    """
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).cpu().numpy()
    cell = max(1, min(MAX_CELL, CHART // len(names)))
    size = cell * len(names)
    dark = np.array([8, 48, 107])
    colours = (255 + shares[..., None] * (dark - 255)).astype(np.uint8)
    cells = Image.fromarray(colours).resize((size, size), Image.Resampling.NEAREST)
    edge = Image.new("RGB", (NAMES, size))
    if cell >= LINE:
        for number, name in enumerate(names):
            _write(edge, (4, number * cell + (cell - LINE) // 2), name[:18])
    image = Image.new("RGB", (NAMES + size, NAMES + size))
    image.paste(cells, (NAMES, NAMES))
    image.paste(edge, (0, NAMES))
    image.paste(edge.rotate(90, expand=True), (NAMES, 0))
    _write(image, (4, 4), "columns: predicted\nrows: true")
    return _floats(np.array(image)[None])


def _write(image: Image.Image, place: tuple[int, int], text: str) -> None:
    # Pillow's own font may lack other letters.
    text = text.encode("latin-1", "replace").decode("latin-1")
    ImageDraw.Draw(image).text(place, text, "white")


def _floats(pictures: np.ndarray) -> Tensor:
    """Convert (N, H, W, 3) uint8 images to (N, 3, H, W) floats in [0, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
