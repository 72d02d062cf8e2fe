"""A row of a CSV file, and sizes as small as they get."""

from benchmarks.records import Measurement, summarise
from benchmarks.run import Sizes

TINY = Sizes(
    data={"caltech256": 24, "cells": 80, "deblur": 6, "lowlight": 20},
    warmup_s=0.01,
    window_s=0.01,
    repeats=1,
    samples=(10**4, 10**9),
    max_steps=2,
)


def row(subject: str = "loader=pytorch", samples: str = "90;100;110", **changes) -> Measurement:
    values = [float(sample) for sample in samples.split(";") if sample]
    summary = summarise(values)
    columns = {
        **{"benchmark": "loaders", "case": "caltech256", "subject": subject, "quantity": "speed"},
        **{"num_workers": 0, "num_threads": 2, "num_devices": 1, "settings": "step=resize+crop"},
        **{"unit": "images/s", "median": summary.median, "low": summary.low, "high": summary.high},
        **{"repeats": len(values), "samples": samples, "epoch_size": 30_607, "note": ""},
        **{"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "gpu": "", "versions": "python 3.11"},
        **{"commit": "0123abcd", "date": "2025-01-31T12:00:00+00:00"},
    }
    return Measurement(**{**columns, **changes})
