"""A mistake of the user ends in at most three lines with the value and the fix; a traceback is for bugs."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.faults.helpers import TWO_RANKS, Torchrun, run_to_end, script_with
from tests.helpers import ENVIRONMENT, FORKSERVER, REPOSITORY, has_ranks, train

# Arguments, and words of the message. PHOTOS is a folder of images, FOLDER the test's own.
OF_KEYS = [
    (
        "train.py data.hflop=1",
        "data.hflop is no key of the configuration; did you mean data.hflip?",
    ),
    ("train.py lr=0.1", "lr is no key of the configuration; did you mean optimizer.lr?"),
    ("train.py batch_size=32", "did you mean global_batch_size?"),
    ("train.py +epoch=3", "did you mean epochs?"),
    ("train.py optimiser.lr=1", "did you mean optimizer.lr?"),
    ("train.py optimizer=adam", "optimizer=adam is unknown; did you mean adamw?"),
    ("train.py data=imagefoldr", "did you mean imagefolder?"),
    ("train.py model=vgg", "use one of alexnet, nafnet"),
    ("train.py --epochs=3", "--epochs=3: keys are written without dashes: epochs=3"),
    ("train.py --epochs 3", "--epochs: keys are written without dashes: epochs=3"),
    ("train.py -epochs=3", "-epochs=3: keys are written without dashes: epochs=3"),
    ("train.py --lr=3", "did you mean optimizer.lr?"),
    ("train.py --max-steps=3", "keys are written without dashes: max_steps=3"),
    ("train.py data.crop=[24, 24]", "the shell has split this at a space; write data.crop=[24,24]"),
    ("train.py data.crop=[24,24", "a bracket is not closed"),
    ("train.py epochs=2 -m seed=1,2", "-m stand before the first KEY=VALUE or behind the last one"),
    ("train.py epochs", "epochs: a key needs a value: epochs=VALUE"),
    ("train.py checkpoint=5", "checkpoint has keys of its own, such as checkpoint.every_steps"),
    ("train.py model.kwargs.widht=8", "model.kwargs.widht is not set by the group's file; +model"),
    (
        "train.py +model.kwargs.widht=8",
        "widht, which model=small_cnn does not take; use only: width",
    ),
]
OF_VALUES = [
    ("train.py epochs=many", "epochs=many: Value 'many'"),
    ("train.py global_batch_size=1.5", "global_batch_size=1.5: Value '1.5'"),
    ("train.py data.mean=0.5", "data.mean=0.5: "),
    ("train.py data.hflip=7", "data.hflip=7.0 is not possible; use a number in [0, 1]"),
    ("train.py data.vflip=-1", "data.vflip=-1.0 is not possible"),
    ("train.py data.value_range=[1,0]", "data.value_range=[1.0,0.0] is not possible; use [0, 1]"),
    ("train.py data.value_range=[1]", "data.value_range=[1.0] is not possible"),
    ("train.py data.std=[0]", "data.std=[0.0] is not possible; use numbers above 0"),
    ("train.py data.mean=[0.1,0.2] data.std=[1,1,1]", "have other lengths"),
    ("train.py data.mean=[0.1,0.2]", "data.mean has 2 values but the images of mnist_mini/train"),
    (
        "train.py data.colour_jitter=[1,2]",
        "data.colour_jitter=[1.0,2.0] is not possible; use three",
    ),
    (
        "train.py data.randaugment=[5,9]",
        "=[5,9] is not possible; use [operations, magnitude]: 1 to 4",
    ),
    (
        "train.py data.gaussian_blur=[0.5]",
        "data.gaussian_blur=[0.5] is not possible; use [probabil",
    ),
    (
        "train.py data.random_scale=[2,1]",
        "data.random_scale=[2,1] is not possible; use [low, high]",
    ),
    ("train.py data.mixup=-1", "data.mixup=-1.0 is not possible; use 0 or more"),
    (
        "train.py data.mixup=1 global_batch_size=63",
        "=63 each of world_size=1 has 63 samples; use 64, for",
    ),
    ("train.py data.random_resized_crop=0.5", "use [low, high] with 0 < low <= high <= 1"),
    ("train.py data.resize=abc", "data.resize=abc is not possible; use [height, width] in pixels"),
    ("train.py data.resize=0", "data.resize=0 is not possible"),
    (
        "train.py data.crop=[24]",
        "data.crop=[24] is not possible; use [height, width] in pixels, or a",
    ),
    ("train.py data.crop=40", "images of mnist_mini/train are smaller than the crop"),
    (
        "train.py data.val_fraction=1",
        "data.val_fraction=1.0 is not possible; use a number in (0, 1)",
    ),
    ("train.py data.val_count=0", "data.val_count=0 is not possible"),
    (
        "train.py data.on_error=ignore",
        "data.on_error=ignore is not possible; use one of raise, skip",
    ),
    ("train.py data.max_pixels=0", "data.max_pixels=0 is not possible"),
    ("train.py data.layout=foo", "data.layout=foo is not possible; use one of mnist_mini, mnist"),
    (
        "train.py clip_grad_norm=0",
        "clip_grad_norm=0.0 is not possible; use a number above 0, or inf",
    ),
    ("train.py clip_grad_norm=-1", "clip_grad_norm=-1.0 is not possible"),
    ("train.py clip_grad_norm=nan", "clip_grad_norm=nan is not possible"),
    (
        "train.py checkpoint.keep=-1",
        "checkpoint.keep=-1 is not possible; use a whole number from 1",
    ),
    (
        "train.py checkpoint.on_error=rise",
        "checkpoint.on_error=rise is not possible; use one of raise",
    ),
    ("train.py checkpoint.every_steps=0", "checkpoint.every_steps=0 is not possible"),
    ("train.py checkpoint.every_minutes=0", "checkpoint.every_minutes=0.0 is not possible"),
    (
        "train.py 'loader.name=dali native'",
        "loader.name=dali native is not possible; use one of pyto",
    ),
    ("train.py loader.reader=foo", "loader.reader=foo is not possible; use one of plan, native"),
    ("train.py loader.reader=native", "loader.reader=native is DALI's"),
    (
        "train.py loader.num_workers=-1",
        "loader.num_workers=-1 is not possible; use a whole number fr",
    ),
    ("train.py loader.num_workers=two", "loader.num_workers=two is not possible"),
    ("train.py loader.prefetch_factor=0", "loader.prefetch_factor=0 is not possible"),
    ("train.py loader=packed", "loader=packed needs loader.pack=DIR"),
    ("train.py loader=packed loader.pack=nowhere", "loader.pack=nowhere is no finished pack"),
    ("train.py seed=-1", "seed=-1 is not possible"),
    (
        "train.py log.every_steps=0",
        "log.every_steps=0 is not possible; use a whole number from 1 on",
    ),
    ("train.py global_batch_size=0", "global_batch_size=0 is not possible"),
    ("train.py global_batch_size=20000", "fewer than global_batch_size=20000"),
    ("train.py epochs=0", "epochs=0 is not possible"),
    ("train.py max_steps=0", "max_steps=0 is not possible"),
    ("train.py optimizer.lr=0", "optimizer.lr=0.0 is not possible; use a number above 0"),
    ("train.py optimizer.lr=-0.1", "optimizer.lr=-0.1 is not possible"),
    ("train.py optimizer.name=foo", "optimizer.name=foo is not possible; use one of sgd, adamw"),
    ("train.py optimizer.momentum=1", "optimizer.momentum=1.0 is not possible"),
    ("train.py optimizer.warmup_epochs=9", "warmup_epochs=9.0 leaves nothing of epochs=4"),
    ("train.py task.loss=mse", "task.loss=mse is not for classification; use cross_entropy"),
    ("train.py task=restoration", "task=restoration takes images"),
    ("train.py model=nafnet", "model=nafnet returns images of 1 channels"),
    ("train.py model.name=foo", "model.name=foo is not possible; use one of small_cnn, resnet18"),
    ("train.py device=tpu", "device=tpu is not possible; use auto, cpu, cuda or cuda:1"),
    ("train.py device=cuda", "needs GPU 0, but 0 are visible"),
    ("train_ema.py ema.decay=1.5", "ema.decay=1.5 is not possible; use a number in [0, 1)"),
    ("train_amp.py amp.dtype=int8", "amp.dtype=int8 is not possible; use one of auto, float16"),
    ("train_accumulate.py accumulate_steps=3", "accumulate_steps=3 does not divide the 64 samples"),
    ("train_accumulate.py accumulate_steps=-2", "accumulate_steps=-2 is not possible"),
    ("train_dp.py model.compile=true", "model.compile=true does not work with DataParallel"),
]
OF_TECHNIQUES = [
    ("train.py accumulate_steps=4", "does nothing in train.py; use train_accumulate.py"),
    ("train.py amp.dtype=float16", "does nothing in train.py; use train_amp.py"),
    ("train_amp.py ema.decay=0.9", "python compose.py amp ema -o train_amp_ema.py"),
    ("train_ema.py distributed.timeout_s=9", "does nothing in train_ema.py"),
    ("train_ddp.py", "start this script with torchrun"),
    ("train_ddp_amp.py", "start this script with torchrun"),
    ("train_fsdp.py", "start this script with torchrun"),
]
OF_PLACES = [
    ("train.py data=imagefolder", "data.root is not set; set data.root=FOLDER"),
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
    ("train.py resume=auto overwrite=true", "overwrite=true would remove what resume=auto goes on"),
    ("train.py output_dir=FOLDER/a_file", "a_file is not a folder; choose another output_dir"),
    ("-m loaders.check data=imagefolder", "data.root is not set"),
    ("-m loaders.check data.hflop=1", "did you mean data.hflip?"),
    ("-m loaders.check data=imagefolder data.root=nowhere", "data.root=nowhere is not a folder"),
    ("-m loaders.check --out=x", "--out=x: there is no such option"),
    ("-m loaders.pack data=imagefolder data.root=PHOTOS", "out=DIR is missing"),
    ("-m loaders.index data=imagefolder data.root=PHOTOS", "out=DIR is missing"),
    ("-m loaders.index data=imagefolder data.root=PHOTOS out=PHOTOS", "PHOTOS holds no index"),
    ("train.py data=imagefolder data.root=PHOTOS data.index=PHOTOS", "PHOTOS is no index; make it"),
    ("-m loaders.pack data.crop=[1, 2] out=FOLDER", "the shell has split this"),
]
# Of the published experiments, which a project made of the template does not have.
OF_EXPERIMENTS = [
    ("train.py experiment=cell", "did you mean cells?"),
    (
        "train.py experiment=cells",
        "python -m loaders.generate cells --root data/cells --size 90000",
    ),
    (
        "train.py experiment=deblur",
        "python -m loaders.generate deblur --root data/deblur --size 3214",
    ),
    (
        "train.py experiment=lowlight",
        "python -m loaders.generate lowlight --root data/lowlight --si",
    ),
    ("-m loaders.generate nothing --root FOLDER --size 9", "invalid choice: 'nothing'"),
    ("-m loaders.generate cells --root FOLDER --size 1", "size=1 is too small for cells"),
]
TABLE = [*OF_KEYS, *OF_VALUES, *OF_TECHNIQUES, *OF_PLACES]
if (REPOSITORY / "conf" / "experiment").is_dir():
    TABLE += OF_EXPERIMENTS


def arguments_of(line: str, folder: Path) -> list[str]:
    line = line.replace("PHOTOS", str(folder / "photos")).replace("FOLDER", str(folder))
    if "'" in line:
        script, name = line.split("'")[:2]
        return [script.strip(), name]
    return line.split()


def make_mistakes(folder: Path, answers: Path) -> None:
    """Make all mistakes of the table in this one process, and write down each exit code and print."""
    os.environ.update(ENVIRONMENT)
    os.chdir(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    from hydra.core.global_hydra import GlobalHydra

    told = []
    for number, (line, _) in enumerate(TABLE):
        prints = os.open(folder / f"{number}.txt", os.O_RDWR | os.O_CREAT)
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        first, *arguments = arguments_of(line, folder)
        if not any("output_dir" in argument for argument in arguments) and first != "-m":
            arguments.append(f"output_dir={folder / 'runs' / str(number)}")
        code: object = 0
        try:
            if first == "-m":
                sys.argv = [f"loaders/{arguments[0]}.py", *arguments[1:]]
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                sys.argv = [first, *arguments]
                # Scripts of this process share one import of conf.schema, which looks at the arguments.
                sys.modules.pop("conf.schema", None)
                runpy.run_path(first, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        except Exception as error:
            try:
                sys.excepthook(type(error), error, error.__traceback__)
                code = 1
            except SystemExit as ended:
                code = ended.code
        finally:
            GlobalHydra.instance().clear()
        sys.stdout.flush()
        sys.stderr.flush()
        told.append([code, (folder / f"{number}.txt").read_text()])
    answers.write_text(json.dumps(told))


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


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, tuple[int, str]]:
    """Of each mistake of the table the exit code and what was printed."""
    answers = folder / "answers.json"
    process = FORKSERVER.Process(target=make_mistakes, args=(folder, answers))
    process.start()
    process.join(280)
    assert process.exitcode == 0
    lines = [line for line, _ in TABLE]
    return dict(zip(lines, map(tuple, json.loads(answers.read_text())), strict=True))


@pytest.mark.parametrize(("line", "message"), TABLE, ids=[line for line, _ in TABLE])
def test_a_mistake_ends_in_a_few_lines_with_the_fix(line: str, message: str, told, folder) -> None:
    code, text = told[line]
    assert message.replace("PHOTOS", str(folder / "photos")) in text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 3, text
    assert code == 2, text


def test_no_mistake_of_a_value_leaves_a_folder(told, folder) -> None:
    values = {str(n) for n, row in enumerate(TABLE) if "is not possible" in row[1]}
    assert len(values) > 30
    assert not values & {path.name for path in (folder / "runs").iterdir()}


def test_one_int_is_a_square_crop_or_the_shorter_side(tmp_path) -> None:
    options = ["data.resize=30", "data.crop=24", "max_steps=1", "optimizer.warmup_epochs=0"]
    printed = train("train.py", tmp_path / "run", *options)
    assert "Traceback" not in printed


def test_a_bug_still_shows_its_traceback(tmp_path) -> None:
    folder = script_with(tmp_path / "s", "train.py", "raise KeyError('ouch')")
    codes, [text] = run_to_end("train.py", tmp_path / "run", folder=folder)
    assert codes == [1]
    assert "Traceback" in text
    assert "KeyError: 'ouch'" in text


UNDER_TORCHRUN = [
    ("train_ddp.py data.hflop=1", "did you mean data.hflip?"),
    ("train_ddp.py --epochs=3", "keys are written without dashes: epochs=3"),
    ("train_ddp.py optimizer.lr=-1", "optimizer.lr=-1.0 is not possible"),
    ("train_ddp.py amp.dtype=float16", "does nothing in train_ddp.py; use train_ddp_amp.py"),
    ("train_ddp.py global_batch_size=63", "is not divisible by world_size=2; use 62 or 64"),
    ("train_ddp.py distributed.backend=nccl", "does not work with device=cpu; use gloo"),
    ("train_ddp.py data=imagefolder data.root=nowhere", "data.root=nowhere is not a folder"),
    ("train_ddp.py resume=nowhere.pt", "resume=nowhere.pt: there is no checkpoint"),
    (
        "train_ddp.py hydra.mode=MULTIRUN seed=1,2",
        "Hydra's multirun (-m) does not work under torch",
    ),
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
        torchrun.all_gone(15)
        text = torchrun.text()
    assert text.count(message) == 1, text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 3, text
    assert has_ranks(script) == (script != "train.py")


def test_a_command_without_arguments_is_no_mistake() -> None:
    code = "import sys; sys.argv = ['train.py']; import conf.schema"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
