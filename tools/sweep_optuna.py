"""Values of a sweep's runs that Optuna chooses, for `python -m tools.sweep trials=NUMBER`."""

from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from conf.errors import UserError


class Study:
    """Optuna's study of a sweep, which is kept in a file of its folder."""

    def __init__(self, folder: Path, name: str, overrides: list[Override]) -> None:
        """Open the study of this name, or create it.

        Raises:
            UserError: no key has several values.
        """
        swept = [override for override in overrides if override.is_sweep_override()]
        self.distributions = {each.get_key_element(): distribution_of(each) for each in swept}
        if not swept:
            raise UserError(
                "trials= has nothing to choose; use 'optimizer.lr=interval(1e-4,1e-1)', for example"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        backend = optuna.storages.journal.JournalFileBackend(str(folder / "trials.log"))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )
        # Another seed after each start, or the values of the first one would be drawn again.
        seed = len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def chosen(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the numbers and values of the trials so far."""
        # A sweep that was killed may have left a trial without all of its values.
        trials = [t for t in self.study.trials if len(t.params) == len(self.distributions)]
        return [(trial.number, trial.params) for trial in trials]

    def choose(self) -> tuple[int, dict[str, Any]]:
        """Return the number of one more trial, and its values of the swept keys."""
        trial = self.study.ask(self.distributions)
        return trial.number, trial.params

    def tell(self, number: int, value: float | None) -> None:
        """Record the metric of a run that has ended; None: it ended without one."""
        state = optuna.trial.TrialState.FAIL if value is None else None
        self.study.tell(number, value, state=state, skip_if_finished=True)


def distribution_of(override: Override) -> optuna.distributions.BaseDistribution:
    """Return what Optuna draws the values of a swept key from."""
    sweep: Any = override.value()
    if not isinstance(sweep, IntervalSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    kind: Any = IntDistribution if isinstance(sweep.start, int) else FloatDistribution
    return kind(sweep.start, sweep.end, log="log" in sweep.tags)
