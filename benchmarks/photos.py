"""Images like photographs, and cells under a microscope, from random numbers.

Photos are dead-leaves images: opaque leaves of all sizes occlude one another, with natural images'
edges and 1/f^2 power spectrum.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

FloatImage = NDArray[np.float32]
ByteImage = NDArray[np.uint8]

GAMMA = 2.2
MIN_RADIUS = 2  # pixels; with smaller leaves, JPEG files are larger than those of photographs
SMALL_RADIUS = 8  # leaves up to this radius are drawn all at once, larger ones one by one
COVERAGE = 12  # mean number of leaves over a pixel; e^-12 of the pixels show the backdrop
TEXTURE_SIZE = 512
CELL_SIZE = 50
NUM_CHANNELS = 5


def stream(seed: int, number: int, purpose: int = 0) -> np.random.Generator:
    """Random number generator of one sample: Philox, keyed by `seed` and `number`.

    Streams with different seeds, numbers or purposes never overlap.
    """
    return np.random.Generator(np.random.Philox(key=[seed, number], counter=[0, 0, 0, purpose]))


@cache
def _texture() -> FloatImage:
    """Periodic square of noise with power 1/f^2, zero mean and unit variance."""
    noise = stream(0, 0, purpose=1).standard_normal((TEXTURE_SIZE, TEXTURE_SIZE))
    columns = np.fft.rfftfreq(TEXTURE_SIZE)
    frequency = np.hypot(np.fft.fftfreq(TEXTURE_SIZE)[:, None], columns)
    frequency[0, 0] = np.inf
    texture = np.fft.irfft2(np.fft.rfft2(noise) / frequency)
    return (texture / texture.std()).astype(np.float32)


@cache
def _leaf_mask(shape: str, radius: int) -> NDArray[np.bool_]:
    """Pixels that a leaf covers, bool (2 * radius + 1, 2 * radius + 1)."""
    v, u = np.mgrid[-radius : radius + 1, -radius : radius + 1] / (radius + 0.5)
    masks = {
        "disc": u**2 + v**2 < 1,
        "square": np.maximum(abs(u), abs(v)) < 0.88,
        "diamond": abs(u) + abs(v) < 1,
        "triangle": 2 * abs(u) < v + 1,
        "cross": np.minimum(abs(u), abs(v)) < 0.34,
    }
    return masks[shape]


def _rgb(hue: NDArray, saturation: NDArray, value: NDArray) -> FloatImage:
    """Convert HSV to RGB, all in [0, 1]; three arrays (n,) to one array (n, 3)."""
    k = (np.array([5, 3, 1]) + 6 * hue[:, None]) % 6
    tint = np.clip(np.minimum(k, 4 - k), 0, 1)
    return (value[:, None] * (1 - saturation[:, None] * tint)).astype(np.float32)


def _leaf_map(
    rng: np.random.Generator, height: int, width: int, shape: str
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Number of the leaf that each pixel shows, (height, width), and the leaves' centres, (2, n).

    Leaf 0 is at the front; the last one is the backdrop.
    """
    margin = 2 * SMALL_RADIUS
    height, width = height + 2 * margin, width + 2 * margin
    size = np.array([[height], [width]])
    max_radius = max(SMALL_RADIUS, min(height, width) // 3)

    # Inverse of the distribution function of the density 1/r^3 between the two radii.
    low, high = MIN_RADIUS**-2.0, max_radius**-2.0
    mean_area = np.pi * 2 * np.log(max_radius / MIN_RADIUS) / (low - high)
    num_leaves = int(COVERAGE * (height + 2 * max_radius) * (width + 2 * max_radius) / mean_area)
    radii = np.rint((low - rng.random(num_leaves) * (low - high)) ** -0.5).astype(np.int32)
    centres = rng.integers(-max_radius, size + max_radius, (2, num_leaves))
    touching = ((centres > -radii) & (centres < size + radii)).all(axis=0)
    radii, centres = radii[touching], centres[:, touching]
    rows, columns = centres
    labels = np.full((height, width), len(radii), np.int32)

    for leaf in np.flatnonzero(radii > SMALL_RADIUS)[::-1]:  # from the back to the front
        radius = radii[leaf]
        top, left = rows[leaf] - radius, columns[leaf] - radius
        mask = _leaf_mask(shape, int(radius))[max(0, -top) :, max(0, -left) :]
        window = labels[max(0, top) : top + 2 * radius + 1, max(0, left) : left + 2 * radius + 1]
        np.copyto(window, leaf, where=mask[: window.shape[0], : window.shape[1]])

    for radius in range(1, SMALL_RADIUS + 1):
        inside = ((centres >= radius) & (centres < size - radius)).all(axis=0)
        leaves = np.flatnonzero((radii == radius) & inside).astype(np.int32)
        v, u = np.nonzero(_leaf_mask(shape, radius))
        # A flat index is several times faster here than a pair of indices.
        pixels = (rows[leaves] * width + columns[leaves])[:, None]
        pixels = pixels + (v - radius) * width + (u - radius)
        np.minimum.at(labels.reshape(-1), pixels.ravel(), np.repeat(leaves, len(v)))

    backdrop = np.zeros((2, 1), np.int64)
    return labels[margin:-margin, margin:-margin], np.append(centres, backdrop, axis=1)


def dead_leaves(
    rng: np.random.Generator,
    height: int,
    width: int,
    hue: float | None = None,
    shape: str = "disc",
    angle_deg: float | None = None,
) -> ByteImage:
    """Photograph-like image, uint8 (height, width, 3): leaves with radii of density 1/r^3.

    Each leaf has a colour, a piece of 1/f noise and perhaps stripes. `hue` in [0, 1] is the hue of
    most leaves and `angle_deg` the direction of their stripes, both random if None. `shape` is one
    of SHAPES; others raise a ValueError.

    Source: A. Lee, D. Mumford, J. Huang, "Occlusion models for natural images", IJCV 2001.
    """
    # One more pixel on each side for the smoothing below.
    labels, centres = _leaf_map(rng, height + 2, width + 2, shape)
    n = len(centres.T)

    def normal(scale: float) -> FloatImage:
        return rng.standard_normal(n, dtype=np.float32) * np.float32(scale)

    def pick(values: NDArray) -> FloatImage:
        return np.asarray(values, np.float32)[labels]

    # Brightness and palette vary over the image like the texture: neighbours are similar.
    scale = TEXTURE_SIZE / max(height, width)
    shift = rng.integers(0, TEXTURE_SIZE, (2, 2, 1))
    places = (centres[:, None] * scale + shift).astype(int) % TEXTURE_SIZE
    light, kind = _texture()[tuple(places)]
    values = np.clip(0.45 + 0.12 * light + rng.uniform(-0.33, 0.33, n), 0.06, 0.95)
    palette = rng.random(5)
    hues = palette[np.floor(1.5 * kind + normal(0.8)).astype(int) % 5]
    saturation = rng.beta(2, 5, n)
    if hue is not None:
        member = rng.random(n) < 0.7
        hues = np.where(member, hue, hues)
        saturation = np.where(member, rng.beta(5, 4, n), saturation)
    colours = _rgb((hues + normal(0.015)) % 1, saturation, values)

    y, x = np.ogrid[: height + 2, : width + 2]
    shift = rng.integers(0, TEXTURE_SIZE, n)[labels]
    grain = _texture()[(y + shift) % TEXTURE_SIZE, (x + shift) % TEXTURE_SIZE]
    relief = 1 + pick(abs(normal(0.07))) * grain

    direction = np.deg2rad(rng.uniform(0, 180, n) if angle_deg is None else angle_deg + normal(3))
    frequency = 2 * np.pi / rng.uniform(5, 16, n)
    striped = rng.random(n) < (0.25 if angle_deg is None else 0.8)
    # The stripes run along `direction`; rows count downwards.
    phase = pick(frequency * np.cos(direction)) * y.astype(np.float32)
    phase += pick(frequency * np.sin(direction)) * x.astype(np.float32)
    relief += pick(striped * rng.uniform(0.05, 0.25, n)) * np.sin(phase)

    image = colours[labels] * relief[:, :, None]
    # Smoothing as by a lens, against jagged edges.
    image = 0.25 * (image[:-2] + image[2:]) + 0.5 * image[1:-1]
    image = 0.25 * (image[:, :-2] + image[:, 2:]) + 0.5 * image[:, 1:-1]
    return np.clip(255 * image + 0.5, 0, 255).astype(np.uint8)


def _to_linear(image: ByteImage) -> FloatImage:
    """Convert gamma-coded bytes to linear light in [0, 1]."""
    return ((np.arange(256) / 255) ** GAMMA).astype(np.float32)[image]


def _to_bytes(light: FloatImage) -> ByteImage:
    """Convert linear light to gamma-coded bytes; values outside [0, 1] are clipped."""
    return (255 * np.clip(light, 0, 1) ** np.float32(1 / GAMMA) + 0.5).astype(np.uint8)


def shake_kernel(rng: np.random.Generator, size: int) -> FloatImage:
    """Path of a shaken camera during one exposure, float32 (size, size), sum 1.

    A point moves with random inertia and a few jerks. Its mean position is the centre: blurring
    does not shift the image. `size` is odd and at least 3.

    Source: G. Boracchi, A. Foi, "Modeling the performance of image restoration from motion blur",
    IEEE TIP 2012.
    """
    num_steps = 1000
    angle_changes = rng.normal(0, np.exp(rng.uniform(np.log(0.01), np.log(0.1))), num_steps)
    angle_changes += (rng.random(num_steps) < 0.002) * rng.normal(0, 1.5, num_steps)  # jerks
    heading = rng.uniform(0, 2 * np.pi) + np.cumsum(angle_changes)
    speed = np.exp(np.cumsum(rng.normal(0, 0.03, num_steps)))
    path = np.cumsum(speed[:, None] * np.stack([np.sin(heading), np.cos(heading)], 1), axis=0)
    path -= path.mean(0)
    path *= rng.uniform(0.3, 1) * (size // 2) / abs(path).max()

    corner = np.clip(np.floor(path), -(size // 2), size // 2 - 1)
    kernel = np.zeros((size, size))
    for neighbour in np.ndindex(2, 2):  # bilinear weights of the four pixels around each step
        pixel = corner + np.array(neighbour)
        y, x = pixel.astype(int).T + size // 2
        np.add.at(kernel, (y, x), np.prod(1 - abs(pixel - path), axis=1))
    return (kernel / kernel.sum()).astype(np.float32)


def blur(image: ByteImage, kernel: FloatImage) -> ByteImage:
    """Convolve an image, uint8 (H, W, 3), with a kernel (k, k) in linear light, as a sensor does.

    Returns only pixels that need no padding: uint8 (H - k + 1, W - k + 1, 3). Raises ValueError if
    there are none.
    """
    height, width = image.shape[:2]
    lost = len(kernel) - 1
    spectrum = np.fft.rfft2(_to_linear(image).transpose(2, 0, 1))
    spectrum *= np.fft.rfft2(kernel, s=(height, width))
    light = np.fft.irfft2(spectrum, s=(height, width))[:, lost:, lost:]
    return _to_bytes(light.astype(np.float32).transpose(1, 2, 0))


def low_light(rng: np.random.Generator, image: ByteImage) -> ByteImage:
    """Image, uint8 (H, W, 3), with 1/20 to 1/5 of the light and the noise of a sensor.

    The noise is normally distributed with variance a * light + b (shot noise and read noise).

    Source: A. Foi et al., "Practical Poissonian-Gaussian noise modeling and fitting for
    single-image raw-data", IEEE TIP 2008.
    """
    light = _to_linear(image) * np.float32(np.exp(rng.uniform(np.log(1 / 20), np.log(1 / 5))))
    shot_gain, read_noise = rng.uniform(2e-4, 2e-3), rng.uniform(1e-3, 5e-3)
    noise = rng.standard_normal(image.shape, dtype=np.float32)
    return _to_bytes(light + noise * np.sqrt(shot_gain * light + read_noise**2))


def cell(rng: np.random.Generator, class_index: int) -> NDArray[np.uint8]:
    """Stained cell, (50, 50, 5).

    Each channel has a soft blob. Its brightness, radius and distance from the centre of the cell
    depend on the class and vary from cell to cell. The noise is that of `low_light`.
    """
    traits = stream(0, class_index, purpose=2)
    brightness = np.exp(traits.uniform(np.log(0.08), np.log(0.6), NUM_CHANNELS))
    radius = CELL_SIZE * traits.uniform(0.12, 0.3, NUM_CHANNELS)
    shift = CELL_SIZE * traits.uniform(-0.1, 0.1, (2, NUM_CHANNELS))

    brightness = brightness * np.exp(rng.normal(0, 0.25, NUM_CHANNELS))
    radius = radius * np.exp(rng.normal(0, 0.1))
    angle = rng.uniform(0, 2 * np.pi)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre = rotation @ shift + CELL_SIZE / 2 + rng.normal(0, 0.03 * CELL_SIZE, (2, 1))

    pixels = np.mgrid[:CELL_SIZE, :CELL_SIZE].transpose(1, 2, 0)[..., None] + 0.5 - centre
    along, across = rotation[0] @ pixels, rotation[1] @ pixels  # (50, 50, 5) each
    distance = np.hypot(along * rng.uniform(1, 1.25), across)
    top, left = rng.integers(0, TEXTURE_SIZE - CELL_SIZE, 2)
    grain = 1 + 0.15 * _texture()[top : top + CELL_SIZE, left : left + CELL_SIZE, None]
    light = brightness * grain / (1 + np.exp((distance - radius) / (0.03 * CELL_SIZE))) + 0.02
    light += rng.normal(0, 1, light.shape) * np.sqrt(1e-3 * light + 1e-5)
    return np.clip(255 * light + 0.5, 0, 255).astype(np.uint8)
