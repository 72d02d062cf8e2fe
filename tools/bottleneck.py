"""Where the time and the memory of a training step go, on one device.

    python -m tools.bottleneck
    python -m tools.bottleneck seconds=10 amp=bfloat16 experiment=caltech256 data.root=PHOTOS

Measures for `seconds` (3) each the loader alone with `workers=0,1,2` (default: up to the CPUs), the
model alone on one batch that stays on the device, and both; counts the operations of a step; and
lists what fills the memory. `amp=` is bfloat16 or float16; all else are overrides, as of train.py.
"""

import gc
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from conf.cli import load_config, parse_options, user_errors
from conf.errors import UserError
from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import build_optimizer, seed_everything, setup
from tasks import build_task

PATTERNS = {"seconds": r"\d+(\.\d+)?", "amp": "(bfloat16|float16)?", "workers": r"\d+(,\d+)*"}
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "T4": 65.0,
    "RTX 4090": 165.2,
}
"""TFLOP/s of tensor cores in 16 bits, added up in float32, by words of a GPU's name. From NVIDIA's
data sheets and architecture white papers, without sparsity."""


class Step:
    """A training step: forward, backward, clipping and update."""

    def __init__(self, cfg: Config, loader: Any, device: torch.device, amp: str) -> None:
        self.task = build_task(cfg, loader)
        model = build_model(cfg.model, loader.in_channels, self.task.num_outputs)
        self.model = model.to(device).train()
        self.optimizer, _ = build_optimizer(cfg, model, len(loader))
        self.max_norm = cfg.clip_grad_norm
        dtype = getattr(torch, amp or "bfloat16")
        self.autocast = torch.autocast(device.type, dtype, enabled=amp != "")

    def forward_backward(self, inputs: Any, targets: Any) -> None:
        with self.autocast:
            outputs = self.model(inputs)
        self.task.loss(outputs, targets).backward()

    def __call__(self, inputs: Any, targets: Any) -> None:
        self.forward_backward(inputs, targets)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def endless(loader: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of a loader, epoch after epoch."""
    for epoch in count():
        loader.set_epoch(epoch)
        yield from loader


def samples_per_s(
    batches: Iterator[tuple[Any, Any]], step: Step | None, cfg: Config, seconds: float
) -> float:
    """Return how many samples are loaded per second, and trained on if there is a step."""
    number, start = -3, 0.0  # below 0: warm-up
    while number <= 0 or time.perf_counter() < start + seconds:
        batch = next(batches)
        if step is not None:
            step(*batch)
        number += 1
        if number == 0:
            start = synchronized_time()
    return number * cfg.global_batch_size / (synchronized_time() - start)


def synchronized_time() -> float:
    """Return the time in seconds, when the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def count_flops(step: Step, batch: tuple[Any, Any]) -> int:
    """Count the operations of forward and backward on a batch."""
    custom = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=custom) as counter:
        step.forward_backward(*batch)
    step.optimizer.zero_grad(set_to_none=True)
    return counter.get_total_flops()


def _convolution_backward(outputs: Any, inputs: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Count each gradient like the forward, by shapes; torch's own formula ignores groups."""
    is_transposed, is_needed = rest[4], rest[7]
    return 2 * prod(inputs if is_transposed else outputs) * prod(weight[1:]) * sum(is_needed[:2])


def memory_by_use(step: Step, batch: tuple[Any, Any]) -> dict[str, int]:
    """Return the bytes of what a step holds after its forward and backward."""
    parameters = list(step.model.parameters())
    own = {x.untyped_storage().data_ptr() for x in parameters}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        step.forward_backward(*batch)
    step.optimizer.step()
    states = [x for state in step.optimizer.state.values() for x in state.values()]
    return {
        "parameters": sum(x.nbytes for x in parameters),
        "gradients": sum(x.grad.nbytes for x in parameters if x.grad is not None),
        "optimizer state": sum(x.nbytes for x in states if isinstance(x, Tensor)),
        "activations": sum(saved.values()),
    }


def peak_of(name: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s; None if it is not known, as of a slice (MIG)."""
    words = set(re.split(r"[ -]", name))
    fitting = (peak for key, peak in PEAKS.items() if words >= set(key.split()))
    return None if "MIG" in words else next(fitting, None)


def show(what: str, value: float, unit: str) -> None:
    print(f"{what:28}{value:>14,.2f} {unit}", flush=True)


def main(arguments: Sequence[str]) -> None:
    numbers = [0, *(2**n for n in range(len(os.sched_getaffinity(0)).bit_length()))]
    defaults = {"seconds": "3", "amp": "", "workers": ",".join(map(str, numbers))}
    options, overrides = parse_options(__doc__, arguments, **defaults)
    for key, pattern in PATTERNS.items():
        if not re.fullmatch(pattern, options[key]):
            raise UserError(f"{key}={options[key]} is not valid; --help shows what is")
    cfg, seconds = load_config(overrides), float(options["seconds"])
    device = setup(cfg)
    seed_everything(cfg.seed)

    settings = [f"loader.num_workers={number}" for number in options["workers"].split(",")]
    if cfg.loader.name not in ("pytorch", "packed"):
        settings = [f"loader={cfg.loader.name}"]
    speeds = {}
    for setting in settings:
        loader, _ = build_loaders(load_config([*overrides, setting]), device)
        speeds[setting] = samples_per_s(endless(loader), None, cfg, seconds)
        show(f"loader alone, {setting.removeprefix('loader.')}", speeds[setting], "samples/s")
        del loader  # ends its workers
        gc.collect()
    best = max(speeds, key=lambda setting: speeds[setting])

    loader, _ = build_loaders(load_config([*overrides, best]), device)
    step = Step(cfg, loader, device, options["amp"])
    batches = endless(loader)
    alone = samples_per_s(repeat(next(batches)), step, cfg, seconds)
    show("model alone", alone, "samples/s")
    both = samples_per_s(batches, step, cfg, seconds)
    show("both", both, "samples/s")
    waiting = max(0.0, 1 - both / alone)
    bound = "input-bound" if waiting > 0.1 else "compute-bound"
    print(f"{bound}: with {best}, loading adds {waiting:.0%} of a step")
    flops = count_flops(step, next(batches)) / cfg.global_batch_size
    show("operations of a sample", flops / 1e6, "MFLOP")
    show("operations", flops * both / 1e9, "GFLOP/s")
    if device.type == "cuda" and (peak := peak_of(torch.cuda.get_device_name(device))):
        show(f"MFU, of {peak:g} TFLOP/s", 100 * flops * both / 1e12 / peak, "%")
    for what, num_bytes in memory_by_use(step, next(batches)).items():
        show(what, num_bytes / 2**20, "MiB")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
