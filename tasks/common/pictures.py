"""Drawing of images and charts for the loggers."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

LINE, CHARACTER = 12, 8  # pixels of a line of text, and of its widest character
MIN_WIDTH = 96  # of an image with text
# Pixels of a confusion matrix: all cells, largest cell, smallest cell with a number, names.
CHART, MAX_CELL, MIN_CELL, NAMES = 480, 48, 24, 120


def as_pictures(images: Tensor) -> Tensor:
    """Clamp to [0, 1] and keep the first channel unless there are 3; (N, 1 or 3, H, W) float32."""
    images = images.detach().float().clamp(0, 1)
    return images if images.shape[1] in (1, 3) else images[:, :1]


def with_captions(pictures: Tensor, captions: list[list[tuple[str, str]]]) -> Tensor:
    """Draw lines of (text, colour) below each picture, which is enlarged if small; (N, 3, H, W).
    What follows a tab in a text stands at the right and hides a longer text before it."""
    factor = -(-MIN_WIDTH // pictures.shape[-1])
    pictures = F.interpolate(as_pictures(pictures), scale_factor=float(factor))
    height, width = pictures.shape[-2:]
    drawn = []
    for picture, lines in zip(_bytes(pictures), captions, strict=True):
        image = Image.new("RGB", (width, height + LINE * max(map(len, captions))))
        image.paste(Image.fromarray(picture))
        for number, (text, colour) in enumerate(lines):
            text, _, right = text.partition("\t")
            top = height + LINE * number
            _write(image, (2, top), text, colour)
            image.paste(0, (width - CHARACTER * len(right), top, width, top + LINE))
            _write(image, (width - 2, top), right, colour, "ra")
        drawn.append(np.array(image))
    return floats(np.stack(drawn))


def shares_text(shares: Tensor, names: tuple[str, ...]) -> str:
    """Return the classes and their shares as text, such as `cat: 70%, dog: 30%`; of 100%, the class
    alone."""
    found = [(share, name) for share, name in zip(shares.tolist(), names, strict=True) if share > 0]
    found.sort(key=lambda one: -one[0])
    return ", ".join(name if share == 1 else f"{name}: {share:.0%}" for share, name in found) or "-"


def confusion_matrix(counts: Tensor, names: tuple[str, ...]) -> Tensor:
    """Draw the share of predicted classes (columns) in true classes (rows), 1 dark; (1, 3, H, W).

    Up to 40 classes have their names, up to 20 also the shares in percent.
    """
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).cpu().numpy()
    cell = max(1, min(MAX_CELL, CHART // len(names)))
    size = cell * len(names)
    white, dark = np.array([255.0, 255.0, 255.0]), np.array([8.0, 48.0, 107.0])
    colours = (white + shares[..., None] * (dark - white)).astype(np.uint8)
    cells = Image.fromarray(colours).resize((size, size), Image.Resampling.NEAREST)
    lines, columns = Image.new("RGB", (NAMES, size)), Image.new("RGB", (NAMES, size))
    for line, name in enumerate(names if cell >= LINE else ()):
        middle = line * cell + cell // 2
        _write(lines, (NAMES - 4, middle), name[:18], "white", "rm")
        _write(columns, (4, middle), name[:18], "white", "lm")
        for column in range(len(names)) if cell >= MIN_CELL else ():
            share = shares[line, column]
            colour = "white" if share > 0.5 else "black"
            if share > 0:
                place = (column * cell + cell // 2, middle)
                _write(cells, place, f"{100 * share:.0f}", colour, "mm")
    image = Image.new("RGB", (NAMES + size, NAMES + size))
    image.paste(cells, (NAMES, NAMES))
    image.paste(lines, (0, NAMES))
    image.paste(columns.rotate(90, expand=True), (NAMES, 0))
    _write(image, (4, 4), "columns: predicted", "white")
    _write(image, (4, 4 + LINE), "rows: true, in %", "white")
    return floats(np.array(image)[None])


def _write(
    image: Image.Image, place: tuple[int, int], text: str, colour: str, anchor: str = "la"
) -> None:
    # Pillow's own font may lack other letters.
    text = text.encode("latin-1", "replace").decode("latin-1")
    ImageDraw.Draw(image).text(place, text, colour, anchor=anchor)


def _bytes(pictures: Tensor) -> np.ndarray:
    """Convert images to (N, H, W, 3) uint8."""
    pictures = pictures.expand(-1, 3, -1, -1)
    return (255 * pictures).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def floats(pictures: np.ndarray) -> Tensor:
    """Convert (N, H, W, 3) uint8 images to (N, 3, H, W) floats in [0, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
