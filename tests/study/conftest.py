"""What tests of the study share: a folder to work in, and one tiny study that has run to its end."""

import shutil
import subprocess
from pathlib import Path

import pytest

import compare
from runs import run_here, write_study


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in, and one thread for each run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def here(monkeypatch):
    """The queue trains its runs in this process."""
    monkeypatch.setattr(subprocess, "Popen", run_here)


@pytest.fixture(scope="session")
def finished_study(bytes_data, tmp_path_factory):
    """The folder in which a tiny study, tiny_study.py, has run to its end: to be read.

    A test that changes something in it, or works in it, takes a copy, `tiny_study`.
    """
    folder = tmp_path_factory.mktemp("finished") / "home"
    write_study(folder, bytes_data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(subprocess, "Popen", run_here)
        compare.main(["tiny_study.py", "--json=verdicts.json"])
    return folder


@pytest.fixture
def tiny_study(finished_study, tmp_path, monkeypatch):
    """A copy of the finished study, which is the folder to work in."""
    folder = Path(shutil.copytree(finished_study, tmp_path / "study"))
    monkeypatch.chdir(folder)
    return folder
