"""Training from the original files against training from files that were decoded ahead of time."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cases import Case, endless, loader_overrides, train_loader
from benchmarks.run import UNAVAILABLE, Draw, Run, Subject, draw_from, say
from benchmarks.step import TrainingStep
from loaders.layouts import build_index
from loaders.pack import pack as write_pack

LOADING, TRAINING = "loading only", "training"
# On a CPU the experiments' own models take so long that no loader ever makes them wait.
LIGHT_MODELS = {
    "caltech256": ("model=small_cnn", "model.kwargs.width=4"),
    "lowlight": ("model.kwargs.width=2", "model.kwargs.num_blocks=[1]"),
}
PACKING = Subject("python -m loaders.pack")


def main(run: Run) -> None:
    """What packing takes; then loading alone, and training, from the originals and from the pack."""
    for case in run.chosen("caltech256", "lowlight"):
        if not run.is_done("out_of_band", case.name, [PACKING], "packing"):
            measure_packing(run, case)
        for mode in (LOADING, TRAINING):
            run.compare(
                "out_of_band",
                f"{case.name}, {mode}",
                builders(run, case, training=mode == TRAINING),
                unit=f"{case.unit}/s",
                epoch_size=case.published_size,
            )


def measure_packing(run: Run, case: Case) -> None:
    """The time of `python -m loaders.pack` on the case's data, its start-up left out."""
    say(f"out_of_band {case.name}: packing")
    try:
        cfg = run.config(case.name)
        folder, seconds = pack(run, case)
    except UNAVAILABLE as error:
        run.record(
            *("out_of_band", case.name, PACKING, "packing", "s", []), note=f"not measured: {error}"
        )
        return
    num_samples = sum(len(index) for index in build_index(cfg.data))
    size = sum(path.stat().st_size for path in folder.iterdir())
    run.record(
        *("out_of_band", case.name, PACKING, "packing", "s", [seconds]),
        epoch_size=case.published_size,
        note=f"{num_samples} {case.unit}, {size / 2**20:.0f} MiB",
    )


def pack(run: Run, case: Case, overrides: tuple[str, ...] = ()) -> tuple[Path, float]:
    """Pack the case's data, if there is no pack of it yet.

    Args:
        run: sizes and overrides.
        case: the data.
        overrides: further ones of the case's configuration.

    Returns:
        The folder of the pack, and the seconds that making it took (kept in the folder).

    Raises:
        ValueError: these images cannot be packed.
    """
    data = run.config(case.name, *overrides).data
    size = "x".join(str(data.resize).strip("[]").split(", "))
    folder = run.data_dir / f"packed-{case.name}-{Path(data.root).name}-{size}"
    record = folder.with_suffix(".seconds")
    if not record.exists():
        start = time.perf_counter()
        write_pack(data, folder)
        record.write_text(f"{time.perf_counter() - start:.3f}\n")
    return folder, float(record.read_text())


def builders(run: Run, case: Case, training: bool) -> dict[Subject, Callable[[], Draw]]:
    model: tuple[str, ...] = ()
    settings = ""
    if training:
        model = LIGHT_MODELS[case.name] if run.device.type == "cpu" else ()
        settings = " ".join(model) or "model of the experiment"
    return {
        Subject(f"loader={name}", 0, run.num_cores, settings=settings): partial(
            build, run, case, name, training, model
        )
        for name in ("pytorch", "dali", "packed")
    }


def build(run: Run, case: Case, name: str, training: bool, overrides: tuple[str, ...]) -> Draw:
    """Loading, or training, with one of the template's loaders; packs first if need be."""
    packed = [f"loader.pack={pack(run, case)[0]}"] if name == "packed" else []
    cfg = run.config(case.name, *loader_overrides(name, run.num_cores), *packed, *overrides)
    if training:
        return TrainingStep(cfg, run.device)
    return draw_from(endless(train_loader(cfg, run.device)))
