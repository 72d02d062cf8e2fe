"""What is read from an address leaves no trace of its user, password and query."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import answers_to, make_config, run_all
from tests.images import make_photos, photos_in
from tests.servers import bytes_in
from tests.shards import shard
from tests.test_credentials import SECRETS


@pytest.mark.slow
def test_a_run_leaves_no_trace_of_the_credentials_of_its_data(tmp_path: Path, web) -> None:
    seen = tmp_path / "seen"  # all that is written and printed
    (prints := seen / "prints").mkdir(parents=True)
    options = photos_in(make_photos(tmp_path / "photos", 40), "data.val_count=6")
    shard(make_config(*options).data, tmp_path / "shards")
    options += ["model.kwargs.width=8", f"data.cache_dir={seen / 'cache'}", "log.images=0"]
    web.files = bytes_in(tmp_path)
    root = f"data.root='{web.url.replace('//', '//bobby:s3cret@')}/shards?sig=T0KEN'"
    sweep = ["-m", "tools.sweep", f"out={seen / 'sweep'}", "script=train.py", *options]
    run_all([[*sweep, root, "max_steps=2", "seed=0"]], prints)
    [folder] = [path.parent for path in seen.glob("sweep/*/config.yaml")]
    root = root.replace("T0KEN", "T0KEN2")
    resume = [f"output_dir={folder}", "resume=auto", "max_steps=4", "seed=0"]
    predict = ["predict.py", f"run={folder}", "split=val", f"out={seen / 'predictions.csv'}"]
    export = ["export.py", f"run={folder}", "format=safetensors", f"out={seen / 'model'}"]
    given = root.replace("'", "")
    commands = [["train.py", *options, root, *resume], ["-m", "tools.runs", str(seen / "sweep")]]
    commands += [[*predict, given], [*export, given], predict, export]
    resumed, *others = answers_to(commands, prints)
    assert "step 2" in resumed[1]
    assert "settings that have changed" not in resumed[1]
    assert [code for code, _ in (resumed, *others)] == [0, 0, 0, 0, 2, 2], others
    for _, text in others[-2:]:  # an address without its credentials is not used
        assert "data.root" in text
        assert len(text.splitlines()) == 1
    config = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["config"]
    start = json.loads((folder / "run.json").read_text())
    for stored in (config["data"]["root"], start["settings"]["data.root"]):
        assert stored == f"http://***@127.0.0.1:{web.port}/shards?***"
    # whatever is wrong beside the address, or with it
    web.fault = lambda path: "403"
    command = ["train.py", *options, root, "data.retry_s=0.1", f"output_dir={seen / 'wrong'}"]
    wrong = ["epohcs=2", "epochs=0", "max_steps=3", given, root.replace("http", "ftp")]
    for code, text in answers_to([[*command, each] for each in wrong], prints):
        assert code == 2, text
        assert 1 <= len(text.splitlines()) <= 3, text
    written = bytes_in(seen)
    assert len(written) > 20
    for name, content in written.items():
        found = [secret for secret in SECRETS if secret in name.encode() + content]
        assert not found, f"{name} holds {found}"
