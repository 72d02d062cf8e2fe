"""DALI's own file reader, shuffling and random crops (`loader=dali_reader`).

This is DALI as its documentation shows it, without the plan: the order of the samples depends on
the number of ranks, only nearby files are shuffled, and a run resumes only at the end of an epoch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types

from conf.errors import UserError
from conf.schema import Config
from loaders.backends.common import Batch, ImageLoader, RawBatch
from loaders.backends.dali import DALILoader
from loaders.backends.pipelines import decoding, output_stream, pipeline_options
from loaders.index import BadFileError
from loaders.plan import PlanSampler, neutral_rows

SHUFFLE_BUFFER = 4096
ON_RECTANGLE = ("random_crop", "hflip", "vflip")
"""Keys of `data` that this reader supports."""


@pipeline_def
def native_images(  # type: ignore[no-untyped-def]
    sides, decoding, resize, crop, data, seed, shard_id, num_shards
):
    """Read, decode and crop (samples, images[, targets]); sides of a pair share random values."""
    # Without explicit seeds, DALI's random operators use the time.
    seeds = np.random.SeedSequence([seed, shard_id]).generate_state(4).tolist()
    x, y = (
        fn.random.uniform(range=(0.0, 1.0), seed=own) if data.random_crop else 0.5
        for own in seeds[:2]
    )
    hflip = fn.random.coin_flip(probability=data.hflip, seed=seeds[2])
    vflip = fn.random.coin_flip(probability=data.vflip, seed=seeds[3])
    outputs: list[Any] = []
    for files in sides:
        content, sample = fn.readers.file(
            files=files,
            labels=list(range(len(files))),
            # Without the same explicit seed, the readers of a pair shuffle differently.
            seed=seed,
            random_shuffle=True,
            initial_fill=SHUFFLE_BUFFER,
            shard_id=shard_id,
            num_shards=num_shards,
            # All shards get the same number of batches; the loader skips the padded ones.
            pad_last_batch=True,
            name=f"reader{len(outputs)}",
        )
        outputs = outputs or [sample]
        images = fn.resize_crop_mirror(
            fn.decoders.image(content, output_type=types.RGB, **decoding),
            **resize,
            crop=crop,
            crop_pos_x=x,
            crop_pos_y=y,
            mirror=hflip + 2 * vflip,
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
        outputs.append(images)
    return tuple(outputs)


def dali_reader_loader(sampler: PlanSampler, cfg: Config, device: torch.device) -> ImageLoader:
    """Make the loader of a split; evaluation uses the plan, as `loader=dali`."""
    return (DALIReader if sampler.train else DALILoader)(sampler, cfg, device)


class DALIReader(ImageLoader):
    """Training batches in DALI's own random order.

    Raises:
        UserError: the configuration needs the plan.
    """

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        data, index = cfg.data, self.index
        augmentations = [key for a in sampler.augmentations for key in a.active_keys(data)]
        unsupported = {
            **{f"data.{key}": key not in ON_RECTANGLE for key in augmentations},
            "target images of another size": max(side.size_factor for side in index.sides) > 1,
            "masks": index.target.kind == "masks",
            "TIFFs with any number of channels": index.keep_channels,
            "data sets without files": not (index.files and index.by_path),
            "data.on_error=skip": data.on_error == "skip",
            "files that DALI decodes to other pixels": not all(
                (headers["dali"] == 2).all() for headers in index.headers
            ),
        }
        if found := [name for name, is_found in unsupported.items() if is_found]:
            raise UserError(
                f"loader=dali_reader does not support {', '.join(found)}; use loader=dali"
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
            *(list(map(list, index.files)), decoding(cfg, device), resize, self.output_size, data),
            *(cfg.seed, sampler.rank, sampler.world_size),
            **pipeline_options(self, self.batch_size),
        )
        self.pipeline.build()
        self.batches_left = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if 0 < self.batches_done < self.max_batches:
            raise UserError(
                "loader=dali_reader cannot resume in the middle of an epoch; use loader=dali, or a "
                "checkpoint from the end of an epoch"
            )

    def finished_batches(self) -> Iterator[Batch]:
        return self.transform.finish(self._read_batches())

    def _read_batches(self) -> Iterator[RawBatch]:
        # Skip the rest of the previous epoch: padded batches, and those after it was left early.
        for _ in range(self.batches_left):
            self.pipeline.run()
        padded = self.pipeline.reader_meta("reader0")["epoch_size_padded"]
        self.batches_left = -(-padded // (self.sampler.world_size * self.batch_size))
        for _ in range(len(self.sampler)):
            samples, *images = self.pipeline.run(output_stream(self.device))
            self.batches_left -= 1
            rows = neutral_rows(np.asarray(samples.as_cpu().as_tensor()).ravel())
            for reason in self.index.changed(rows["sample"]).values():
                raise BadFileError(reason)
            yield rows, tuple(torch.from_dlpack(side.as_tensor()) for side in images)
