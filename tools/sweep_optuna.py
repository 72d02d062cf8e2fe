"""Values of a sweep's runs that Optuna chooses, for `python -m tools.sweep trials=NUMBER`."""

from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from conf.errors import UserError


class Study:
    """Optuna's study of a sweep, which is kept in a file of its folder."""

    def __init__(self, folder: Path, name: str, swept: dict[str, Override]) -> None:
        """Open the study of this name, or create it."""
        if not swept:
            raise UserError(
                "trials= has nothing to choose; use 'optimizer.lr=interval(1e-4,1e-1)', for example"
            )
        self.distributions = {key: distribution_of(each) for key, each in swept.items()}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(folder / "trials.log")))
        self.study = optuna.create_study(
            storage=storage, study_name=name, direction="maximize", load_if_exists=True
        )
        # Another seed after each start, or the values of the first one would be drawn again.
        seed = len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def chosen(self) -> dict[int, dict[str, Any]]:
        """Return the values of the trials so far by their numbers."""
        # A sweep that was killed may have left a trial without all of its values.
        trials = [t for t in self.study.trials if len(t.params) == len(self.distributions)]
        return {trial.number: trial.params for trial in trials}

    def choose(self) -> tuple[int, dict[str, Any]]:
        """Return the number of one more trial, and its values of the swept keys."""
        trial = self.study.ask(self.distributions)
        return trial.number, trial.params

    def tell(self, number: int, value: float) -> None:
        """Record the metric of a run that has ended; NaN, which fails it: it ended without one."""
        self.study.tell(number, value, skip_if_finished=True)


def distribution_of(override: Override) -> optuna.distributions.BaseDistribution:
    """Return what Optuna draws the values of a swept key from."""
    sweep: Any = override.value()
    if not isinstance(sweep, IntervalSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    kind: Any = IntDistribution if isinstance(sweep.start, int) else FloatDistribution
    return kind(sweep.start, sweep.end, log="log" in sweep.tags)
