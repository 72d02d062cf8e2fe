"""DALI's pipelines: the one of `loader=dali`, and what it shares with `loader=dali_reader`."""

from typing import Any

import torch

from conf.errors import UserError
from conf.loader.dali import DaliConfig
from conf.schema import Config
from loaders.backends.common import ImageLoader
from loaders.common import cpus_per_rank

try:
    from nvidia.dali import fn, pipeline_def, types
except ModuleNotFoundError as error:
    raise UserError(
        "loader=dali needs NVIDIA DALI, which exists for Linux only: pip install "
        "nvidia-dali-cuda120 (or nvidia-dali-cuda130), or use loader=pytorch"
    ) from error


@pipeline_def
def planned_images(  # type: ignore[no-untyped-def]
    reads, cut, decodes_regions, resize, flip, grey, decoding
):
    """Decode files, cut rectangles, resize them with antialiasing and flip them.

    Inputs by name: `files` (paths if `reads`, else contents); if `cut`, `start` and `shape` of the
    rectangles; if `resize`, `size`; if `flip`, `mirror`. `decodes_regions` gives the same pixels
    without decoding those outside of the rectangles; nvJPEG before 13.2 leaves it to the CPU.
    """
    encoded = fn.external_source(name="files", dtype=types.UINT8)
    if reads:
        encoded = fn.io.file.read(encoded, dont_use_mmap=True)
    if cut:
        start = fn.external_source(name="start", dtype=types.INT32)
        shape = fn.external_source(name="shape", dtype=types.INT32)
    if cut and decodes_regions:
        images = fn.decoders.image_slice(encoded, start, shape, axis_names="HW", **decoding)
    else:
        images = fn.decoders.image(encoded, **decoding)
    if cut and not decodes_regions:
        images = fn.slice(images, start, shape, axis_names="HW")
    if grey:  # the decoders' own conversion differs from Pillow's by up to 80 of 255
        images = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
    mirror = fn.external_source(name="mirror", dtype=types.INT32) if flip else 0
    if resize:
        size = fn.external_source(name="size", dtype=types.FLOAT)
        return fn.resize_crop_mirror(
            images,
            size=size,
            crop=size,
            mirror=mirror,
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
    return fn.flip(images, horizontal=mirror & 1, vertical=mirror // 2) if flip else images


def options_of(cfg: Config) -> DaliConfig:
    """Return the keys of the loader, which is `dali` or `dali_reader`."""
    assert isinstance(cfg.loader, DaliConfig)
    return cfg.loader


def pipeline_options(loader: ImageLoader, batch_size: int) -> dict[str, Any]:
    """Return the arguments of all pipelines of a loader."""
    options, is_gpu = options_of(loader.cfg), loader.device.type == "cuda"
    # On a GPU, the threads that launch kernels, the training's and DALI's, have CPUs of their own.
    num_threads = max(1, cpus_per_rank() - 2) if is_gpu else cpus_per_rank()
    return {
        "batch_size": batch_size,
        "num_threads": options.num_threads or num_threads,
        "device_id": loader.device.index if is_gpu else None,
        "prefetch_queue_depth": options.prefetch_queue_depth,
    }


def decoding(cfg: Config, device: torch.device) -> dict[str, Any]:
    """Return arguments of DALI's decoders, with which a GPU decodes to a CPU's pixels, rounded
    differently by up to 5 of 255."""
    turning = {"adjust_orientation": cfg.data.exif is not False}
    if device.type != "cuda":
        return {"device": "cpu", **turning}
    return {
        "device": "mixed",
        **turning,
        # The hardware decoder rounds differently, and the images it decodes vary from run to run.
        "hw_decoder_load": 0.0 if cfg.deterministic else options_of(cfg).hw_decoder_load,
        # The CPU's decoders interpolate subsampled colours, the GPU's only if asked to.
        "jpeg_fancy_upsampling": True,
    }


def output_stream(device: torch.device) -> torch.cuda.Stream | None:
    """On CUDA, the stream that waits for a pipeline's outputs instead of the host."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
