"""Values of a sweep's runs that Optuna chooses, for `sweep.py trials=NUMBER`."""

from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override

from conf.errors import UserError


class Study:
    """Optuna's study of a sweep, which is kept in a file."""

    def __init__(self, file: Path, name: str, overrides: list[Override], jobs: int) -> None:
        """Open the study of this name, or create it, for runs of which `jobs` train at a time.

        Raises:
            UserError: no key has several values.
        """
        self.swept = [override for override in overrides if override.is_sweep_override()]
        if not self.swept:
            raise UserError(
                "trials= has nothing to choose; use 'optimizer.lr=interval(1e-4,1e-1)', for example"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        backend = optuna.storages.journal.JournalFileBackend(str(file))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )
        # Another seed after each start, or the values of the first one would be drawn again.
        seed = len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=jobs > 1)

    def chosen(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the numbers and values of the trials so far."""
        # A sweep that was killed may have left a trial without all of its values.
        trials = [t for t in self.study.trials if len(t.params) == len(self.swept)]
        return [(trial.number, trial.params) for trial in trials]

    def choose(self) -> tuple[int, dict[str, Any]]:
        """Return the number of one more trial, and its values of the swept keys."""
        trial = self.study.ask()
        for override in self.swept:
            key, sweep = override.get_key_element(), override.value()
            if isinstance(sweep, IntervalSweep):
                is_int = isinstance(sweep.start, int)
                suggest: Any = trial.suggest_int if is_int else trial.suggest_float
                suggest(key, sweep.start, sweep.end, log="log" in sweep.tags)
            else:
                trial.suggest_categorical(key, list(override.sweep_string_iterator()))
        return trial.number, trial.params

    def tell(self, number: int, value: float | None) -> None:
        """Record the metric of a run that has ended; None: it ended without one."""
        state = optuna.trial.TrialState.FAIL if value is None else None
        self.study.tell(number, value, state=state, skip_if_finished=True)
