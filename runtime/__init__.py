"""What scripts use; `runtime.distributed` has what several processes need besides."""

from runtime.entry_point import entry_point, run_command, run_main
from runtime.evaluate import evaluate
from runtime.optimizer import build_optimizer
from runtime.run import Run
from runtime.setup import seed_everything, setup
