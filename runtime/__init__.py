"""What every entry point shares: device, process group, tasks, evaluation, checkpoints, run logger."""
