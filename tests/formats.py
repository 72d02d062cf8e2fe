"""Files in the formats and modes that images come in, and the pixels that Pillow makes of them."""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.images import save_tiff, smooth, turned

HEIGHT, WIDTH = 40, 36
GREY, RGB, PALETTE, ALPHA = 0, 2, 3, 4
"""Types of colours of a PNG; ALPHA is added to one."""
XMP = PngInfo()
XMP.add_itxt(
    "XML:com.adobe.xmp",
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><tiff:Orientation>3</tiff:Orientation></x:xmpmeta>',
)


def noise(number: int, highest: int, channels: int) -> np.ndarray:
    """Random ints from 0 to `highest`, (HEIGHT, WIDTH, channels)."""
    random = np.random.default_rng(number)
    return random.integers(0, highest, (HEIGHT, WIDTH, channels), endpoint=True)


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


def pack_bits(values: np.ndarray, bits: int) -> list[bytes]:
    """Lines of values of up to 8 bits, the first one in the highest bits."""
    lines = values.reshape(len(values), -1)
    in_bits = lines[..., None] >> np.arange(bits)[::-1] & 1
    return [line.tobytes() for line in np.packbits(in_bits.reshape(len(values), -1), axis=1)]


def png(path: Path, bits: int, colours: int, values: np.ndarray, **chunks: bytes) -> None:
    """Write a PNG, with further chunks before its pixels."""
    lines = [line.tobytes() for line in values.astype(f">u{max(bits, 8) // 8}")]
    lines = pack_bits(values, bits) if bits < 8 else lines
    header = struct.pack(">IIBBBBB", values.shape[1], len(values), bits, colours, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines))
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in {"IHDR": header, **chunks, "IDAT": pixels, "IEND": b""}.items():
        body = name.encode() + data
        content += struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
    path.write_bytes(content)


def tiff_of_bits(path: Path, bits: int, lines: list[bytes], **tags: int) -> None:
    """Write an uncompressed grey TIFF as none of the libraries does."""
    data = b"".join(lines)
    of_numbers = {256: WIDTH, 257: HEIGHT, 258: bits, 259: 1, 262: 1, 273: 0, 277: 1, 278: HEIGHT}
    of_numbers |= {279: len(data)} | {int(name[1:]): value for name, value in tags.items()}
    start = 8 + 2 + 12 * len(of_numbers) + 4
    content = b"II*\0" + struct.pack("<IH", 8, len(of_numbers))
    for number, value in sorted((of_numbers | {273: start}).items()):
        content += struct.pack("<HHII", number, 4, 1, value)
    path.write_bytes(content + bytes(4) + data)


def write_pngs(folder: Path) -> None:
    for bits in (1, 2, 4):
        png(folder / f"grey {bits}.png", bits, GREY, noise(bits, 2**bits - 1, 1))
    for bits, scale in ((8, 1), (16, 257)):
        for name, kind, channels in (("grey", GREY, 1), ("rgb", RGB, 3)):
            values = scale * noise(bits, 255, channels + 1)
            png(folder / f"{name} {bits}.png", bits, kind, values[..., :-1])
            png(folder / f"{name} alpha {bits}.png", bits, kind + ALPHA, values)
    for bits in (1, 4, 8):
        indices, colours = noise(bits, 2**bits - 1, 1), np.random.default_rng(bits).bytes(3 << bits)
        png(folder / f"palette {bits}.png", bits, PALETTE, indices, PLTE=colours)
        clear = {"PLTE": colours, "tRNS": bytes([0, 100])}
        png(folder / f"clear palette {bits}.png", bits, PALETTE, indices, **clear)
    for name, kind, channels in (("grey", GREY, 1), ("rgb", RGB, 3)):
        values = noise(8, 255, channels)
        values[:9] = values[0, 0]
        clear = {"tRNS": values[0, 0].astype(">u2").tobytes()}
        png(folder / f"{name} clear.png", 8, kind, values, **clear)


def write_tiffs(folder: Path) -> None:
    """TIFFs that are read as photos."""
    grey, rgb, alpha, few = noise(1, 255, 1), noise(2, 255, 3), noise(3, 255, 1), noise(5, 15, 1)
    colours = 257 * np.random.default_rng(4).integers(0, 256, (3, 256))
    colour, rgba = {"photometric": "rgb"}, np.dstack([rgb, alpha])
    clear: dict[str, Any] = {"extrasamples": ["unassalpha"]}
    kinds: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
        "grey": (grey, {}),
        "rgb": (rgb, colour),
        "alpha": (rgba, colour | clear),
        "grey alpha": (np.dstack([grey, alpha]), clear),
        "white is 0": (grey, {"photometric": "miniswhite"}),
        "tiles": (rgb, {**colour, "tile": (16, 16), "compression": "deflate"}),
        "planes": (rgb, {**colour, "planarconfig": "separate"}),
        "lzw": (rgb, {**colour, "compression": "lzw", "predictor": 2}),
        "alpha planes": (rgba, {**colour, **clear, "planarconfig": "separate"}),
        "palette": (grey, {"photometric": "palette", "colormap": colours.astype(np.uint16)}),
        "turned": (rgb, {**colour, "compression": "lzma", "extratags": [(0x112, 3, 1, 8, True)]}),
        "bits": (grey > 99, {}),
        "bits, white is 0": (grey > 99, {"photometric": "miniswhite"}),
    }
    for name, (values, options) in kinds.items():
        stored = values if values.dtype == bool else values.astype(np.uint8)
        save_tiff(folder / f"{name}.tif", stored, **options)
    for name in ("grey", "rgb", "alpha"):
        values, options = kinds[name]
        for order in "<>":
            path = folder / f"{name} {'little' if order == '<' else 'big'}.tif"
            save_tiff(path, (257 * values).astype(np.uint16), **options, byteorder=order)
    tiff_of_bits(folder / "4 bits.tif", 4, pack_bits(few, 4))
    lines = [bytes(int(f"{byte:08b}"[::-1], 2) for byte in line) for line in pack_bits(few % 2, 1)]
    tiff_of_bits(folder / "bits from the right.tif", 1, lines, _266=2)


def write_others(folder: Path) -> None:
    """Other formats, most of them under the name of a PNG, and files that decoders read in
    different ways."""
    grey, rgb, rgba = (noise(c, 255, c).astype(np.uint8).squeeze() for c in (1, 3, 4))
    palette = Image.fromarray(grey)
    palette.putpalette(np.random.default_rng(4).bytes(768))
    smooth_image = Image.fromarray(smooth(0, HEIGHT, WIDTH))
    opaque, clear, bits = Image.fromarray(rgb), Image.fromarray(rgba), Image.fromarray(grey > 99)
    exact, moving = {"lossless": True, "exact": True}, {"save_all": True, "append_images": [clear]}
    kinds: list[tuple[str, str, Image.Image, dict[str, Any]]] = [
        ("bmp bits", "BMP", bits, {}),
        ("bmp rgb", "BMP", opaque, {}),
        ("clear gif", "GIF", palette, {"transparency": int(grey[0, 0])}),
        ("webp alpha", "WEBP", clear, exact),
        ("moving", "WEBP", clear, exact | moving),
        ("tga", "TGA", clear, {}),
        ("jpeg 2000", "JPEG2000", clear, {"irreversible": False}),
        ("deep jpeg 2000", "JPEG2000", Image.fromarray(grey.astype(np.uint16) * 257), {}),
        ("ico", "ICO", clear.crop((0, 0, 36, 36)), {"sizes": [(36, 36)]}),
        ("moving png", "PNG", opaque, moving),
        ("late png", "PNG", opaque, {**moving, "default_image": True}),  # not one of its frames
        ("turned.JPEG", "PNG", opaque, {"exif": turned(6)}),
        ("turned webp", "WEBP", opaque, {"exif": turned(5), "lossless": True}),
        ("xmp", "PNG", opaque, {"pnginfo": XMP}),
        ("cut", "PNG", opaque, {}),
        ("cmyk.jpg", "JPEG", smooth_image.convert("CMYK"), {"quality": 90}),
        ("stray.jpg", "JPEG", smooth_image, {"quality": 90}),
    ]
    for name, form, image, options in kinds:
        image.save(folder / (name if "." in name else f"{name}.png"), form, **options)
    cut, stray = folder / "cut.png", folder / "stray.jpg"
    cut.write_bytes(cut.read_bytes()[:-12])  # the last chunk is missing
    content = stray.read_bytes()
    stray.write_bytes(content[:20] + b"\0\0\0" + content[20:])
    head = f"P5 {WIDTH} {HEIGHT} 65535\n".encode()
    (folder / "pgm.png").write_bytes(head + (grey.astype(">u2") * 257).tobytes())


def write_all(folder: Path, background: Sequence[int]) -> dict[str, np.ndarray]:
    """Write files of all kinds that are read as photos; their pixels by name, on a background."""
    folder.mkdir(parents=True, exist_ok=True)
    for write in (write_pngs, write_tiffs, write_others):
        write(folder)
    return {path.name: shown(path, background) for path in sorted(folder.iterdir())}


def write_refused(folder: Path) -> set[str]:
    """Write files whose pixels would change; returns their names."""
    before = {path.name for path in folder.iterdir()}
    deep, rgb = noise(1, 65535, 3).astype(np.uint16), noise(2, 255, 3).astype(np.uint8)
    five, few = noise(4, 255, 5).astype(np.uint8), noise(1, 99, 1)
    types = ("int8", "int16", "int32", "uint32", "int64", "float16", "float32", "float64")
    kinds: list[tuple[str, np.ndarray, dict[str, Any]]] = [
        *((dtype, few.astype(dtype), {}) for dtype in types),
        ("five", five, {}),
        ("five deep", five.astype(np.uint16), {}),
        ("two", rgb[..., :2], {}),
        ("five colours", five, {"photometric": "rgb"}),
        ("infrared", five[..., :4], {"photometric": "rgb", "extrasamples": ["unspecified"]}),
        ("floats", rgb.astype(np.float32), {"photometric": "rgb"}),
        ("deep white", deep[..., :1], {"photometric": "miniswhite"}),
        ("deep planes", deep, {"photometric": "rgb", "planarconfig": "separate"}),
        ("lab", rgb, {"photometric": "cielab"}),
        ("luma", rgb, {"photometric": "ycbcr"}),
        ("pages", rgb[..., :1], {}),
    ]
    for name, values, options in kinds:
        save_tiff(folder / f"{name}.tif", values, **options)
    tifffile.imwrite(folder / "pages.tif", rgb[..., 0], photometric="minisblack", append=True)
    tiff_of_bits(folder / "12 bits.tif", 12, [bytes(54)] * HEIGHT)
    (folder / "pfm.png").write_bytes(f"Pf\n{WIDTH} {HEIGHT}\n-1.0\n".encode() + bytes(4 * 1440))
    for bits, kind in ((4, GREY), (16, GREY), (16, RGB)):
        values = noise(1, 15, 1 + kind)
        png(folder / f"clear {bits} {kind}.png", bits, kind, values, tRNS=bytes(2 + 2 * kind))
    return {path.name for path in folder.iterdir()} - before
