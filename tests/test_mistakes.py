"""A mistake of the user ends in at most three lines with the value and the fix; a traceback is for bugs."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.faults import TWO_RANKS, Torchrun, run_to_end, script_with
from tests.helpers import REPOSITORY, answers_to, has_ranks, train

# Arguments, and words of the message. PHOTOS is a folder of images, FOLDER the test's own.
OF_KEYS = [
    ("train.py data.hflop=1", "did you mean data.hflip?"),
    ("train.py lr=0.1", "did you mean optimizer.lr?"),
    ("train.py batch_size=32", "did you mean global_batch_size?"),
    ("train.py +epoch=3", "did you mean epochs?"),
    ("train.py optimizer.momentum=0.5", "is now optimizer.kwargs.momentum"),
    ("train.py optimiser.lr=1", "did you mean optimizer.lr?"),
    ("train.py optimizer=adam", "optimizer=adam is unknown; did you mean adamw?"),
    ("train.py data=imagefoldr", "did you mean imagefolder?"),
    ("train.py model=vgg", "model=vgg is unknown; use one of "),
    ("train.py data.crop=[24, 24]", "data.crop=[24,"),
    ("train.py data.crop=[24,24", "data.crop=[24,24"),
    ("train.py epochs", "epochs="),
    ("train.py output_dir=ä", "output_dir=ä"),
    ("train.py data.root=http://host/data?key=a=b", "'data.root=\"VALUE\"'"),
    ("train.py checkpoint=5", "checkpoint"),
    ("train.py model.kwargs.widht=8", "+model.kwargs.widht="),
    (
        "train.py +model.kwargs.widht=8",
        "widht, which model=small_cnn does not take; use only: width",
    ),
]
OF_VALUES = [
    ("train.py epochs=many", "epochs: Value 'many'"),
    ("train.py global_batch_size=1.5", "global_batch_size: Value '1.5'"),
    ("train.py data.mean=0.5", "data.mean"),
    ("train.py data.hflip=7", "data.hflip=7.0"),
    ("train.py data.vflip=-1", "data.vflip=-1.0"),
    ("train.py data.value_range=[1,0]", "data.value_range=[1.0,0.0]"),
    ("train.py data.value_range=[1]", "data.value_range=[1.0]"),
    ("train.py data.std=[0]", "data.std=[0.0]"),
    ("train.py data.mean=[0.1,0.2] data.std=[1,1,1]", "data.std=[1.0,1.0,1.0]"),
    ("train.py data.mean=[0.1,0.2]", "data.mean has 2 values but the images of mnist_mini/train"),
    ("train.py data.colour_jitter=[1,2]", "data.colour_jitter=[1.0,2.0]"),
    ("train.py data.randaugment=[5,9]", "data.randaugment=[5,9]"),
    ("train.py data.gaussian_blur=[0.5]", "data.gaussian_blur=[0.5]"),
    ("train.py data.random_scale=[2,1]", "data.random_scale=[2,1]"),
    ("train.py data.mixup=-1", "data.mixup=-1.0"),
    (
        "train.py data.mixup=1 global_batch_size=63",
        "=63 each of world_size=1 has 63 samples; use 64, for",
    ),
    ("train.py data.random_resized_crop=0.5", "data.random_resized_crop=0.5"),
    ("train.py data.resize=abc", "data.resize=abc"),
    ("train.py data.resize=0", "data.resize=0"),
    ("train.py data.crop=[24]", "data.crop=[24]"),
    ("train.py data.crop=true", "data.crop=true"),
    ("train.py data.crop=40", "images of mnist_mini/train are smaller than the crop"),
    ("train.py data.val_fraction=1", "data.val_fraction=1.0"),
    ("train.py data.val_count=0", "data.val_count=0"),
    ("train.py data.on_error=ignore", "data.on_error=ignore"),
    ("train.py data.max_pixels=0", "data.max_pixels=0"),
    ("train.py data.layout=foo", "data.layout=foo"),
    ("train.py clip_grad_norm=0", "clip_grad_norm=0.0"),
    ("train.py clip_grad_norm=-1", "clip_grad_norm=-1.0"),
    ("train.py clip_grad_norm=nan", "clip_grad_norm=nan"),
    ("train.py checkpoint.keep=-1", "checkpoint.keep=-1"),
    ("train.py checkpoint.on_error=rise", "checkpoint.on_error=rise"),
    ("train.py checkpoint.every_steps=0", "checkpoint.every_steps=0"),
    ("train.py checkpoint.every_minutes=0", "checkpoint.every_minutes=0.0"),
    ("train.py 'loader.name=dali native'", "loader.name=dali native"),
    ("train.py loader.reader=foo", "loader.reader=foo"),
    ("train.py loader.reader=native", "loader.reader=native is DALI's"),
    ("train.py loader.num_workers=-1", "loader.num_workers=-1"),
    ("train.py loader.num_workers=two", "loader.num_workers=two"),
    ("train.py loader.prefetch_factor=0", "loader.prefetch_factor=0"),
    ("train.py loader=packed", "loader=packed needs loader.pack=DIR"),
    ("train.py loader=packed loader.pack=nowhere", "loader.pack=nowhere is no finished pack"),
    ("train.py seed=-1", "seed=-1"),
    ("train.py log.every_steps=0", "log.every_steps=0"),
    ("train.py early_stopping.patience=0", "early_stopping.patience=0"),
    ("train.py log.to=[tensorbord]", "log.to=tensorbord"),
    ("train.py global_batch_size=0", "global_batch_size=0"),
    ("train.py global_batch_size=20000", "fewer than global_batch_size=20000"),
    ("train.py epochs=0", "epochs=0"),
    ("train.py max_steps=0", "max_steps=0"),
    ("train.py optimizer.lr=0", "optimizer.lr=0.0"),
    ("train.py optimizer.lr=-0.1", "optimizer.lr=-0.1"),
    ("train.py optimizer.name=foo", "optimizer.name=foo"),
    ("train.py optimizer.name=adamx", "did you mean adamax?"),
    ("train.py optimizer.schedule=cosin", "optimizer.schedule=cosin"),
    ("train.py optimizer.warmup_epochs=9", "warmup_epochs=9.0 leaves nothing of epochs=4"),
    ("train.py task.loss=mse", "task.loss=mse is unknown; use one of cross_entropy"),
    ("train.py task=restoration", "task=restoration is for images"),
    ("train.py model=nafnet", "model=nafnet returns images of 1 channels"),
    ("train.py model.name=foo", "model.name=foo"),
    ("train.py device=tpu", "device=tpu"),
    ("train.py device=cuda", "needs GPU 0, but 0 are visible"),
    ("train_ema.py ema.decay=1.5", "ema.decay=1.5"),
    ("train_amp.py amp.dtype=int8", "amp.dtype=int8"),
    ("train_accumulate.py accumulate_steps=3", "accumulate_steps=3 does not divide the 64 samples"),
    ("train_accumulate.py accumulate_steps=-2", "accumulate_steps=-2"),
    ("train_dp.py model.compile=true", "model.compile=true does not work with DataParallel"),
]
OF_LAUNCHERS = [
    ("train_ddp.py", "start this script with torchrun"),
    ("train_ddp_amp.py", "start this script with torchrun"),
    ("train_fsdp.py", "start this script with torchrun"),
]
OF_PLACES = [
    ("train.py data=imagefolder", "data.root is not set"),
    (
        "train.py data=imagefolder data.root=nowhere",
        "data.root=nowhere is not a folder; set data.ro",
    ),
    ("train.py data=caltech256 data.root=PHOTOS", "nothing is downloaded into PHOTOS"),
    ("train.py data=mnist data.root=PHOTOS", "nothing is downloaded into PHOTOS"),
    ("train.py data=imagefolder data.root=PHOTOS/cat", "has no class folders"),
    ("train.py data=cells data.root=PHOTOS", "cannot be used"),
    ("train.py data=pairs data.root=PHOTOS", "PHOTOS/input is not a folder"),
    ("train.py resume=nowhere.pt", "resume=nowhere.pt: there is no checkpoint"),
    ("train.py resume=auto overwrite=true", "resume=auto; leave out one"),
    ("train.py output_dir=FOLDER/a_file", "output_dir=FOLDER/a_file"),
    ("-m loaders.check data=imagefolder", "data.root is not set"),
    ("-m loaders.check data.hflop=1", "did you mean data.hflip?"),
    ("-m loaders.check data=imagefolder data.root=nowhere", "data.root=nowhere is not a folder"),
    ("-m loaders.check --out=x", "--out=x"),
    ("-m loaders.pack data=imagefolder data.root=PHOTOS", "out="),
    ("-m loaders.index data=imagefolder data.root=PHOTOS", "out="),
    ("-m loaders.index data=imagefolder data.root=PHOTOS out=PHOTOS", "PHOTOS holds no index"),
    ("train.py data=imagefolder data.root=PHOTOS data.index=PHOTOS", "PHOTOS is no index; make it"),
    ("-m loaders.pack data.crop=[1, 2] out=FOLDER", "data.crop=[1, 2]"),
]
# Of the published experiments, which a project made of the template does not have.
OF_EXPERIMENTS = [
    ("train.py experiment=cell", "did you mean cells?"),
    ("-m benchmarks.generate nothing --root FOLDER --size 9", "invalid choice: 'nothing'"),
    ("-m benchmarks.generate cells --root FOLDER --size 1", "size=1 is too small for cells"),
]
TABLE = [*OF_KEYS, *OF_VALUES, *OF_LAUNCHERS, *OF_PLACES]
if (REPOSITORY / "conf" / "experiment").is_dir():
    TABLE += OF_EXPERIMENTS


def arguments_of(line: str, folder: Path) -> list[str]:
    line = line.replace("PHOTOS", str(folder / "photos")).replace("FOLDER", str(folder))
    if "'" in line:
        script, name = line.split("'")[:2]
        return [script.strip(), name]
    return line.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(4):
            image = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
            image.save(folder / "photos" / name / f"{number}.jpg")
    (folder / "a_file").touch()
    return folder


# Refused by Hydra's own parser, which shows all options first.
OF_OPTIONS = [
    ("train.py --epochs=3", "--epochs=3"),
    ("train.py -epochs=3", "-epochs=3"),
    ("train.py epochs=2 -m seed=1,2", "seed=1,2"),
]


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, tuple[int, str]]:
    """Exit code and prints of each mistake of the table."""
    lines = [line for line, _ in TABLE + OF_OPTIONS]
    commands = [arguments_of(line, folder) for line in lines]
    for number, command in enumerate(commands):
        if command[0] != "-m" and not any("output_dir" in argument for argument in command):
            command.append(f"output_dir={folder / 'runs' / str(number)}")
    return dict(zip(lines, answers_to(commands, folder), strict=True))


@pytest.mark.parametrize(("line", "message"), TABLE, ids=[line for line, _ in TABLE])
def test_a_mistake_ends_in_a_few_lines_with_the_fix(line: str, message: str, told, folder) -> None:
    code, text = told[line]
    assert message.replace("PHOTOS", str(folder / "photos")).replace("FOLDER", str(folder)) in text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 3, text
    assert code == 2, text


@pytest.mark.parametrize(("line", "argument"), OF_OPTIONS)
def test_an_option_that_hydra_does_not_know_is_named(line: str, argument: str, told) -> None:
    code, text = told[line]
    assert f"unrecognized arguments: {argument}" in text
    assert code == 2


def test_no_mistake_of_a_value_leaves_a_folder(told, folder) -> None:
    values = {str(n) for n, row in enumerate(TABLE) if "is not possible" in told[row[0]][1]}
    assert len(values) > 30
    assert not values & {path.name for path in (folder / "runs").iterdir()}


def test_one_int_is_a_square_crop_or_the_shorter_side(tmp_path) -> None:
    options = ["data.resize=30", "data.crop=24", "max_steps=1", "optimizer.warmup_epochs=0"]
    printed = train("train.py", tmp_path / "run", *options)
    assert "Traceback" not in printed


def test_a_key_of_another_technique_is_named(tmp_path) -> None:
    keys = ["accumulate_steps=2", "amp.dtype=float16", "ema.decay=0.5"]
    options = ["loader=synthetic", "max_steps=1", "optimizer.warmup_epochs=0"]
    printed = train("train.py", tmp_path / "run", *options, *keys)
    assert all(f"{key} has no effect" in printed for key in keys)
    assert "distributed" not in printed


@pytest.mark.parametrize("kind", ["KeyError", "ValueError"])
def test_a_bug_still_shows_its_traceback(kind: str, tmp_path) -> None:
    folder = script_with(tmp_path / "s", "train.py", f"raise {kind}('ouch')")
    address = "data.target_dir='http://bob:secret@host/p'"
    codes, [text] = run_to_end("train.py", tmp_path / "run", address, folder=folder)
    assert codes == [1]
    assert "Traceback" in text
    assert "secret" not in text
    assert f"{kind}: " in text.splitlines()[-1]


UNDER_TORCHRUN = [
    ("train_ddp.py data.hflop=1", "did you mean data.hflip?"),
    ("train_ddp.py global_batch_size=63", "is not divisible by world_size=2; use 62 or 64"),
    ("train_ddp.py resume=nowhere.pt", "resume=nowhere.pt: there is no checkpoint"),
    ("train_ddp.py hydra.mode=MULTIRUN seed=1,2", "multirun"),
    ("train_fsdp.py model=nafnet", "model=nafnet returns images of 1 channels"),
    ("train.py", "train.py is for one process, but torchrun has started 2; start it with python"),
]


@pytest.mark.parametrize(
    ("line", "message"), UNDER_TORCHRUN, ids=[line for line, _ in UNDER_TORCHRUN]
)
def test_under_torchrun_a_mistake_is_told_once_and_ends_all_attempts(
    line, message, tmp_path
) -> None:
    script, *overrides = line.split()
    job = REPOSITORY, tmp_path / "run", script, [*TWO_RANKS, "--max-restarts=3"]
    is_first = line == UNDER_TORCHRUN[0][0]  # with Pythons that really start
    with Torchrun(*job, *overrides, is_forked=not is_first) as torchrun:
        assert torchrun.wait() != 0
        torchrun.all_gone()
        text = torchrun.text()
    assert text.count(message) == 1, text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 3, text
    assert has_ranks(script) == (script != "train.py")
