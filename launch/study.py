"""For sweep.py: values that Optuna chooses by the results of the runs before."""

import os
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from conf.errors import UserError

try:
    import optuna
except ModuleNotFoundError:
    optuna = None


class Study:
    """A study of Optuna, stored in the file `trials.log` of the sweep's folder."""

    def __init__(self, folder: Path, name: str, overrides: list[Override], jobs: int) -> None:
        """Open the study of this name, or create it.

        Args:
            folder: of the sweep.
            name: of the study; a folder holds any number of them.
            overrides: those with an interval or several values are chosen from, the others are fixed.
            jobs: number of trials that run at the same time.

        Raises:
            UserError: Optuna is not installed, or there is nothing to choose.
        """
        if optuna is None:
            raise UserError("trials= needs Optuna, which is not installed; pip install optuna")
        swept = [override for override in overrides if override.is_sweep_override()]
        if not swept:
            raise UserError(
                "trials= has nothing to choose; use 'optimizer.lr=interval(1e-4,1e-1)', for example"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = {override.get_key_element(): _distribution(override) for override in swept}
        backend = optuna.storages.journal.JournalFileBackend(os.fspath(folder / "trials.log"))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )
        # Another seed after each start, or the values of the first one would be drawn again.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=len(self.study.trials), constant_liar=jobs > 1
        )

    def values(self) -> list[dict[str, Any]]:
        """Values of all trials so far, by key."""
        return [trial.params for trial in self.study.trials]

    def choose(self) -> dict[str, Any]:
        """Values of one more trial, by key."""
        return self.study.ask(self.space).params

    def report(self, number: int, value: float | None) -> None:
        """Record the metric of a trial, larger is better; None: it ended without one."""
        state = optuna.trial.TrialState.FAIL if value is None else None
        self.study.tell(number, value, state=state, skip_if_finished=True)


def _distribution(override: Override) -> "optuna.distributions.BaseDistribution":
    """Distribution of tag(log,interval(1e-4,1e-1)), int(interval(1,8)) or a list of values."""
    sweep = override.value()
    if not isinstance(sweep, IntervalSweep):
        return optuna.distributions.CategoricalDistribution(list(override.sweep_string_iterator()))
    is_log = "log" in sweep.tags
    if isinstance(sweep.start, int):
        return optuna.distributions.IntDistribution(sweep.start, int(sweep.end or 0), log=is_log)
    return optuna.distributions.FloatDistribution(sweep.start, sweep.end, log=is_log)
