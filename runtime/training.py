"""What a training script uses besides the functions that every command uses."""

from runtime.evaluate import evaluate
from runtime.optimizer import build_optimizer
from runtime.run import Run

__all__ = ["Run", "build_optimizer", "evaluate"]
