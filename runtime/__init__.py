"""What every entry point shares; `runtime.distributed` is for those of several processes."""

from runtime.evaluate import evaluate
from runtime.optimizer import build_optimizer
from runtime.run import Run
from runtime.setup import resolve_device, seed_everything, set_numerics

__all__ = [
    "Run",
    "build_optimizer",
    "evaluate",
    "resolve_device",
    "seed_everything",
    "set_numerics",
]
