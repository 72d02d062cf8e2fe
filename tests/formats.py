"""Files in the formats and modes that images come in, and the pixels that NumPy makes of them."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image

HEIGHT, WIDTH = 40, 36
PALETTE, ALPHA = 3, 4
"""Bits of a PNG's type of colours: with a palette, with alpha; 2: with colours."""


def noise(number: int, highest: int, channels: int) -> np.ndarray:
    """Random ints from 0 to `highest`, (HEIGHT, WIDTH, channels)."""
    random = np.random.default_rng(number)
    return random.integers(0, highest, (HEIGHT, WIDTH, channels), endpoint=True)


def as_rgb(values: np.ndarray) -> np.ndarray:
    """RGB of 8 bits, of colours or of grey."""
    return np.broadcast_to(values, (*values.shape[:2], 3)).astype(np.uint8)


def over(values: np.ndarray, alpha: np.ndarray, background: list[int]) -> np.ndarray:
    """RGB of 8 bits that lies on a background, by alpha from 0 to 255."""
    colours, alpha = as_rgb(values).astype(float), alpha.reshape(HEIGHT, WIDTH, 1)
    mixed = (colours * alpha + np.array(background) * (255 - alpha)) / 255
    return np.floor(mixed + 0.5).astype(np.uint8)


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


def tiff(path: Path, values: np.ndarray, photometric: str = "minisblack", **options: Any) -> None:
    if options.get("planarconfig") == "separate":
        values = np.moveaxis(values, -1, 0)
    elif values.shape[-1] > 1:
        options = {"planarconfig": "contig"} | options
    tifffile.imwrite(path, values.squeeze(), photometric=photometric, **options)


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


def write_pngs(folder: Path, background: list[int]) -> dict[str, np.ndarray]:
    expected = {}
    for bits in (1, 2, 4, 8, 16):
        grey = noise(bits, 2**bits - 1, 1) if bits < 16 else 257 * noise(bits, 255, 1)
        png(folder / f"grey {bits}.png", bits, 0, grey)
        expected[f"grey {bits}.png"] = as_rgb(grey * 255 // (2**bits - 1))
    for bits in (1, 4, 8):
        indices, alpha = noise(bits, 2**bits - 1, 1), np.full(2**bits, 255)
        colours = np.random.default_rng(bits).integers(0, 256, (2**bits, 3), np.uint8)
        shown, alpha[:2] = colours[indices[..., 0]], (0, 100)
        for name, chunks in (("palette", {}), ("clear palette", {"tRNS": bytes([0, 100])})):
            path = folder / f"{name} {bits}.png"
            png(path, bits, PALETTE, indices, PLTE=colours.tobytes(), **chunks)
            expected[path.name] = over(shown, alpha[indices], background) if chunks else shown
    for bits, scale in ((8, 1), (16, 257)):
        for name, kind, channels in (("grey", 0, 1), ("rgb", 2, 3)):
            values = noise(bits, 255, channels + 1)
            png(folder / f"{name} alpha {bits}.png", bits, kind + ALPHA, scale * values)
            shown, alpha = values[..., :channels], values[..., channels:]
            expected[f"{name} alpha {bits}.png"] = over(shown, alpha, background)
            if bits == 8:
                shown[:9] = shown[0, 0]
                clear = struct.pack(f">{channels}H", *shown[0, 0].tolist())
                png(folder / f"{name} clear.png", 8, kind, shown, tRNS=clear)
                is_clear = (shown == shown[0, 0]).all(axis=2)
                expected[f"{name} clear.png"] = over(shown, np.where(is_clear, 0, 255), background)
    return expected


def write_tiffs(folder: Path, background: list[int]) -> dict[str, np.ndarray]:
    """TIFFs that are read as photos."""
    grey, rgb, alpha = noise(1, 255, 1), noise(2, 255, 3), noise(3, 255, 1)
    colours = np.random.default_rng(4).integers(0, 256, (256, 3))
    few = noise(5, 15, 1)
    rgba, bright = np.dstack([rgb, alpha]), {"extrasamples": ["unassalpha"]}
    kinds: dict[str, tuple[np.ndarray, np.ndarray, dict[str, Any]]] = {
        "grey": (grey, as_rgb(grey), {}),
        "white is 0": (grey, as_rgb(255 - grey), {"photometric": "miniswhite"}),
        "tiles": (rgb, rgb, {"photometric": "rgb", "tile": (16, 16), "compression": "deflate"}),
        "planes": (rgb, rgb, {"photometric": "rgb", "planarconfig": "separate"}),
        "lzw": (rgb, rgb, {"photometric": "rgb", "compression": "lzw", "predictor": 2}),
        "alpha": (rgba, over(rgb, alpha, background), {"photometric": "rgb", **bright}),
        "alpha planes": (
            *(rgba, over(rgb, alpha, background)),
            {"photometric": "rgb", "planarconfig": "separate", **bright},
        ),
        "grey alpha": (np.dstack([grey, alpha]), over(grey, alpha, background), bright),
        "palette": (
            *(grey, colours[grey[..., 0]]),
            {"photometric": "palette", "colormap": (257 * colours.T).astype(np.uint16)},
        ),
    }
    for name, (values, _, options) in kinds.items():
        tiff(folder / f"{name}.tif", values.astype(np.uint8), **options)
    for order in "<>":
        name = {"<": "little", ">": "big"}[order]
        for what, values, options in (
            (f"grey {name}", grey, {}),
            (f"rgb {name}", rgb, {"photometric": "rgb"}),
            (f"alpha {name}", rgba, {"photometric": "rgb", **bright}),
        ):
            path = folder / f"{what}.tif"
            tiff(path, (257 * values).astype(np.uint16), **options, byteorder=order)
            kinds[what] = (
                values,
                over(rgb, alpha, background) if values is rgba else as_rgb(values),
                {},
            )
    for name, photometric in (("bits", "minisblack"), ("bits, white is 0", "miniswhite")):
        tiff(folder / f"{name}.tif", grey > 99, photometric)
        kinds[name] = (grey, as_rgb(255 * ((grey > 99) == (name == "bits"))), {})
    tiff_of_bits(folder / "4 bits.tif", 4, pack_bits(few, 4))
    lines = [bytes(int(f"{byte:08b}"[::-1], 2) for byte in line) for line in pack_bits(few % 2, 1)]
    tiff_of_bits(folder / "bits from the right.tif", 1, lines, _266=2)
    kinds |= {"4 bits": (few, as_rgb(17 * few), {})}
    kinds |= {"bits from the right": (few, as_rgb(255 * (few % 2)), {})}
    return {f"{name}.tif": shown.astype(np.uint8) for name, (_, shown, _) in kinds.items()}


def write_others(folder: Path, background: list[int]) -> dict[str, np.ndarray]:
    """Other formats; the names are those of images, and do not matter."""
    grey, rgb, alpha = (noise(n, 255, c).astype(np.uint8) for n, c in ((1, 1), (2, 3), (3, 1)))
    colours = np.random.default_rng(4).integers(0, 256, (256, 3), np.uint8)
    palette = Image.fromarray(grey[..., 0])
    palette.putpalette(colours.tobytes())
    rgba, clear = Image.fromarray(np.dstack([rgb, alpha])), int(grey[0, 0, 0])
    shown, mixed = colours[grey[..., 0]], over(rgb, alpha, background)
    bits = Image.fromarray(grey[..., 0] > 99)
    is_clear = np.where(grey == clear, 0, 255)
    exact = {"lossless": True, "exact": True}
    kinds: list[tuple[str, Image.Image, str, np.ndarray, dict[str, Any]]] = [
        ("bmp bits", bits, "BMP", as_rgb(255 * (grey > 99)), {}),
        ("bmp palette", palette, "BMP", shown, {}),
        ("bmp rgb", Image.fromarray(rgb), "BMP", rgb, {}),
        ("gif", palette, "GIF", shown, {}),
        ("clear gif", palette, "GIF", over(shown, is_clear, background), {"transparency": clear}),
        ("webp", Image.fromarray(rgb), "WEBP", rgb, exact),
        ("webp alpha", rgba, "WEBP", mixed, exact),
        ("moving", rgba, "WEBP", mixed, {**exact, "save_all": True, "append_images": [rgba]}),
        ("tga", rgba, "TGA", mixed, {}),
        ("jpeg 2000", rgba, "JPEG2000", mixed, {"irreversible": False}),
        ("ico", rgba.crop((0, 0, 36, 36)), "ICO", mixed[:36], {"sizes": [(36, 36)]}),
        (
            "moving png",
            Image.fromarray(rgb),
            "PNG",
            rgb,
            {"save_all": True, "append_images": [rgba]},
        ),
    ]
    for name, image, form, _, options in kinds:
        image.save(folder / f"{name}.png", form, **options)
    deep = 257 * noise(5, 255, 1)
    Image.fromarray(deep[..., 0].astype(np.uint16)).save(folder / "deep jpeg 2000.png", "JPEG2000")
    head = f"P5 {WIDTH} {HEIGHT} 65535\n".encode()
    (folder / "pgm.png").write_bytes(head + deep.astype(">u2").tobytes())
    found = {f"{name}.png": shown for name, _, _, shown, _ in kinds}
    return found | dict.fromkeys(("pgm.png", "deep jpeg 2000.png"), as_rgb(deep >> 8))


def write_all(folder: Path, background: list[int]) -> dict[str, np.ndarray]:
    """Write files of all kinds that are read as photos; their pixels by name, on a background."""
    folder.mkdir(parents=True, exist_ok=True)
    expected: dict[str, np.ndarray] = {}
    for write in (write_pngs, write_tiffs, write_others):
        expected |= write(folder, background)
    return expected


def write_refused(folder: Path) -> set[str]:
    """Write files whose pixels would change; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    deep, rgb = noise(1, 65535, 3).astype(np.uint16), noise(2, 255, 3).astype(np.uint8)
    five, few = noise(4, 255, 5).astype(np.uint8), noise(1, 99, 1)
    infrared = {"photometric": "rgb", "extrasamples": ["unspecified"]}
    types = ("int8", "int16", "int32", "uint32", "int64", "float16", "float32", "float64")
    kinds: list[tuple[str, np.ndarray, dict[str, Any]]] = [
        *((dtype, few.astype(dtype), {}) for dtype in types),
        ("five", five, {}),
        ("five deep", five.astype(np.uint16), {}),
        ("two", rgb[..., :2], {}),
        ("five colours", five, {"photometric": "rgb"}),
        ("infrared", five[..., :4], infrared),
        ("floats", rgb.astype(np.float32), {"photometric": "rgb"}),
        ("deep white", deep[..., :1], {"photometric": "miniswhite"}),
        ("deep planes", deep, {"photometric": "rgb", "planarconfig": "separate"}),
        ("lab", rgb, {"photometric": "cielab"}),
        ("luma", rgb, {"photometric": "ycbcr"}),
        ("pages", rgb[..., :1], {}),
    ]
    for name, values, options in kinds:
        tiff(folder / f"{name}.tif", values, **options)
    tiff_of_bits(folder / "12 bits.tif", 12, [bytes(54)] * HEIGHT)
    tifffile.imwrite(folder / "pages.tif", rgb[..., 0], photometric="minisblack", append=True)
    (folder / "pfm.png").write_bytes(f"Pf\n{WIDTH} {HEIGHT}\n-1.0\n".encode() + bytes(4 * 1440))
    for bits, kind in ((4, 0), (16, 0), (16, 2)):
        name, channels = f"clear {bits} {kind}.png", 1 + kind
        png(folder / name, bits, kind, noise(1, 15, channels), tRNS=bytes(2 * channels))
    return {path.name for path in folder.iterdir()}
