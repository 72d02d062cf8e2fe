"""How fast each loader delivers each experiment's data, beside the write-ups' own ways of loading.

On all CPU cores of a device: reading only, decoding, and with resize and crop.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from benchmarks.cases import WHOLE_IMAGES, Case
from benchmarks.records import Subject
from benchmarks.run import UNAVAILABLE, Builder, Run
from benchmarks.ways import EXTERNAL_SOURCE, OURS, PIL, PIL_PAIRS, TIFFFILE, Way, limit

READ, DECODE, ALL = "step=read", "step=decode", "step=resize+crop"
WRITE_UPS = {
    "caltech256": [PIL],
    "cells": [TIFFFILE],
    "deblur": [PIL_PAIRS, EXTERNAL_SOURCE],
    "lowlight": [PIL_PAIRS, EXTERNAL_SOURCE],
}


def main(run: Run) -> None:
    for case in run.chosen("mnist", *WRITE_UPS):
        with suppress(*UNAVAILABLE):  # which each subject reports
            run.case_overrides(case.name)  # generates the data once for all subjects
        builders: dict[Subject, Builder] = {
            way.subject(run, step): partial(way.draw, run, case, overrides)
            for way in [*WRITE_UPS.get(case.name, []), *OURS]
            for step, overrides in steps(run, case, way)
        }
        if (case.unit == "images" and case.generator) or run.sizes.every_combination:
            # Of Pillow, which decodes PNG, and tifffile there are faster relatives: they set no limit.
            names = {"deblur": "decoding alone (Pillow)", "cells": "decoding alone (tifffile)"}
            decode = names.get(case.name, "limit: decoding alone")
            builders |= limit(run, "limit: reading files", case, "read", READ)
            builders |= limit(run, decode, case, "decode", DECODE)
        run.compare(
            *("loaders", case.name, builders), unit=f"{case.unit}/s", epoch_size=case.published_size
        )


def steps(run: Run, case: Case, way: Way) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is done to the images, with its overrides."""
    same_size = case.name == "cells" or (case.unit == "pairs" and not way.function)
    if same_size and not way.is_packed and (case.name == "cells" or run.sizes.every_combination):
        yield DECODE, WHOLE_IMAGES
    if case.generator or not way.is_packed:
        yield ALL, ()
