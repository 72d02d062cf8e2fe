"""Write a run's model as one file for use without this repository.

    python export.py run=outputs/mine format=onnx out=mine.onnx
    python export.py run=outputs/mine format=torch out=mine.pt2    # a torch.export program
    python export.py run=outputs/mine format=safetensors out=mine.safetensors    # the weights alone

The files of `onnx` and `torch` contain the normalisation. They take uint8 images (N, H, W, C), any
N, of the size that the run validated with, and return (N, classes) probabilities, (N, numbers),
(N, H, W, C) images with pixels in [0, 1], or (N, H, W, classes) probabilities, as the task needs.
With data=own they take inputs as the model does, and return the task's `predictions()`.
The names of classes or numbers are in the metadata, with what examples/use_onnx.py needs to read a
photo as training does. Any key of the configuration can be changed, such as `data.root`;
with `data.crop=[512,512]` a restorer takes larger images.

The file is written only if its outputs are those of the model on samples of the validation split,
with a difference below 1e-4 (relative for values above 1).
"""

import json
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.export import Dim

from conf.cli import parse_options
from conf.errors import UserError, told, unknown_name
from conf.files import write_atomically
from loaders import build_loaders
from loaders.batch import map_leaves, num_samples, part, tensors_of
from loaders.transform import ImageTransform
from runtime import run_command
from runtime.trained import read_trained
from tasks import Task, build_task

TOLERANCE = 1e-4
MOST_SAMPLES = 64


class Exported(nn.Module):
    """The model with the task's predictions. With a transform, it takes images (N, H, W, C) as they
    are in files, which it normalises as the loader does."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        transform: ImageTransform | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        super().__init__()
        self.model, self.predictions = model, task.predictions
        self.takes_images, self.dtype = transform is not None, dtype
        if transform is not None:
            full_intensity = 65535 if dtype == torch.uint16 else 255
            self.register_buffer("scale", transform.scales[0] / full_intensity)
            self.register_buffer("shift", transform.shifts[0].clone())

    def forward(self, inputs: Any) -> Tensor:
        if self.takes_images:
            inputs = inputs.permute(0, 3, 1, 2).float() * self.scale + self.shift
        return self.predictions(self.model(inputs))

    def images_of(self, inputs: Tensor) -> Tensor:
        """Return the images of the nearest intensities."""
        limits = torch.iinfo(self.dtype)
        pixels = ((inputs - self.shift) / self.scale).round().clamp(limits.min, limits.max)
        return pixels.permute(0, 2, 3, 1).to(torch.int32).to(self.dtype).contiguous()


def main() -> None:
    options, overrides = parse_options(__doc__, sys.argv[1:], run=None, format=None, out=None)
    form, out = options["format"], Path(options["out"])
    if form not in FORMATS:
        raise unknown_name("format", form, FORMATS)
    if form == "torch" and out.suffix != ".pt2":
        raise UserError(f"out={out}: torch.export.load needs a name that ends in .pt2")
    # On the CPU and not compiled, as it is going to be exported.
    as_exported = ["model.compile=false", "model.channels_last=false", "loss.weights=null"]
    as_exported += ["loader.channels_last=false", "loader.num_workers=0"]
    trained = read_trained(Path(options["run"]), [*as_exported, *overrides])
    cfg = trained.cfg

    # data
    _, loader = build_loaders(cfg, torch.device("cpu"))
    trained.check_data(loader)
    given = part(next(iter(loader))[0], 0, MOST_SAMPLES)

    # model
    task = build_task(cfg, loader)
    model = trained.build_model(task)
    facts = trained.facts | {"classes": loader.info.classes}
    transform = loader.transform
    if isinstance(transform, ImageTransform):
        exported = Exported(model, task, transform, getattr(torch, loader.info.dtype))
        given = exported.images_of(given)
        # The crop of the photo that is resized by this becomes an image: examples/use_onnx.py.
        facts["resize"] = transform.output_size if cfg.data.crop is None else cfg.data.resize
        facts["crop"] = transform.output_size
        facts |= {"background": cfg.data.background, "exif": cfg.data.exif}
    else:
        exported = Exported(model, task)
    exported.eval()
    metadata = {name: json.dumps(value, ensure_ascii=False) for name, value in facts.items()}
    metadata["model"] = cfg.model.arch or cfg.model.name

    # the file, which gets its name if its predictions are the same, for all samples and for one
    with torch.no_grad():
        expected = exported(given)
    out.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(out) as unchecked:
        try:
            compute = FORMATS[form](exported, given, metadata, unchecked)
            with torch.no_grad():
                found = torch.cat([compute(given), compute(part(given, 0, 1))])
        except (ModuleNotFoundError, OSError):  # such as a full disk
            raise
        except Exception as error:  # PyTorch has no common type for what it cannot export
            raise UserError(
                f"format={form} does not take this model ({told(error)}); "
                "format=safetensors writes its weights"
            ) from error
        wanted = torch.cat([expected, expected[:1]])
        difference = float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())
        if not difference < TOLERANCE:
            raise UserError(
                f"the exported model differs from the run's by {difference:.1e}, which is not "
                f"below {TOLERANCE}; {out} is not written"
            )
    print(f"{out}: largest difference {difference:.1e} on {num_samples(given)} validation samples")


Compute = Callable[[Any], Tensor]
"""Predictions of a written file for images, or for inputs of own data."""


def write_onnx(exported: Exported, given: Any, metadata: dict[str, str], file: Path) -> Compute:
    import onnxruntime
    import onnxscript  # noqa: F401  # which torch.onnx needs

    program = torch.onnx.export(
        program_of(exported, given),
        input_names=["images"] if exported.takes_images else None,
        output_names=["outputs"],
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # as its type allows
    program.model.metadata_props.update(metadata)
    program.save(file, external_data=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def compute(given: Any) -> Tensor:
        arrays = [tensor.numpy() for tensor in tensors_of(given)]
        return torch.from_numpy(session.run(None, dict(zip(names, arrays, strict=True)))[0])

    return compute


def write_program(exported: Exported, given: Any, metadata: dict[str, str], file: Path) -> Compute:
    program, content = program_of(exported, given), BytesIO()
    # Not to the file: PyTorch ends the process if the disk is full.
    torch.export.save(program, content, extra_files={"metadata.json": json.dumps(metadata)})
    file.write_bytes(content.getbuffer())
    return torch.export.load(file).module()


def program_of(exported: Exported, given: Any) -> torch.export.ExportedProgram:
    """Export for any number of samples: of two, as their number would be fixed at one."""
    batch = Dim("batch")
    shapes = map_leaves(lambda x: {0: batch} if isinstance(x, Tensor) else None, given)
    return torch.export.export(exported, (part(given, 0, 2),), dynamic_shapes=(shapes,))


def write_weights(exported: Exported, given: Any, metadata: dict[str, str], file: Path) -> Compute:
    weights = {  # copies: the file holds no weight that two layers share
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in exported.model.state_dict().items()
    }
    file.write_bytes(save(weights, metadata))
    exported.model.load_state_dict(load_file(file))
    return exported


FORMATS = {"onnx": write_onnx, "torch": write_program, "safetensors": write_weights}


if __name__ == "__main__":
    run_command(main)
