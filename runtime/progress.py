"""Progress of an epoch: a bar on a terminal, else a line every few seconds."""

import logging
import sys
import time

from tqdm import tqdm

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_DRAWINGS = 0.5


class Progress:
    """Progress bar of each epoch, or lines in its place."""

    def __init__(self, has_bar: bool) -> None:
        """Show a bar if `has_bar` is set and stderr is a terminal, else lines."""
        self.has_bar = has_bar and sys.stderr.isatty()
        self.bar: tqdm | None = None
        self.last_line = 0.0

    def open(self, name: str, num_done: int, num_steps: int) -> None:
        """Begin an epoch."""
        if self.has_bar:
            self.bar = tqdm(
                total=num_steps,
                initial=num_done,
                desc=name,
                unit="step",
                leave=False,
                mininterval=SECONDS_BETWEEN_DRAWINGS,
            )

    def step(self) -> None:
        """Count a step."""
        if self.bar is not None:
            self.bar.update()

    def show(self, step_number: int, text: str) -> None:
        """Show values of a step."""
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
        elif time.perf_counter() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.perf_counter()
            log.info("step %d: %s", step_number, text)

    def close(self) -> None:
        """End an epoch."""
        if self.bar is not None:
            self.bar.close()
