"""For sweep.py: values that Optuna chooses by the results of the runs before."""

import os
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from conf.mistakes import Mistake

try:
    import optuna
except ModuleNotFoundError:
    optuna = None


class Trials:
    """A study of Optuna, kept in the file `trials.log` of the sweep's folder, from which it goes on."""

    def __init__(self, folder: Path, overrides: list[Override], at_a_time: int) -> None:
        """Begin the study, or go on with it.

        Args:
            folder: of the sweep.
            overrides: those that have an interval or several values are chosen from, the others fixed.
            at_a_time: trials that run at the same time.

        Raises:
            Mistake: Optuna is not installed, or there is nothing to choose.
        """
        if optuna is None:
            raise Mistake("--trials needs Optuna, which is not installed; pip install optuna")
        swept = [override for override in overrides if override.is_sweep_override()]
        if not swept:
            raise Mistake(
                "--trials has nothing to choose; use 'optimizer.lr=interval(1e-4,1e-1)', for example"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = {override.get_key_element(): _distribution(override) for override in swept}
        backend = optuna.storages.journal.JournalFileBackend(os.fspath(folder / "trials.log"))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name="sweep",
            direction="maximize",
            load_if_exists=True,
        )
        # A start that goes on must not draw again what was drawn before.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=len(self.study.trials), constant_liar=at_a_time > 1
        )

    def made(self) -> list[dict[str, Any]]:
        """Of each trial so far the chosen values, by key."""
        return [trial.params for trial in self.study.trials]

    def choose(self) -> dict[str, Any]:
        """The values of one more trial."""
        return self.study.ask(self.space).params

    def tell(self, number: int, value: float | None) -> None:
        """How good the trial was; larger is better. None: it has ended without a value."""
        state = optuna.trial.TrialState.FAIL if value is None else None
        self.study.tell(number, value, state=state, skip_if_finished=True)


def _distribution(override: Override) -> "optuna.distributions.BaseDistribution":
    """What Optuna draws from: tag(log,interval(1e-4,1e-1)), int(interval(1,8)), or a list of values."""
    sweep = override.value()
    if not isinstance(sweep, IntervalSweep):
        return optuna.distributions.CategoricalDistribution(list(override.sweep_string_iterator()))
    is_log = "log" in sweep.tags
    if isinstance(sweep.start, int):
        return optuna.distributions.IntDistribution(sweep.start, int(sweep.end or 0), log=is_log)
    return optuna.distributions.FloatDistribution(sweep.start, sweep.end, log=is_log)
