"""Logger that writes numbers to `metrics.csv` in the run's folder."""

import csv
from pathlib import Path

from conf.files import write_atomically
from runtime.loggers import Logger, Settings, Values, numbers_of


class CSVLogger(Logger):
    """One row per number: step, name, value. Images are left out."""

    def __init__(self, run_dir: Path, settings: Settings, step: int) -> None:
        path = run_dir / "metrics.csv"
        rows = []
        if path.exists():
            with path.open(newline="") as file:
                # The last row of a process that was killed may be cut.
                lines = [line for line in file if line.endswith("\n")]
            full = [row for row in csv.reader(lines) if len(row) == 3 and row[0].isdigit()]
            rows = [row for row in full if int(row[0]) <= step]
        with write_atomically(path) as temporary, temporary.open("w", newline="") as file:
            csv.writer(file).writerows([["step", "name", "value"], *rows])
        self.file = path.open("a", newline="", buffering=1)  # a row is written at its end
        self.writer = csv.writer(self.file)

    def log(self, values: Values, step: int) -> None:
        self.writer.writerows([step, *item] for item in numbers_of(values).items())

    def close(self, is_finished: bool) -> None:
        self.file.close()
