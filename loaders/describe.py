"""What a run says about its images at the start: inputs, and what is likely a mistake."""

import numpy as np

from conf.errors import counted, first_few
from loaders.rectangles import Rectangles

GEOMETRY = ("random_crop", "random_resized_crop", "hflip", "vflip", "rotation", "random_scale")
"""Keys of `data` that move what an image shows, at random."""


def describe(samples: Rectangles) -> tuple[str, ...]:
    """Describe the files of a split that are left out and, of training, the inputs, such as
    `inputs: 224x224, 3 channels, 73.5% of images of 60-64x80`, and what may be wrong."""
    data, index = samples.data, samples.index
    lines = []
    if index.left_out:
        few = first_few(f"{path} ({reason})" for path, reason in index.left_out.items())
        lines.append(f"{index.name}: {counted(len(index.left_out), 'file')} left out: {few}")
    if not samples.train:
        return tuple(lines)
    height, width = samples.output_size
    inputs = f"inputs: {height}x{width}, {counted(index.inputs.channels, 'channel')}"
    if index.inputs.dtype == "uint16":
        inputs += " of 16 bits"
    sizes = index.distinct_sizes
    # Of an image's area, what the crop of evaluation shows.
    share = np.median(samples.crop_shapes(sizes).prod(axis=1) / sizes.prod(axis=1))
    if share < 1 or (sizes != (height, width)).any():
        ends = zip(sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist(), strict=True)
        of_sizes = "x".join(f"{low}-{high}" if low < high else f"{low}" for low, high in ends)
        inputs += f", {share:.1%} of images of {of_sizes}"
    lines = [inputs, *index.notes, *lines]
    moved = [f"data.{key}" for key in GEOMETRY if getattr(data, key)]
    if moved and index.target.kind == "numbers":
        lines.append(
            f"the labels' numbers do not move with {', '.join(moved)}: none may be a position"
        )
    return tuple(lines)
