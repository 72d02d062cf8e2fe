"""User, password and query of an address stay out of everything that is written or printed."""

import json
from pathlib import Path

import pytest
import torch

from conf.credentials import masked, without_credentials
from tests.helpers import answers_to, folder_with, make_config, replace, run_all, run_to_end
from tests.images import make_photos, photos_in, shard
from tests.servers import bytes_in

SECRETS = (b"bobby", b"s3cret", b"T0KEN")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://bobby:s3cret@host/p?sig=T0KEN", "http://***@host/p?***"),
        ("https://T0KEN@host:80#T0KEN", "https://***@host:80?***"),
        ("http://bobby:s3/c?r@e#t@host/p", "http://***@host/p"),
        ("s3://KEY:s3cret@bucket/a@2, http://h:8/a@b?x", "s3://***@bucket/a@2, http://h:8/a@b?***"),
        ("(http://host/?sig=T0KEN)", "(http://host/?***)"),
        ("s3://bucket/p and /a?b#c@d", "s3://bucket/p and /a?b#c@d"),
        ("http:/bobby:s3cret@host/p?sig=T0KEN is no folder", "http:/***@host/p?*** is no folder"),
    ],
)
def test_an_address_is_masked_where_it_has_credentials(text: str, shown: str) -> None:
    assert masked({"a": [text, 1, None]}) == {"a": [shown, 1, None]}
    assert masked(shown) == shown
    plain = shown.replace("***@", "").replace("?***", "")  # part: shards
    assert without_credentials(text) == plain  # part: shards


def test_a_bug_still_shows_its_traceback_without_credentials(tmp_path: Path) -> None:
    root = "data.root='http://bobby:s3cret@host/p?sig=T0KEN'"
    scripts = ["train.py"]
    scripts += ["train_ddp.py"]  # part: scripts
    for script in scripts:
        folder = folder_with(tmp_path / script, script)
        replace(folder / script, "# data\n", 'raise ValueError(f"a bug: {cfg.data}")\n')
        codes, prints = run_to_end(script, tmp_path / f"{script}-out", root, folder=folder)
        for code, said in zip(codes, prints, strict=True):
            assert code == 1, said
            for part in ("Traceback", "ValueError: a bug: ", "http://***@host/p?***"):
                assert part in said
            assert not any(secret.decode() in said for secret in SECRETS)


def test_a_run_leaves_no_trace_of_the_credentials_of_its_data(tmp_path: Path, web) -> None:
    seen = tmp_path / "seen"  # all that is written and printed
    (prints := seen / "prints").mkdir(parents=True)
    options = photos_in(make_photos(tmp_path / "photos", 40), "data.val_count=6")
    shard(make_config(*options).data, tmp_path / "shards")
    options += ["model.kwargs.width=8", f"data.cache_dir={seen / 'cache'}", "log.images=0"]
    web.files = bytes_in(tmp_path)
    root = f"data.root='{web.url.replace('//', '//bobby:s3cret@')}/shards?sig=T0KEN'"
    sweep = ["sweep.py", f"out={seen / 'sweep'}", "script=train.py", *options]
    run_all([[*sweep, root, "max_steps=2", "seed=0"]], prints)
    [folder] = [path.parent for path in seen.glob("sweep/*/config.yaml")]
    root = root.replace("T0KEN", "T0KEN2")
    resume = [f"output_dir={folder}", "resume=auto", "max_steps=4", "seed=0"]
    predict = ["predict.py", f"run={folder}", "split=val", f"out={seen / 'predictions.csv'}"]
    export = ["export.py", f"run={folder}", "format=safetensors", f"out={seen / 'model'}"]
    given = root.replace("'", "")
    commands = [["train.py", *options, root, *resume], ["runs.py", str(seen / "sweep")]]
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
    wrong = ["epohcs=2", "epochs=0", "hydra.output_subdir=.hydra", "max_steps=3"]
    wrong += ["hydra.mode=MULTIRUN", given, root.replace("http", "ftp")]
    for code, text in answers_to([[*command, each] for each in wrong], prints):
        assert code == 2, text
        assert 1 <= len(text.splitlines()) <= 3, text
    written = bytes_in(seen)
    assert len(written) > 20
    for name, content in written.items():
        found = [secret for secret in SECRETS if secret in name.encode() + content]
        assert not found, f"{name} holds {found}"
