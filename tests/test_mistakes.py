"""A user's mistake ends in at most three lines with the value and the fix."""

import shlex
from pathlib import Path

import pytest

from launch import rendezvous
from tests.helpers import REPOSITORY, SCRIPTS, answers_to, free_port, start_process, train
from tests.images import make_photos
from tests.torchrun import TWO_RANKS, Torchrun

# Commands, and what their messages name. FOLDER is the test's own, with images in photos.
# test_config.py has values out of their range, test_credentials.py bugs, which show a traceback.
TABLE = [
    ("train.py data.crop=[24, 24]", "data.crop=[24,"),
    ("train.py model.kwargs.widht=8", "+model.kwargs.widht="),
    ("train.py +epochs=2", "An item is already at 'epochs'"),
    ("train.py +epoch=3", "did you mean epochs?"),
    ("train.py lr=0.1", "optimizer.lr"),
    ("train.py optimizer.momentum=0.5", "optimizer.kwargs.momentum"),
    ("train.py model=vgg", "small_cnn"),
    ("train.py checkpoint=5", "checkpoint"),
    ("train.py epochs", "epochs="),
    ("train.py data.val_count=200", "data.val_count=200"),
    ("train.py data=imagefolder data.root=FOLDER/wrap", "data.root=FOLDER/wrap/set"),
    ("train.py data.root=http://host/data?key=a=b", "'data.root=\"VALUE\"'"),
    ("train.py epochs=many", "epochs: Value 'many'"),
    ("train.py data.mean=0.5", "data.mean"),
    ("train.py data.mean=[123.7]", "data.value_range=[0,255]"),
    ("train.py data.std=[58.4]", "data.value_range=[0,255]"),
    ("train.py profile.steps=[1,0.5]", "profile.steps"),
    ("train.py loader.reader=native", "loader=dali_reader"),
    ("train.py loader=packed", "loader.pack=DIR"),
    ("train.py optimizer.warmup_epochs=4", "epochs=4"),
    ("train.py resume=auto overwrite=true", "resume=auto"),
    ("train.py data.mean=[0.1,0.2]", "data.mean has 2 values but the images of mnist_mini/train"),
    ("train.py data.mixup=1 global_batch_size=63", "multiple of 2, twice world_size=1; use 64"),
    ("train.py loader=packed loader.pack=nowhere", "loader.pack=nowhere"),
    ("train.py log.to=[tensorbord]", "log.to=tensorbord"),
    ("train.py global_batch_size=20000", "fewer than global_batch_size=20000"),
    ("train.py model=nafnet", "model=nafnet returns images of 1 channels"),
    ("train.py device=cuda", "number of visible GPUs is 0; use device=cpu"),
    ("train_accumulate.py accumulate_steps=3", "accumulate_steps=3"),
    ("train_dp.py model.compile=true", "model.compile=true"),
    ("train_ddp.py", "torchrun"),
    ("train.py data=imagefolder data.root=nowhere", "data.root=nowhere is not a folder; set"),
    ("train.py data=imagefolder data.root=~/nowhere", f"root={Path.home()}/nowhere is not a"),
    ("train.py data=imagefolder 'data.root=\"~/no\"'", f"data.root={Path.home()}/no is not a"),
    ("sweep.py script=~/nowhere.py", f"script={Path.home()}/nowhere.py"),
    ("train.py data=imagefolder data.root=FOLDER/photos/a", "has no class folders"),
    ("train.py data=cells data.root=FOLDER/photos", "cannot be used"),
    ("train.py data=pairs data.root=FOLDER/photos", "FOLDER/photos/input is not a folder"),
    ("train.py resume=nowhere.pt", "resume=nowhere.pt: there is no checkpoint"),
    ("train.py output_dir=FOLDER/a_file", "output_dir=FOLDER/a_file"),
    ("train.py data.index=FOLDER", "data.index=FOLDER is not an index; make one if"),
    ("-m loaders.check data=imagefolder", "data.root is not set"),
    ("-m loaders.check --out=x", "--out=x"),
    ("-m loaders.pack", "out="),
    ("-m loaders.pack data.crop=[1, 2] out=FOLDER", "data.crop=[1, 2]"),
    ("-m loaders.index", "out="),
    ("-m loaders.index out=FOLDER", "FOLDER holds no index"),
    ("-m loaders.index data.layout=foo out=FOLDER/new", "data.layout=foo"),
    ("compose.py ddp amp fsdp", "ddp does not combine with fsdp"),  # part: ddp amp fsdp
    ("compose.py ddp ddp", "names ddp twice"),  # part: ddp
    ("compose.py tpu", "unknown technique tpu; use some of "),
    ("compose.py ddp --onto FOLDER/latin1.py", "FOLDER/latin1.py"),  # part: ddp
    ("compose.py ddp --onto FOLDER/foreign.py", "FOLDER/foreign.py"),  # part: ddp
    ("runs.py nowhere", "nowhere is not a folder"),
    ("runs.py FOLDER/photos", "there are no runs below FOLDER/photos"),
    ("runs.py a b", "a b"),
    ("runs.py a by=loss", "by=loss"),
    ("sweep.py", "script="),
    ("sweep.py script=nowhere.py", "script=nowhere.py"),
    ("sweep.py script=train.py jobs=0", "jobs=0"),
    ("sweep.py script=train.py trials=two", "trials=two"),
    ("sweep.py script=train.py output_dir=a", "output_dir="),
    ("sweep.py script=train.py seed=[1", "seed=[1"),
    ("sweep.py script=train.py lr=interval(0,1) out=FOLDER", "lr=interval(0,1)"),
]
# Of the published experiments, which a project made of the template does not have.
if (REPOSITORY / "conf" / "experiment").is_dir():
    TABLE += [
        ("train.py experiment=cell", "did you mean cells?"),
        ("-m benchmarks.generate nothing --root FOLDER --size 9", "invalid choice: 'nothing'"),
        ("-m benchmarks.generate cells --root FOLDER --size 1", "size=1 is too small for cells"),
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
def told(folder: Path) -> dict[str, tuple[int, str]]:
    """Exit code and prints of each mistake of the table."""
    commands = [shlex.split(line.replace("FOLDER", str(folder))) for line, _ in TABLE]
    for number, command in enumerate(commands):
        if command[0] in SCRIPTS and "output_dir" not in TABLE[number][0]:
            command.append(f"output_dir={folder / 'runs' / str(number)}")
    return {
        line: (code, text.replace(str(folder), "FOLDER"))
        for (line, _), (code, text) in zip(TABLE, answers_to(commands, folder), strict=True)
    }


# part: scripts
@pytest.mark.parametrize(("line", "message"), TABLE)
def test_a_mistake_ends_in_a_few_lines_with_the_fix(line: str, message: str, told) -> None:
    code, text = told[line]
    assert message in text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 3, text
    assert code == 2, text


# part: scripts
@pytest.mark.usefixtures("told")
def test_a_mistake_leaves_no_folder_unless_the_run_has_begun(folder) -> None:
    left = {TABLE[int(path.name)][0] for path in (folder / "runs").glob("*")}
    assert left <= {"train.py resume=nowhere.pt", "train_dp.py model.compile=true"}


AT_THE_FIRST_STEP = [
    ("train.py model=torchvision model.arch=alexnet", "data.crop"),  # part: torchvision
    ("train.py model=timm model.arch=test_vit", "data.crop"),  # part: timm
    ("train.py model.kwargs.width=8 global_batch_size=1 data.crop=2", "global_batch_size"),
]


def test_what_a_model_does_not_take_ends_the_first_step_with_the_key(tmp_path) -> None:
    commands = [
        [*line.split(), f"output_dir={tmp_path / str(number)}"]
        for number, (line, _) in enumerate(AT_THE_FIRST_STEP)
    ]
    for (_, key), (code, text) in zip(
        AT_THE_FIRST_STEP, answers_to(commands, tmp_path), strict=True
    ):
        assert code == 2, text
        assert key in text.splitlines()[-1]
        assert "Traceback" not in text


# part: scripts
def test_a_key_of_another_technique_is_named_and_an_int_is_a_square_crop(tmp_path) -> None:
    of_techniques = ["accumulate_steps=2", "amp.dtype=float16", "ema.decay=0.5"]
    options = ["data.resize=30", "data.crop=24", "max_steps=1", "optimizer.warmup_epochs=0"]
    printed = train("train.py", tmp_path / "run", *options, *of_techniques)
    assert all(f"{key} has no effect" in printed for key in of_techniques)
    assert "distributed" not in printed
    assert "Traceback" not in printed


UNDER_TORCHRUN = [
    ("train_ddp.py data.hflop=1", "did you mean data.hflip?", 1),
    ("train_ddp.py resume=nowhere.pt", "resume=nowhere.pt: there is no checkpoint", 0),
    ("train_ddp.py hydra.mode=MULTIRUN seed=1,2", "multirun", 0),
    ("train.py", "torchrun has started 2; start it with python", 0),  # part: scripts
]


@pytest.mark.parametrize(("line", "message", "restarts"), UNDER_TORCHRUN)
def test_under_torchrun_a_mistake_is_told_once_in_each_attempt(line, message, restarts, tmp_path):
    command = [*TWO_RANKS, f"--max-restarts={restarts}", *line.split()]
    command.append(f"output_dir={tmp_path / 'run'}")
    with Torchrun(command, REPOSITORY, tmp_path / "prints") as torchrun:
        assert torchrun.wait() == 1
        text = torchrun.text()
    assert text.count(message) == 1 + restarts, text
    assert "exitcode  : 2" in text


# part: elastic
def test_an_elastic_torchrun_exits_as_a_rank_that_met_a_mistake(tmp_path) -> None:
    port = free_port()
    start_process(rendezvous.main, [str(port)])
    command = ["--nnodes=1:1", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=mine"]
    command += ["--max-restarts=0", "train_ddp.py", "epochs=0", f"output_dir={tmp_path / 'run'}"]
    with Torchrun(command, REPOSITORY, tmp_path / "prints", is_elastic=True) as torchrun:
        assert torchrun.wait() == 2, torchrun.text()
        assert "epochs=0" in torchrun.text()
