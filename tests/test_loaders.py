"""What every backend promises: the same samples, each in its place, on any number of ranks."""

import ast
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import loaders
from loaders import build_loaders
from loaders.index import Index
from loaders.loader import Loader
from loaders.paths import paths_of
from loaders.pixels import Pixels
from loaders.pytorch import PyTorchLoader
from loaders.shared import SharedIndex, mapped
from loaders.targets import Labels
from tests.helpers import FORKSERVER, REPOSITORY, make_config

CPU = torch.device("cpu")
WORK = torch.utils.data._utils.worker._worker_loop
BACKENDS = ["pytorch", "dali", "synthetic"]
PIXELS = ["pytorch", "dali"]
COUNT = 13
KEPT: list[Loader] = []


@pytest.fixture
def thirteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set whose sample k is an image of the value 10 * k with the label k % 10."""
    values = 10 * np.arange(COUNT, dtype=np.uint8)
    index = Index(
        name="thirteen/train",
        sizes=np.full((COUNT, 2), 8),
        channels=1,
        target=Labels(np.arange(COUNT) % 10, tuple("0123456789")),
        images=np.broadcast_to(values[:, None, None, None], (COUNT, 8, 8, 1)).copy(),
    )
    monkeypatch.setattr(loaders, "build_index", lambda data: (index, index))


@pytest.fixture
def thirty_pairs(tmp_path: Path) -> list[str]:
    """Overrides that choose a data set of 30 training pairs, in batches of 2."""
    for side in ("input", "target"):
        (tmp_path / "pairs" / side).mkdir(parents=True)
        for number in range(32):
            image = Image.fromarray(np.full((10, 12, 3), number, np.uint8))
            image.save(tmp_path / "pairs" / side / f"{number}.png")
    options = ["data=pairs", f"data.root={tmp_path / 'pairs'}", f"data.cache_dir={tmp_path}"]
    return [*options, "data.val_count=2", "data.crop=[10,12]", "global_batch_size=2"]


def config(backend: str, tmp_path, *overrides: str):
    return make_config(
        f"loader={backend}",
        f"data.cache_dir={tmp_path}",
        "data.mean=null",
        "data.std=null",
        "global_batch_size=6",
        *overrides,
    )


def samples_of(loader, backend: str) -> list[list[int]]:
    """The samples of each batch, told by the pixels (synthetic batches have none of their own)."""
    if backend == "synthetic":
        return [rows["sample"].tolist() for rows, _ in loader.finished_batches()]
    batches = []
    for inputs, labels in loader:
        assert inputs.dtype == torch.float32
        assert labels.dtype == torch.int64
        samples = (inputs[:, 0, 0, 0] * 25.5).round().int()
        assert torch.equal(samples % 10, labels.int())
        batches.append(samples.tolist())
    return batches


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_are_disjoint_complete_and_reshuffled(
    thirteen, backend: str, world_size: int, tmp_path
) -> None:
    cfg = config(backend, tmp_path)
    ranks = [build_loaders(cfg, CPU, rank, world_size) for rank in range(world_size)]
    orders = []
    for epoch in range(4):
        train, val = [], []
        for train_loader, val_loader in ranks:
            train_loader.set_epoch(epoch)
            train.append(samples_of(train_loader, backend))
            val.append(samples_of(val_loader, backend))
            assert len(train_loader) == len(train[-1]) == COUNT // 6
            assert len(val_loader) == len(val[-1])
        seen = [sample for rank in train for batch in rank for sample in batch]
        assert len(seen) == len(set(seen)) == 12
        assert sorted(sample for rank in val for batch in rank for sample in batch) == list(
            range(COUNT)
        )
        orders.append(train)
    assert all(one != other for i, one in enumerate(orders) for other in orders[:i])

    ranks[0][0].set_epoch(1)
    assert samples_of(ranks[0][0], backend) == orders[1][0]
    another_seed, _ = build_loaders(config(backend, tmp_path, "seed=1"), CPU, 0, world_size)
    assert samples_of(another_seed, backend) != orders[0][0]


@pytest.mark.parametrize("backend", PIXELS)
def test_worker_processes_change_nothing(thirteen, backend: str, tmp_path) -> None:
    plain, _ = build_loaders(config(backend, tmp_path), CPU)
    busy, _ = build_loaders(
        config(backend, tmp_path, "loader.num_workers=2", "loader.num_threads=1"), CPU
    )
    for epoch in range(2):
        plain.set_epoch(epoch)
        busy.set_epoch(epoch)
        assert samples_of(plain, backend) == samples_of(busy, backend)


@pytest.mark.parametrize("world_sizes", [(1, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_epoch_goes_on_at_its_row_on_any_number_of_ranks(
    thirteen, backend: str, world_sizes: tuple[int, int], tmp_path
) -> None:
    before, after = world_sizes
    cfg = config(backend, tmp_path)
    whole, _ = build_loaders(cfg, CPU)
    whole.set_epoch(1)
    expected = [set(batch) for batch in samples_of(whole, backend)]

    first, _ = build_loaders(cfg, CPU, 0, before)
    first.set_epoch(1)
    next(iter(first))
    state = first.state_dict()
    rest: list[set[int]] = [set() for _ in expected[1:]]
    for rank in range(after):
        loader, _ = build_loaders(cfg, CPU, rank, after)
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert loader.batches_done == 1
        if backend == "synthetic":
            loader.sampler.start_row = loader.position
        for number, batch in enumerate(samples_of(loader, backend)):
            rest[number] |= set(batch)
    assert rest == expected[1:]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_goes_on_with_other_batches_which_are_whole_on_every_rank(
    thirteen, world_size: int, tmp_path
) -> None:
    def loader_of(batch_size: int, rank: int = 0, world_size: int = 1) -> Loader:
        cfg = config("pytorch", tmp_path, f"global_batch_size={batch_size}")
        return build_loaders(cfg, CPU, rank, world_size)[0]

    for before, after in ((4, 6), (5, 6), (1, 6), (7, 12), (3, 12), (2, 12)):
        first = loader_of(before)
        next(iter(first))
        begun = first.state_dict()
        assert begun["position"] == before
        list(first)
        finished = first.state_dict()
        for rank in range(world_size):
            loader = loader_of(after, rank, world_size)
            loader.load_state_dict(begun)
            num_left = (12 - before) // after
            assert loader.batches_done + num_left == len(loader)
            assert loader.epoch_is_finished == (num_left == 0)
            if num_left:
                assert [len(inputs) for inputs, _ in loader] == num_left * [after // world_size]
            loader.load_state_dict(finished)
            assert loader.epoch_is_finished
            assert loader.batches_done == len(loader)


@pytest.mark.parametrize("backend", PIXELS)
def test_an_epoch_that_was_left_early_leaves_nothing_behind(thirteen, backend, tmp_path) -> None:
    loader, _ = build_loaders(config(backend, tmp_path), CPU)
    expected = samples_of(loader, backend)
    loader.set_epoch(1)
    next(iter(loader))
    loader.set_epoch(0)
    assert samples_of(loader, backend) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.crop=[20,24]"],
        ["data.resize=[32,32]", "data.crop=[28,28]"],
        ["data.resize=16"],
        ["data.crop=[24,24]", "data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"],
        ["data.crop=[20,20]", "data.random_resized_crop=[0.3,1]", "data.colour_jitter=[0.3,0.3,0]"],
    ],
    ids=["as they are", "crop", "resize and crop", "resize", "flips", "augmented"],
)
def test_both_backends_give_the_same_pixels(overrides: list[str], tmp_path) -> None:
    """Equal without a resize. With one, within 0.5 of 255 on average and 16 at single pixels: DALI's
    antialiasing filter leaves out the last tap now and then, which shows at hard edges."""
    options = [*overrides, f"data.cache_dir={tmp_path}", "data.mean=null", "data.std=null"]
    if "data.resize=16" in overrides:
        options.append("data.crop=[16,16]")
    both = [build_loaders(make_config(f"loader={backend}", *options), CPU) for backend in PIXELS]
    resized = any("resize" in option for option in overrides)
    for split in (0, 1):
        pairs = zip(both[0][split], both[1][split], strict=True)
        for _, ((inputs, labels), (other_inputs, other_labels)) in zip(
            range(4), pairs, strict=False
        ):
            assert torch.equal(labels, other_labels)
            assert inputs.shape == other_inputs.shape
            difference = 255 * (inputs - other_inputs).abs()
            assert difference.max() <= (16 if resized else 0) * 1.4  # the jitter amplifies
            assert difference.mean() <= 0.5


def test_inputs_are_normalised_with_mean_and_std() -> None:
    loader, _ = build_loaders(make_config("global_batch_size=1000"), CPU)
    inputs, _ = next(iter(loader))
    assert abs(inputs.mean()) < 0.05
    assert abs(inputs.std() - 1) < 0.05
    pictures = loader.denormalize(inputs)
    assert 0 <= pictures.min() < 1e-3
    assert 0.99 < pictures.max() <= 1


def test_channels_last_is_a_memory_format_only() -> None:
    options = ["data.crop=[24,20]", "global_batch_size=8"]
    plain, _ = build_loaders(make_config(*options), CPU)
    last, _ = build_loaders(make_config(*options, "model.channels_last=true"), CPU)
    (inputs, _), (others, _) = next(iter(plain)), next(iter(last))
    assert torch.equal(inputs, others)


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (
            ["global_batch_size=100"],
            3,
            "global_batch_size=100 is not divisible by world_size=3; use 99 or 102",
        ),
        (["global_batch_size=2"], 3, "global_batch_size=2 is not divisible by world_size=3; use 3"),
        (["data.mean=[0.1,0.2]"], 1, "data.mean has 2 values but the images of .* have 1 channels"),
        (
            ["data.crop=[40,40]"],
            1,
            "images of mnist_mini/train are smaller than the crop",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(overrides, world_size, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_loaders(make_config(*overrides), CPU, 0, world_size)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_batch_that_somebody_keeps_is_never_overwritten(channels_last: bool) -> None:
    options = ["global_batch_size=100", f"model.channels_last={channels_last}", "data.crop=[28,20]"]
    loader, _ = build_loaders(make_config(*options), CPU)
    weight = torch.ones(1, requires_grad=True)
    views, saved, copies = [], [], []
    for number, (inputs, _) in enumerate(loader):
        copies.append(inputs.clone())
        if number % 2:
            views.append((number, inputs[5:7, 0]))
        else:
            saved.append((number, (inputs.detach() * weight).sum()))
        del inputs
        if number == 11:
            break
    for number, view in views:
        assert torch.equal(view, copies[number][5:7, 0])
    for number, total in saved:
        weight.grad = None
        total.backward()
        assert weight.grad is not None
        assert torch.allclose(weight.grad, copies[number].sum(), rtol=1e-4)


def test_memory_of_batches_that_nobody_keeps_is_used_again(thirty_pairs: list[str]) -> None:
    loader, _ = build_loaders(make_config("global_batch_size=100"), CPU)
    addresses = {inputs.data_ptr() for inputs, _ in loader}
    assert len(addresses) <= 3
    loader, _ = build_loaders(make_config(*thirty_pairs, "loader.num_threads=2"), CPU)
    addresses = {images.data_ptr() for batch in loader for images in batch}
    # Of the 15 batches: those begun, the one at hand, the one before, and one that a thread is about to leave.
    assert len(addresses) <= 2 * (3 + loader.cfg.loader.prefetch_factor)


def test_no_further_thread_finishes_batches(thirty_pairs: list[str], monkeypatch) -> None:
    """It would take the CPU from those that decode."""
    threads: set[int] = set()
    for owner, name in [(Index, "read"), (Pixels, "finish")]:
        method = getattr(owner, name)

        def noted(*arguments, method=method):
            threads.add(threading.get_ident())
            return method(*arguments)

        monkeypatch.setattr(owner, name, noted)
    loader, _ = build_loaders(make_config(*thirty_pairs, "loader.num_threads=2"), CPU)
    assert len(list(loader)) == 15
    assert 1 <= len(threads) <= 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_training_keeps_its_number_of_threads(
    num_workers: int, thirty_pairs: list[str]
) -> None:
    """Otherwise a fresh run trains with one, and a resumed one, which loads large tensors first, with all."""
    loader, _ = build_loaders(make_config(*thirty_pairs, f"loader.num_workers={num_workers}"), CPU)
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def train() -> int:  # in a thread that has not computed anything yet
        next(iter(loader))
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(train).result() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_never_finish_two_batches_in_the_same_memory() -> None:
    loader, _ = build_loaders(make_config("global_batch_size=8"), CPU)
    assert isinstance(loader, PyTorchLoader)
    rows, images = next(loader.raw_batches())
    num_threads = 4
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(300):
            finish = lambda _: loader.pixels.finish(rows, images)  # noqa: E731
            batches = list(threads.map(finish, range(num_threads)))
            assert len({inputs.data_ptr() for _, (inputs, _) in batches}) == num_threads
            del batches


def collect_and_work(*arguments) -> None:
    gc.collect()
    WORK(*arguments)


def test_workers_do_not_inherit_what_the_training_process_holds(monkeypatch, tmp_path) -> None:
    """A DALI pipeline that is garbage crashes a fork of its process that collects it."""
    gc.collect()
    gc.disable()
    try:
        next(iter(build_loaders(config("dali", tmp_path), CPU)[0]))
        monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_loop", collect_and_work)
        options = ["loader.num_workers=2", "global_batch_size=1000"]
        loader, _ = build_loaders(config("pytorch", tmp_path, *options), CPU)
        assert sum(len(inputs) for inputs, _ in loader) == len(loader.index)
    finally:
        gc.enable()


def end_while_workers_live() -> None:
    loader, _ = build_loaders(make_config("loader.num_workers=1"), CPU)
    KEPT.append(loader)
    next(iter(loader))
    read = forkserver.read_signed

    def read_and_wait(fd: int) -> Any:
        code = read(fd)
        time.sleep(0.5)  # long enough for whoever else asks for the exit code
        return code

    forkserver.read_signed = read_and_wait


def test_a_process_that_ends_while_its_workers_live_reports_no_death() -> None:
    process = FORKSERVER.Process(target=end_while_workers_live)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_workers_map_the_index_and_copy_nothing_of_it(tmp_path) -> None:
    pixels = np.arange(10_000, dtype=np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    names = ["/a/0.jpg", "/a/caf\udce9.jpg", "/ü/2.jpg"]  # the second is no UTF-8
    index = Index(
        name="three/train",
        sizes=np.arange(6).reshape(3, 2),
        channels=1,
        target=Labels(np.arange(3), ("a", "b", "c")),
        packed=((mapped(tmp_path / "pixels.npy"), np.arange(3)),),
        files=(paths_of(names),),
    )
    shared = SharedIndex(index)
    assert os.fstat(shared.file.fileno()).st_size < 1000
    for _ in range(2):
        found = pickle.loads(ForkingPickler.dumps(shared))
        assert Path(found.packed[0][0].base.filename) == tmp_path / "pixels.npy"
        assert np.array_equal(found.packed[0][0], pixels)
        assert np.array_equal(found.sizes, index.sizes)
        assert not found.sizes.flags.owndata
        found.sizes[:] = 0  # a page of its own, as after a fork
        assert list(found.files[0]) == names
        assert found.sides == index.sides


def test_threads_stop_when_an_epoch_is_left(thirty_pairs: list[str], monkeypatch) -> None:
    read, samples = Index.read, []

    def slow_read(index: Index, sample: int, *arguments: Any) -> np.ndarray:
        samples.append(sample)
        time.sleep(0.05)
        return read(index, sample, *arguments)

    options = [*thirty_pairs, "loader.prefetch_factor=30", "loader.num_threads=2"]
    loader, _ = build_loaders(make_config(*options), CPU)
    monkeypatch.setattr(Index, "read", slow_read)
    for _ in loader:
        break
    number_when_left = len(samples)
    time.sleep(0.5)
    assert len(samples) <= number_when_left + 4  # each thread ends the pair that it has begun
    assert len(samples) < 60  # which are all


def test_a_program_may_end_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Python aborts if it ends while a thread computes with torch."""
    (tmp_path / "t" / "a").mkdir(parents=True)
    image = np.zeros((1000, 1000, 5), np.uint8)
    tifffile.imwrite(
        tmp_path / "t" / "a" / "0.tif", image, photometric="minisblack", planarconfig="contig"
    )
    for number in range(1, 60):
        (tmp_path / "t" / "a" / f"{number}.tif").symlink_to(tmp_path / "t" / "a" / "0.tif")
    program = f"""
import sys, torch
from loaders import build_loaders
from tests.helpers import make_config

options = ["data=cells", "data.root={tmp_path / "t"}", "data.cache_dir={tmp_path}", "data.resize=null"]
options += ["data.crop=[990,990]", "data.mean=null", "data.std=null", "data.val_fraction=0.1"]
options += ["global_batch_size=2", "loader.prefetch_factor=50"]
loader, _ = build_loaders(make_config(*options), torch.device("cpu"))
sys.kept = [iter(loader) for _ in range(3)]
for batches in sys.kept:
    next(batches)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_a_loader_tells_what_it_holds(thirteen, tmp_path) -> None:
    rows = np.array([(3,), (12,)], [("sample", "i8")])
    loaders_of_ranks = [build_loaders(config("pytorch", tmp_path), CPU, rank, 3) for rank in (0, 2)]
    for train, val in loaders_of_ranks:
        assert train.classes == tuple("0123456789")
        assert train.target.kind == "labels"
        assert train.dropped_per_epoch == 1
        assert val.dropped_per_epoch == 0
        assert train.max_batches == len(train) == 2
        assert val.max_batches == 3
        assert val.names(rows) == ["sample 3", "sample 12"]
        assert train.description == (
            "thirteen: 13 training and 13 validation samples, 10 classes (0, 1, 2, ..., 9)"
        )
    assert [len(val) for _, val in loaders_of_ranks] == [3, 2]


def test_a_loader_of_pairs_has_no_classes_but_names(thirty_pairs: list[str]) -> None:
    train, _ = build_loaders(make_config(*thirty_pairs), CPU)
    assert train.classes == ()
    assert (train.target.kind, train.target.channels) == ("images", 3)
    assert train.description == ("pairs: 30 training and 2 validation samples, targets are images")
    rows, _ = next(train.finished_batches())
    assert train.names(rows) == [train.index.files[0][row["sample"]] for row in rows]


def test_loaders_use_no_collectives() -> None:
    """Ranks only share the plan; so a loader works in any process, with or without a group."""
    for path in (REPOSITORY / "loaders").rglob("*.py"):
        names = [
            node.attr if isinstance(node, ast.Attribute) else getattr(node, "module", None)
            for node in ast.walk(ast.parse(path.read_text()))
        ]
        assert not {"distributed", "torch.distributed"} & set(names), path
        assert "import torch.distributed" not in path.read_text(), path


def test_loaders_know_neither_models_nor_tasks_nor_runtime() -> None:
    for path in (REPOSITORY / "loaders").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [getattr(node, "module", None) or ""] if isinstance(node, ast.ImportFrom) else []
            )
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                assert module.split(".")[0] not in ("models", "tasks", "runtime", "benchmarks"), (
                    path
                )
