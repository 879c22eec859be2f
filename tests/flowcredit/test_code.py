"""The digest of the code that computes."""

import sys

import pytest

from flowcredit import packages
from flowcredit.code import COMPUTING, code_digest


@pytest.mark.parametrize("is_job", [False, True], ids=["beside each other", "copies of a Ray job"])
@pytest.mark.parametrize("package", COMPUTING)
def test_the_digest_of_the_code_changes_with_every_package_that_computes(package, is_job, tmp_path, monkeypatch):
    assert package in packages.PACKAGES
    homes = {
        name: tmp_path / (f"{packages.RAY_COPY}{name}" if is_job else "here")
        for name in (*COMPUTING, "deploy", "flowcredit")
    }
    for name, home in homes.items():
        (home / name / "deep").mkdir(parents=True)
        (home / name / "deep" / "module.py").write_text("a = 1\n")
    monkeypatch.setattr(packages, "ROOT", homes["flowcredit"])
    monkeypatch.setattr(sys, "path", [*map(str, homes.values()), *sys.path])
    digest = code_digest.__wrapped__
    before = digest()
    (homes["deploy"] / "deploy" / "deep" / "module.py").write_text("a = 2\n")
    assert digest() == before
    (homes[package] / package / "deep" / "module.py").write_text("a = 2\n")
    assert digest() != before
