"""DALI's own file reader, shuffling and random crops (`loader=dali loader.reader=native`).

For those who want DALI as its documentation shows it. What the plan gives is lost: the order is
another one on another number of ranks, only nearby files are shuffled, and a run cannot go on in the
middle of an epoch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types

from conf.schema import Config
from loaders import decoder_lines
from loaders.augment import AUGMENTATIONS
from loaders.dali import (
    decoding,
    finished_beside_pipeline,
    log_new_lines,
    pipeline_options,
    run_on_stream,
)
from loaders.index import BadFileError
from loaders.loader import Loader
from loaders.overlap import Finished
from loaders.pixels import RawBatch
from loaders.plan import neutral_rows
from loaders.sampler import PlanSampler

SHUFFLE_BUFFER = 4096


@pipeline_def
def native_images(  # type: ignore[no-untyped-def]
    sides, output_type, decoding, resize, crop, random_crop, flips, seed, shards
):
    """(samples, images[, targets]); the sides of a pair share every random value."""
    shard_id, num_shards = shards
    # Without seeds of their own, DALI's random operators take the time of day.
    seeds = np.random.SeedSequence([seed, shard_id]).generate_state(4).tolist()
    x, y = (
        fn.random.uniform(range=(0.0, 1.0), seed=own) if random_crop else 0.5 for own in seeds[:2]
    )
    hflip, vflip = (
        fn.random.coin_flip(probability=p, seed=own)
        for p, own in zip(flips, seeds[2:], strict=True)
    )
    outputs: list[Any] = []
    for files in sides:
        content, sample = fn.readers.file(
            files=files,
            labels=list(range(len(files))),
            # Readers without the same explicit seed shuffle differently, and pairs fall apart.
            seed=seed,
            random_shuffle=True,
            initial_fill=SHUFFLE_BUFFER,
            shard_id=shard_id,
            num_shards=num_shards,
            # Equal numbers of batches in all shards; the loader leaves out the padded ones.
            pad_last_batch=True,
            name=f"reader{len(outputs)}",
        )
        outputs = outputs or [sample]
        images = fn.decoders.image(content, output_type=output_type, **decoding)
        outputs.append(
            fn.resize_crop_mirror(
                images,
                **resize,
                crop=crop,
                crop_pos_x=x,
                crop_pos_y=y,
                mirror=hflip + 2 * vflip,
                interp_type=types.INTERP_LINEAR,
                antialias=True,
            )
        )
    return tuple(outputs)


class NativeDALILoader(Loader):
    """Training batches in DALI's own random order; evaluation has no random order and uses the plan.

    Raises:
        ValueError: something is asked for that only the plan has.
    """

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        data = cfg.data
        unsupported = {
            **{f"data.{key}": True for a in AUGMENTATIONS for key in a.active_keys(data)},
            **{f"data.{key}": False for key in ("random_crop", "hflip", "vflip")},
            "target images of another size": max(self.index.size_factors) > 1,
            "masks": self.target.kind == "masks",
            "TIFFs with any number of channels": self.index.as_stored,
            "data sets without files": not self.index.files or self.index.shards is not None,
            "data.on_error=skip": data.on_error == "skip",
        }
        asked_for = [name for name, is_asked_for in unsupported.items() if is_asked_for]
        if asked_for:
            raise ValueError(
                f"loader.reader=native does not have {', '.join(asked_for)}; use loader.reader=plan"
            )
        self.read_size = self.output_size
        resize: dict[str, Any]
        if data.resize is None:
            resize = {"resize_x": 0.0, "resize_y": 0.0}  # 0 keeps the size
        elif isinstance(data.resize, int):
            resize = {"resize_shorter": float(data.resize)}
        else:
            resize = {"size": [float(length) for length in data.resize]}
        self.pipeline = native_images(
            list(map(list, self.index.files)),
            types.GRAY if self.in_channels == 1 else types.RGB,
            decoding(cfg, device),
            resize,
            self.output_size,
            data.random_crop,
            (data.hflip, data.vflip),
            cfg.seed,
            (sampler.rank, sampler.world_size),
            **pipeline_options(self, self.batch_size),
        )
        self.lines = decoder_lines.listen()
        self.pipeline.build()
        self.batches_left = 0

    def finished_batches(self) -> Iterator[Finished]:
        return finished_beside_pipeline(self.raw_batches(), self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.position and not self.epoch_is_finished:
            raise ValueError(
                "loader.reader=native cannot go on in the middle of an epoch; use loader.reader=plan, "
                "or a checkpoint from the end of an epoch"
            )

    def raw_batches(self) -> Iterator[RawBatch]:
        """The rows of each batch and their images, still to be finished."""
        # The rest of the epoch before: its padded batches, and all that was left out by stopping early.
        for _ in range(self.batches_left):
            self.pipeline.run()
        padded = self.pipeline.reader_meta("reader0")["epoch_size_padded"]
        self.batches_left = -(-padded // (self.sampler.world_size * self.batch_size))
        for _ in range(len(self.sampler)):
            samples, *images = run_on_stream(self.pipeline, self.device)
            self.batches_left -= 1
            rows = neutral_rows(np.asarray(samples.as_cpu().as_tensor()).ravel())
            for reason in self.index.changed(rows["sample"]).values():
                raise BadFileError(reason)
            yield rows, tuple(torch.from_dlpack(side.as_tensor()) for side in images)
            log_new_lines(self.lines, self.index, [rows])
