"""A user's mistake ends in at most three lines with the value and the fix."""

import shlex
from pathlib import Path

import pytest

from tests.helpers import answers_to
from tests.images import make_photos
from tests.parts import rows_of

# Commands, and what their messages name. FOLDER is the test's own, with images in photos.
# test_config.py has values out of their range, test_credentials.py bugs, which show a traceback.
TABLE = [
    ("train.py data.crop=[24, 24]", "data.crop=[24,"),
    ("train.py model.kwargs.widht=8", "+model.kwargs.widht="),
    ("train.py --epochs 3", "write epochs=3"),
    ("train.py -epochs=3", "write epochs=3"),
    ("train.py --optimizer.lr", "write optimizer.lr=VALUE"),
    ("train.py --epoch=3", "did you mean epochs?"),
    ("train.py --experiment=mnist", "write experiment=mnist"),
    ("train.py --seed 1 epochs=3", "write seed=1"),
    ("train.py epochs 3", "write epochs=3"),
    ("train.py epochs= 3", "write epochs=3"),
    ("train.py epochs =3", "write epochs=3"),
    ("train.py epochs max_steps=3", "write epochs=VALUE"),
    ("train.py name=my run", "quotes"),
    ("train.py +epochs=2", "leave out the +: epochs=2"),
    ("train.py +optimizer=sgd", "leave out the +: optimizer=sgd"),
    ("train.py +model.kwargs.width=8", "leave out the +: model.kwargs.width=8"),
    ("train.py +epoch=3", "did you mean epochs?"),
    ("train.py ~epochs", "~epochs: epochs cannot be removed; leave it out"),
    ("train.py ~loader", "~loader: loader cannot be removed; leave it out"),
    ("train.py ++nokey=1", "++nokey=1: nokey is not a key"),
    ("train.py loader=pytorh", "did you mean pytorch?"),
    ("train.py loaders=dali", "did you mean loader?"),
    ("train.py experiments=mnist", "did you mean experiment?"),
    ("train.py lr=0.1", "optimizer.lr"),
    ("train.py optimizer.momentum=0.5", "optimizer.kwargs.momentum"),
    ("train.py model=vgg", "small_cnn"),
    ("train.py checkpoint=5", "checkpoint"),
    ("train.py epochs", "epochs="),
    ("train.py data.val_count=200", "data.val_count=200"),
    ("train.py data.fold=5", "data.num_folds=5"),
    ("train.py data.fold=0", "data=mnist_mini has a validation split of its own"),
    ("train.py data.fold=0 data.val_count=3", "data.val_count=3"),
    ("train.py data=imagefolder data.root=FOLDER/wrap", "data.root=FOLDER/wrap/set"),
    ("train.py data.root=http://host/data?key=a=b", "'data.root=\"VALUE\"'"),
    ("train.py epochs=many", "epochs: Value 'many'"),
    ("train.py data.mean=0.5", "data.mean"),
    ("train.py data.mean=[123.7]", "data.value_range=[0,255]"),
    ("train.py profile.steps=[1,0.5]", "profile.steps"),
    ("train.py optimizer.warmup_epochs=4", "epochs=4"),
    ("train.py optimizer.head_epochs=4", "optimizer.head_epochs=4.0 is not less than epochs=4"),
    (
        "train.py data=imagefolder data.root=FOLDER/photos data.random_crop=true",
        "data.random_resized_crop=[0.35, 1.0]; set",
    ),
    ("train.py resume=auto overwrite=true", "resume=auto"),
    ("train.py data.mean=[0.1,0.2]", "2 values but the images of mnist_mini/train have 1 channel;"),
    ("train.py global_batch_size=10000 epochs=1 optimizer.warmup_steps=1", "the 1 step of"),
    ("train.py data.mixup=1 global_batch_size=63", "multiple of 2, twice world_size=1; use 64"),
    ("train.py log.to=[tensorbord]", "log.to=tensorbord"),
    ("train.py global_batch_size=20000", "fewer than global_batch_size=20000"),
    ("train.py device=cuda", "number of visible GPUs is 0; use device=cpu"),
    ("train.py model.kwargs.width=1099511627776", "global_batch_size"),  # as it does not fit
    ("train.py profile.memory=true", "profile.steps=[SKIP,RECORD]"),
    ("train.py data=imagefolder data.root=nowhere", "data.root=nowhere is not a folder; set"),
    ("train.py data=imagefolder data.root=~/nowhere", f"root={Path.home()}/nowhere is not a"),
    ("train.py data=imagefolder 'data.root=\"~/no\"'", f"data.root={Path.home()}/no is not a"),
    ("train.py data=imagefolder data.root=FOLDER/photos/a", "has no class folders"),
    ("train.py data=cells data.root=FOLDER/photos", "cannot be used"),
    ("train.py resume=nowhere.pt", "resume=nowhere.pt: there is no checkpoint"),
    ("train.py output_dir=FOLDER/a_file", "output_dir=FOLDER/a_file"),
    (f"train.py output_dir=FOLDER/{'long' * 64}", "output_dir=FOLDER/longlong"),
    ("-m loaders.check data=imagefolder", "data.root is not set"),
    ("-m loaders.check --out=x", "--out=x"),
    ("-m loaders.check data.layout=foo", "data.layout=foo"),
    *rows_of("MISTAKES"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    make_photos(folder / "photos", 6)
    make_photos(folder / "wrap" / "set", 6)
    (folder / "a_file").touch()
    (folder / "latin1.py").write_bytes(b"print('caf\xe9')\n")
    (folder / "foreign.py").write_text("import torch\n")
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, tuple[int | None, str]]:
    """Exit code and prints of each mistake of the table."""
    commands = [shlex.split(line.replace("FOLDER", str(folder))) for line, _ in TABLE]
    for number, command in enumerate(commands):
        if command[0].startswith("train") and "output_dir" not in TABLE[number][0]:
            command.append(f"output_dir={folder / 'runs' / str(number)}")
    return {
        line: (code, text.replace(str(folder), "FOLDER"))
        for (line, _), (code, text) in zip(TABLE, answers_to(commands, folder), strict=True)
    }


@pytest.mark.parametrize(("line", "message"), TABLE)
def test_a_mistake_ends_in_a_few_lines_with_the_fix(line: str, message: str, told) -> None:
    code, text = told[line]
    assert message in text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 3, text
    assert code == 2, text


@pytest.mark.usefixtures("told")
def test_a_mistake_leaves_no_folder_unless_the_run_has_begun(folder) -> None:
    begun = {"train.py resume=nowhere.pt", *rows_of("BEGUN")}
    left = {TABLE[int(path.name)][0] for path in (folder / "runs").glob("*")}
    assert left <= begun


def test_what_a_model_does_not_take_ends_the_first_step_with_the_key(tmp_path) -> None:
    keys = {
        "model=torchvision model.arch=alexnet": "data.crop",
        "model=timm model.arch=test_vit": "data.crop",
        "model.kwargs.width=8 global_batch_size=1 data.crop=2": "global_batch_size",
    }
    commands = [["train.py", *line.split(), f"output_dir={tmp_path}/run"] for line in keys]
    for key, (code, text) in zip(keys.values(), answers_to(commands, tmp_path), strict=True):
        assert code == 2, text
        assert key in text.splitlines()[-1]
        assert "Traceback" not in text
