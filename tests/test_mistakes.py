"""A user's mistake ends in at most three lines with the value and the fix."""

import shlex
from pathlib import Path

import pytest

from tests.helpers import script_for
from tests.images import make_photos
from tests.processes import ENVIRONMENT, join, run_as_main, start_process
from tests.rows import rows

# Keys and values, and what their messages name. test_config.py has values out of their range.
KEYS = [
    ("data.crop=[24, 24]", "data.crop=[24,"),
    ("model.kwargs.widht=8", "+model.kwargs.widht="),
    ("name=a=b", "quotes"),
    ("+epochs=2", "Either remove + prefix: 'epochs=2'"),
    ("+epoch=3", "did you mean epochs?"),
    ("loader=pytorh", "did you mean pytorch?"),
    ("lr=0.1", "did you mean optimizer.lr?"),
    ("optimizer.learning_rate=0.1", "did you mean optimizer.lr?"),
    ("batch_size=8", "did you mean global_batch_size?"),
    ("optimizer.momentum=0.5", "optimizer.kwargs"),
    ("data.table=labels.csv", "data.table=labels.csv does nothing without data=table"),
    ("loader=synthetic loader.num_workers=2", "loader.num_workers=2 does nothing"),
    ("data.num_folds=3", "data.fold=NUMBER"),
    ("data.fold=5", "data.num_folds=5"),
    ("epochs=many", "epochs: Value 'many'"),
    ("data.mean=0.5", "data.mean"),
    ("data.mean=[123.7]", "data.value_range=[0,255]"),
    ("optimizer.warmup_epochs=4", "epochs=4"),
    ("optimizer.head_epochs=4", "optimizer.head_epochs=4.0 is not less than epochs=4"),
    ("resume=auto overwrite=true", "resume=auto"),
    ("profile.memory=true", "profile.steps=[SKIP,RECORD]"),
]

IN_THE_FIRST_STEP = [
    ("train.py model=torchvision model.arch=alexnet", "set data.crop"),
    ("train.py model.kwargs.width=8 global_batch_size=1 data.crop=2", "raise global_batch_size"),
]

# Commands, and what their messages name. FOLDER is the test's own, with images in photos.
TABLE = [
    *((f"train.py {line}", message) for line, message in KEYS),
    ("train.py --lr 0.1", "write optimizer.lr=VALUE"),
    ("train.py --batch-size 64", "write global_batch_size=VALUE"),
    ("train.py ~epochs", "write epochs=VALUE"),
    ("train.py epochs 3", "write epochs=VALUE"),
    ("train.py data.val_count=200", "data.val_count=200"),
    ("train.py data=imagefolder data.root=FOLDER/wrap", "FOLDER/wrap/set"),
    ("train.py data.mean=[0.1,0.2]", "2 values but the images of mnist_mini/train have 1 channel;"),
    (
        "train.py data=imagefolder data.root=FOLDER/photos data.random_crop=true",
        "data.random_resized_crop=[0.35, 1.0]; set",
    ),
    ("train.py data.mixup=1 global_batch_size=63", "multiple of 2, twice world_size=1; use 64"),
    ("train.py log.to=[tensorbord]", "log.to=tensorbord"),
    ("train.py global_batch_size=20000", "fewer than global_batch_size=20000"),
    ("train.py device=cuda", "number of visible GPUs is 0; use device=cpu"),
    ("train.py model.kwargs.width=1099511627776", "global_batch_size"),  # as it does not fit
    ("train.py data=imagefolder data.root=nowhere", "data.root=nowhere is not a folder; set"),
    ("train.py data=imagefolder data.root=~/nowhere", f"root={Path.home()}/nowhere is not a"),
    ("train.py data=imagefolder data.root=FOLDER/photos/a", "has no class folders"),
    ("train.py data=cells data.root=FOLDER/photos", "cannot be used"),
    ("train.py resume=nowhere.pt", "resume=nowhere.pt: there is no checkpoint"),
    ("train.py output_dir=FOLDER/a_file", "FOLDER/a_file"),
    ("-m loaders.check data=imagefolder", "data.root is not set"),
    ("-m loaders.check --out=x", "--out=x"),
    ("-m loaders.check data.layout=foo", "data.layout=foo"),
    *rows(
        ("train_accumulate.py accumulate_steps=3", "accumulate_steps=3"),
        ("-m tools.compose tpu", "technique=tpu is unknown; use one of "),
        ("train_dp.py model.compile=true", "model.compile=true"),
        ("train_ddp.py model.kwargs.width=33", "width=33 is not"),
        ("train.py model=nafnet", "model=nafnet returns images of 1 channel,"),
        ("train.py data=own data.name=digits loader=synthetic", "loader.name=synthetic"),
        ("train.py loader=packed", "loader.pack=DIR"),
        ("-m loaders.pack data.crop=[1, 2] out=FOLDER", "data.crop=[1, 2]"),
        ("train.py data=pairs data.root=FOLDER/photos", "FOLDER/photos/input is not a folder"),
        ("-m tools.sweep script=~/nowhere.py", f"script={Path.home()}/nowhere.py"),
        ("-m tools.sweep", "script="),
        ("-m tools.sweep script=train.py jobs=0", "jobs=0"),
        ("-m tools.sweep script=train.py trials=two", "trials=two"),
        ("-m tools.sweep script=train.py output_dir=a", "output_dir="),
        ("-m tools.sweep script=train.py seed=[1", "seed=[1"),
        ("-m tools.sweep script=train.py lr=interval(0,1) out=FOLDER", "lr=interval(0,1)"),
        ("-m tools.runs nowhere", "there are no runs below nowhere"),
        ("-m tools.runs a b", "a b"),
        ("-m tools.runs a by=loss", "by=loss"),
        ("train.py experiment=cell", "did you mean cells?"),
        ("-m benchmarks.generate nothing --root FOLDER --size 9", "invalid choice: 'nothing'"),
        ("-m benchmarks.generate cells --root FOLDER --size 1", "size=1 is too small for cells"),
    ),
    *rows(
        ("-m tools.compose ddp amp fsdp", "ddp does not combine with fsdp"),
        needs="train_ddp.py train_fsdp.py train_amp.py",
    ),
    *IN_THE_FIRST_STEP,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    make_photos(folder / "photos", 6)
    make_photos(folder / "wrap" / "set", 6)
    (folder / "a_file").touch()
    return folder


def run_commands(commands: list[list[str]], folder: Path) -> None:
    """Run command lines one after another in this process; after its prints, each has its code."""
    for number, (script, *arguments) in enumerate(commands):
        code: int | str | None = 0
        try:
            command = [script_for(script), *arguments]
            run_as_main(command, ENVIRONMENT, folder / f"{number}.txt")
        except SystemExit as end:
            code = end.code
        print("exit code", code, flush=True)


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, str]:
    """What each command of the table prints, and its exit code."""
    commands = [shlex.split(line.replace("FOLDER", str(folder))) for line, _ in TABLE]
    for number, command in enumerate(commands):
        if command[0].startswith("train") and "output_dir" not in TABLE[number][0]:
            command.append(f"output_dir={folder / 'runs' / str(number)}")
    assert join([start_process(run_commands, commands, folder)]) == [0]
    texts = [(folder / f"{number}.txt").read_text() for number in range(len(TABLE))]
    return {
        line: text.replace(str(folder), "FOLDER")
        for (line, _), text in zip(TABLE, texts, strict=True)
    }


@pytest.mark.parametrize(("line", "message"), TABLE)
def test_a_mistake_ends_in_a_few_lines_with_the_fix(line: str, message: str, told) -> None:
    text = told[line]
    *lines, code = text.splitlines()
    assert message in text
    assert "Traceback" not in text
    first = next(number for number, line in enumerate(lines) if message in line)
    assert first <= 3 or (line, message) in IN_THE_FIRST_STEP, text  # what it said before
    assert len(lines) - first <= 3, text
    assert code == "exit code 2", text


@pytest.mark.usefixtures("told")
def test_a_mistake_leaves_no_folder_unless_the_run_has_begun(folder) -> None:
    begun = {"train.py resume=nowhere.pt", "train_dp.py model.compile=true"}
    begun |= {line for line, _ in IN_THE_FIRST_STEP}
    left = {TABLE[int(path.name)][0] for path in (folder / "runs").glob("*")}
    assert left <= begun
