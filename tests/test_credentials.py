"""User, password and query of an address stay out of everything that is written or printed."""

from pathlib import Path

import pytest

from conf.credentials import masked, without_credentials
from tests.helpers import folder_with, replace, run_to_end
from tests.parts import rows_of

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
    assert without_credentials(text) == shown.replace("***@", "").replace("?***", "")


def test_a_bug_still_shows_its_traceback_without_credentials(tmp_path: Path) -> None:
    root = "data.root='http://bobby:s3cret@host/p?sig=T0KEN'"
    for script in ("train.py", *rows_of("SCRIPTS")):
        folder = folder_with(tmp_path / script, script)
        replace(folder / script, "# data\n", 'raise ValueError(f"a bug: {cfg.data}")\n')
        codes, prints = run_to_end(script, tmp_path / f"{script}-out", root, folder=folder)
        for code, said in zip(codes, prints, strict=True):
            assert code == 1, said
            for part in ("Traceback", "ValueError: a bug: ", "http://***@host/p?***"):
                assert part in said
            assert not any(secret.decode() in said for secret in SECRETS)
