"""Training from the original files against training from files that were decoded ahead of time.

What packing takes; then loading alone, and training, from the originals and from the pack.
"""

from functools import partial

from benchmarks.cases import Case
from benchmarks.records import Subject
from benchmarks.run import UNAVAILABLE, Draw, Run
from benchmarks.step import training_step
from benchmarks.template import num_samples, parts
from benchmarks.ways import OURS, Way, pack

PACKING = "packing"
# On a CPU the experiments' own models take so long that no loader ever makes them wait.
LIGHT_MODELS = {
    "caltech256": ("model=small_cnn", "model.kwargs.width=4"),
    "lowlight": ("model.kwargs.width=2", "model.kwargs.num_blocks=[1]"),
}


def main(run: Run) -> None:
    for case in run.chosen(*LIGHT_MODELS):
        measure_packing(run, case)
        light = LIGHT_MODELS[case.name] if run.device.type == "cpu" else ()
        settings = " ".join(light) or "model of the experiment"
        loading = {way.subject(run): partial(way.draw, run, case) for way in OURS}
        steps = {
            way.subject(run, settings): partial(training, run, case, way, light) for way in OURS
        }
        for mode, builders in (("loading only", loading), ("training", steps)):
            run.compare(
                *("out_of_band", f"{case.name}, {mode}", builders),
                unit=f"{case.unit}/s",
                epoch_size=case.published_size,
            )


def measure_packing(run: Run, case: Case) -> None:
    """The time of `python -m loaders.pack` on the case's data, its start-up left out."""
    subject = Subject("python -m loaders.pack")
    seconds: list[float] = []
    if run.is_done("out_of_band", case.name, [subject], PACKING):
        return
    try:
        folder, packing_s = pack(run, case)
    except UNAVAILABLE as error:
        note = f"not measured: {error}"
    else:
        seconds.append(packing_s)
        size = sum(path.stat().st_size for path in folder.iterdir())
        note = f"{num_samples(run.config(case.name))} {case.unit}, {size / 2**20:.0f} MiB"
    run.record(
        *("out_of_band", case.name, subject, {(PACKING, "s"): seconds}),
        epoch_size=case.published_size,
        note=note,
    )


def training(run: Run, case: Case, way: Way, model: tuple[str, ...]) -> Draw:
    """A training step with the batches of one of our loaders."""
    cfg = run.config(case.name, *way.overrides(run, case), *model)
    return training_step(cfg, parts(cfg, run.device), run.device)
