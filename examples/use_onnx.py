"""Predict the classes of photos by a file of `export.py format=onnx`, without this repository.

    pip install numpy onnxruntime pillow
    python use_onnx.py mine.onnx photo.jpg other.png

Photos are read and cut as in validation. It prints the path, the class and its probability. Files
that training refuses, such as TIFFs of floats, are not known here: predict.py names them.
"""

import json
import sys
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def main(model: str, *paths: str) -> None:
    session = onnxruntime.InferenceSession(model)
    texts = session.get_modelmeta().custom_metadata_map
    names = ("classes", "resize", "crop", "in_channels", "background", "exif")
    facts = {name: json.loads(texts[name]) for name in names}
    for path in paths:
        image = cut(read_photo(path, facts), facts["resize"], facts["crop"])
        probabilities = session.run(None, {"images": image[None]})[0][0]
        best = probabilities.argmax()
        print(path, facts["classes"][best], probabilities[best], sep="\t")


def read_photo(path: str, facts: dict[str, Any]) -> Image.Image:
    """Read a photo upright, as RGB of 8 bits, or as grey if the model has one channel."""
    with Image.open(path) as stored:
        if facts["exif"] is False:
            stored.getexif()[0x112] = 1  # Pillow turns TIFFs even if it is not asked to
        photo = ImageOps.exif_transpose(stored)
        if photo.mode.startswith("I"):  # 16 bits, which convert() would clip, not scale
            photo = Image.fromarray((np.asarray(photo) >> 8).astype(np.uint8))
        elif photo.has_transparency_data:
            clear = photo.convert("RGBA")
            photo = Image.new("RGB", clear.size, tuple(facts["background"]))
            photo.paste(clear, mask=clear)
        photo = photo.convert("RGB")
    return photo.convert("L") if facts["in_channels"] == 1 else photo


def cut(photo: Image.Image, resize: int | list[int] | None, crop: list[int]) -> np.ndarray:
    """Return the centre of size `crop` of the photo whose shorter side becomes `resize`, or whose
    height and width do: (height, width, channels) uint8."""
    sides = np.array([photo.height, photo.width])
    scale = 1 if resize is None else (sides if isinstance(resize, list) else sides.min()) / resize
    height, width = np.rint(crop * np.array(scale)).astype(int)
    top, left = (sides - [height, width]) // 2
    photo = photo.crop((left, top, left + width, top + height))
    photo = photo.resize((crop[1], crop[0]), Image.Resampling.BILINEAR)
    return np.array(photo).reshape(*crop, -1)


if __name__ == "__main__":
    main(*sys.argv[1:])
