"""What every command uses; `runtime.training` is for training, `runtime.distributed` for ranks."""

from runtime.entry_point import entry_point, run_command, run_main
from runtime.setup import seed_everything, setup
