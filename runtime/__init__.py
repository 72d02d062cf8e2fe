"""Parts that all entry points share; `runtime.distributed` is for those of several processes."""

from runtime.entry_point import entry_point, run_main
from runtime.evaluate import evaluate
from runtime.optimizer import build_optimizer
from runtime.run import Run
from runtime.setup import seed_everything, setup
