"""Files in the formats and modes that images come in, and the pixels that Pillow makes of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from imagecodecs import png_encode
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.images import save_tiff, smooth, turned

HEIGHT, WIDTH = 40, 36
XMP = PngInfo()
XMP.add_itxt(
    "XML:com.adobe.xmp",
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><tiff:Orientation>3</tiff:Orientation></x:xmpmeta>',
)


def noise(channels: int, dtype: str = "uint8") -> np.ndarray:
    """Random values, (HEIGHT, WIDTH, channels) or, of one channel, (HEIGHT, WIDTH); some lines,
    which each crop has, are of one colour: it may be transparent."""
    random, highest = np.random.default_rng(channels), np.iinfo(dtype).max
    values = random.integers(0, highest, (HEIGHT, WIDTH, channels), dtype, endpoint=True)
    values[16:24] = values[0, 0]
    return values.squeeze()


def shown(path: Path, background: Sequence[int]) -> np.ndarray:
    """The upright pixels of a file on a background, (height, width, 3) uint8; of 16 bits, the upper
    8."""
    image: Image.Image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I"):
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    if image.has_transparency_data:
        clear, image = image.convert("RGBA"), Image.new("RGB", image.size, tuple(background))
        image.paste(clear, mask=clear)
    return np.asarray(image.convert("RGB"))


def write_by_pillow(folder: Path) -> None:
    """Formats other than TIFF, most of them under the name of a PNG, and files that decoders read
    in different ways."""
    grey, rgb, rgba = noise(1), noise(3), noise(4)
    palette = Image.fromarray(grey)
    palette.putpalette(np.random.default_rng(4).bytes(768))
    photo = Image.fromarray(smooth(0, HEIGHT, WIDTH))
    opaque, clear, bits = Image.fromarray(rgb), Image.fromarray(rgba), Image.fromarray(grey > 99)
    exact, moving = {"lossless": True, "exact": True}, {"save_all": True, "append_images": [clear]}
    kinds: list[tuple[str, str, Image.Image, dict[str, Any]]] = [
        ("bits", "PNG", bits, {}),
        ("palette", "PNG", palette, {}),
        ("clear palette", "PNG", palette, {"transparency": bytes([0, 100])}),
        ("clear grey", "PNG", Image.fromarray(grey), {"transparency": int(grey[0, 0])}),
        ("clear rgb", "PNG", opaque, {"transparency": tuple(rgb[0, 0].tolist())}),
        ("bmp", "BMP", opaque, {}),
        ("clear gif", "GIF", palette, {"transparency": int(grey[0, 0])}),
        ("webp alpha", "WEBP", clear, exact),
        ("moving", "WEBP", clear, exact | moving),
        ("tga", "TGA", clear, {}),
        ("jpeg 2000", "JPEG2000", clear, {"irreversible": False}),
        ("deep jpeg 2000", "JPEG2000", Image.fromarray(noise(1, "uint16")), {}),
        ("ico", "ICO", clear.crop((0, 0, 36, 36)), {"sizes": [(36, 36)]}),
        ("moving png", "PNG", opaque, moving),
        ("late png", "PNG", opaque, {**moving, "default_image": True}),  # not one of its frames
        ("turned.JPEG", "PNG", opaque, {"exif": turned(6)}),
        ("turned webp", "WEBP", opaque, {"exif": turned(5), "lossless": True}),
        ("xmp", "PNG", opaque, {"pnginfo": XMP}),
        ("cut", "PNG", opaque, {}),
        ("pgm", "PPM", Image.fromarray(noise(1, "uint16")), {}),
        ("cmyk.jpg", "JPEG", photo.convert("CMYK"), {"quality": 90}),
        ("stray.jpg", "JPEG", photo, {"quality": 90}),
    ]
    for name, form, image, options in kinds:
        image.save(folder / (name if "." in name else f"{name}.png"), form, **options)
    cut, stray = folder / "cut.png", folder / "stray.jpg"
    cut.write_bytes(cut.read_bytes()[:-12])  # the last chunk is missing
    content = stray.read_bytes()
    stray.write_bytes(content[:20] + b"\0\0\0" + content[20:])


CHANNELS = {"grey": 1, "grey alpha": 2, "rgb": 3, "rgb alpha": 4}
COLOUR: dict[str, Any] = {"photometric": "rgb"}
INVERTED: dict[str, Any] = {"photometric": "miniswhite"}


def write_all(folder: Path, background: Sequence[int]) -> dict[str, np.ndarray]:
    """Write files of all kinds that are read as photos; their pixels by name, on a background."""
    folder.mkdir(parents=True, exist_ok=True)
    write_by_pillow(folder)
    for dtype in ("uint8", "uint16"):
        for name, channels in CHANNELS.items():
            (folder / f"{name} {dtype}.png").write_bytes(png_encode(noise(channels, dtype)))

    grey, rgb, clear = noise(1), noise(3), {"extrasamples": ["unassalpha"]}
    colours = np.random.default_rng(4).integers(0, 65536, (3, 256), np.uint16)
    kinds: list[tuple[str, np.ndarray, dict[str, Any]]] = [
        ("grey", grey, {}),
        ("grey alpha", noise(2), clear),
        ("rgb", rgb, COLOUR),
        ("alpha", noise(4), COLOUR | clear),
        ("white is 0", grey, INVERTED),
        ("planes", rgb, {**COLOUR, "planarconfig": "separate"}),
        ("palette", grey, {"photometric": "palette", "colormap": colours}),
        ("turned", rgb, {**COLOUR, "compression": "lzma", "extratags": [(0x112, 3, 1, 8, True)]}),
        ("bits, white is 0", grey > 99, INVERTED),
        ("4 bits", grey % 16, {"bitspersample": 4}),
        ("deep grey", noise(1, "uint16"), {"byteorder": ">"}),
        ("deep rgb", rgb * np.uint16(257), COLOUR),  # as the upper 8 bits, which DALI rounds
        ("deep rgb, big end", noise(3, "uint16"), COLOUR | {"byteorder": ">"}),
        ("deep alpha", noise(4, "uint16"), COLOUR | clear),
    ]
    for name, values, options in kinds:
        save_tiff(folder / f"{name}.tif", values, **options)
    return {path.name: shown(path, background) for path in sorted(folder.iterdir())}


def write_refused(folder: Path) -> set[str]:
    """Write files whose pixels would change; returns their names."""
    before = {path.name for path in folder.iterdir()}
    grey, rgb, five = noise(1), noise(3), noise(5)
    deep = noise(3, "uint16")
    types = ("int8", "int16", "int32", "uint32", "int64", "float16", "float32", "float64")
    kinds: list[tuple[str, np.ndarray, dict[str, Any]]] = [
        *((dtype, (grey // 3).astype(dtype), {}) for dtype in types),
        ("five", five, {}),
        ("five deep", five.astype(np.uint16), {}),
        ("two", rgb[..., :2], {}),
        ("five colours", five, COLOUR),
        ("infrared", five[..., :4], COLOUR | {"extrasamples": ["unspecified"]}),
        ("floats", rgb.astype(np.float32), COLOUR),
        ("deep white", deep[..., 0], INVERTED),
        ("deep planes", deep, COLOUR | {"planarconfig": "separate"}),
        ("lab", rgb, {"photometric": "cielab"}),
        ("luma", rgb, {"photometric": "ycbcr"}),
        ("12 bits", deep[..., 0] % 4096, {"bitspersample": 12}),
        ("pages", grey, {}),
    ]
    for name, values, options in kinds:
        save_tiff(folder / f"{name}.tif", values, **options)
    tifffile.imwrite(folder / "pages.tif", grey, photometric="minisblack", append=True)
    Image.fromarray(grey.astype(np.float32)).save(folder / "pfm.png", "PPM")
    for name, values in (("clear bits", grey > 99), ("clear deep", deep[..., 0])):
        Image.fromarray(values).save(folder / f"{name}.png", transparency=int(values[0, 0]))
    return {path.name for path in folder.iterdir()} - before
