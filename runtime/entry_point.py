"""The decorator of `main` in a training script: a typed configuration, and an end for errors."""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from conf.check import check_batch_size, check_effects
from conf.cli import check_arguments, to_config, user_errors, with_home
from conf.schema import Config
from runtime import preemption
from runtime.process_group import end_rank, leave_process_group, run_stamp
from runtime.setup import num_processes


def entry_point(main: Callable[[Config], None]) -> Callable[..., None]:
    """Let Hydra call a script's `main` with the dataclass `Config`, checked, of the `conf/` beside
    the script.

    An error that the user can fix ends the process with exit code 2 and at most three lines, any
    other one with exit code 1 and its traceback.
    """

    @functools.wraps(main)
    def with_config(composed: DictConfig) -> None:
        if HydraConfig.initialized():
            composed.output_dir = HydraConfig.get().runtime.output_dir  # in a sweep, of this job
            preemption.start(Path(composed.output_dir))
        try:
            with user_errors(before_end):
                cfg = to_config(composed)
                check_effects(cfg)
                parts = 1 if cfg.accumulate_steps == "auto" else cfg.accumulate_steps
                counts = {"world_size": num_processes(), "accumulate_steps": parts}
                check_batch_size(cfg.global_batch_size, **counts)
                main(cfg)
        finally:
            leave_process_group()  # of this job of a sweep

    return hydra.main(version_base="1.3", config_path="conf", config_name="config")(with_config)


def run_main(main: Callable[[], None]) -> None:
    """Call a training script's `main`; errors of the command line end it as `entry_point`
    describes, and signals as `runtime.preemption` does."""
    preemption.listen()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
    run_command(main)


def run_command(main: Callable[[], None]) -> None:
    """Call the `main` of another command; errors end it as `entry_point` describes."""
    sys.argv[1:] = map(with_home, sys.argv[1:])
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    with user_errors(before_end):
        check_arguments(sys.argv[1:])
        main()
        leave_process_group()


def before_end(error: Exception, message: str | None) -> None:
    """Remove the run's folder if a user's error left it empty; end this process if it is a rank."""
    if message is not None and HydraConfig.initialized():
        with suppress(OSError):  # it is not empty
            Path(HydraConfig.get().runtime.output_dir).rmdir()
    if os.environ.get("RANK"):
        end_rank(error, message)
