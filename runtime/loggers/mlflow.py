"""Logger for MLflow, which reads `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_ID` and others."""

import os
import time
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from runtime.loggers import Logger, Settings, Values, kept_id, numbers_of


class MLflowLogger(Logger):
    """Numbers and images by step. A resumed run continues the run whose id is in `mlflow_id`."""

    def __init__(self, run_dir: Path, settings: Settings, step: int) -> None:
        self.client = MlflowClient()

        def create() -> str:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
            run = self.client.create_run(experiment, run_name=run_dir.name)
            params = [Param(name, str(value)) for name, value in settings.items()]
            self.client.log_batch(run.info.run_id, params=params)
            return run.info.run_id

        self.run_id = kept_id(run_dir / "mlflow_id", create)
        self.client.update_run(self.run_id, "RUNNING")

    def log(self, values: Values, step: int) -> None:
        now = int(1000 * time.time())
        numbers = numbers_of(values)
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        self.client.log_batch(self.run_id, metrics=metrics)
        for name in values.keys() - numbers.keys():
            for number, image in enumerate(values[name]):
                pixels = image.permute(1, 2, 0).cpu().numpy()
                self.client.log_image(self.run_id, pixels, key=f"{name}/{number}", step=step)

    def close(self, is_finished: bool) -> None:
        self.client.set_terminated(self.run_id, "FINISHED" if is_finished else "KILLED")
