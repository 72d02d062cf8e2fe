"""DALI's pipeline, and its options."""

from typing import Any

import torch

from conf.errors import UserError
from conf.loader.dali import DaliConfig
from conf.schema import Config
from loaders.limits import cpus_per_rank

try:
    from nvidia.dali import fn, pipeline_def, types
except ModuleNotFoundError as error:
    raise UserError(
        "loader=dali needs NVIDIA DALI, which exists for Linux only: pip install "
        "nvidia-dali-cuda120 (or nvidia-dali-cuda130), or use loader=pytorch"
    ) from error


@pipeline_def
def planned_images(  # type: ignore[no-untyped-def]
    form, cut, decodes_regions, resize, flip, grey, decoding
):
    """Decode files, cut rectangles, resize them with antialiasing and flip them.

    Inputs by name: `images` (paths, contents or decoded pixels, as `form` says); if `cut`, `start`
    and `shape` of the rectangles; if `resize`, `size`; if `flip`, `mirror`. `decodes_regions` gives
    the same pixels without decoding those outside of the rectangles; nvJPEG before 13.2 leaves it
    to the CPU.
    """
    layout, dtype = ("HWC", decoding["dtype"]) if form == "pixels" else (None, types.UINT8)
    images = fn.external_source(name="images", dtype=dtype, layout=layout)
    if form == "paths":
        images = fn.io.file.read(images, dont_use_mmap=True)
    if cut:
        start = fn.external_source(name="start", dtype=types.INT32)
        shape = fn.external_source(name="shape", dtype=types.INT32)
    if form == "pixels":
        images = images.gpu() if decoding["device"] == "mixed" else images
    elif cut and decodes_regions:
        images = fn.decoders.image_slice(images, start, shape, axis_names="HW", **decoding)
    else:
        images = fn.decoders.image(images, **decoding)
    if cut and (form == "pixels" or not decodes_regions):
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


def pipeline_options(options: DaliConfig, device: torch.device, batch_size: int) -> dict[str, Any]:
    """Return the arguments of a pipeline."""
    is_gpu = device.type == "cuda"
    # On a GPU, the threads that launch kernels, the training's and DALI's, have CPUs of their own.
    num_threads = max(1, cpus_per_rank() - 2) if is_gpu else cpus_per_rank()
    return {
        "batch_size": batch_size,
        "num_threads": options.num_threads or num_threads,
        "device_id": device.index if is_gpu else None,
        "prefetch_queue_depth": 1,  # batches are scheduled by the loader
    }


def decoding(cfg: Config, options: DaliConfig, device: torch.device) -> dict[str, Any]:
    """Return arguments of DALI's decoders, with which a GPU decodes to a CPU's pixels, rounded
    differently by up to 5 of 255."""
    turning = {"adjust_orientation": cfg.data.exif is not False}
    if device.type != "cuda":
        return {"device": "cpu", **turning}
    return {
        "device": "mixed",
        **turning,
        # The hardware decoder rounds differently, and the images it decodes vary from run to run.
        "hw_decoder_load": 0.0 if cfg.deterministic else options.hw_decoder_load,
        # The CPU's decoders interpolate subsampled colours, the GPU's only if asked to.
        "jpeg_fancy_upsampling": True,
    }


def output_stream(device: torch.device) -> torch.cuda.Stream | None:
    """On CUDA, the stream that waits for a pipeline's outputs instead of the host."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
