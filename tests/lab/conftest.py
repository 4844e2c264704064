"""What tests of the lab share: a place to run trials without processes, a browser."""

import pytest

from browser import CHROMIUM, Browser
from lab_helpers import in_this_process, small_plain


@pytest.fixture
def plain(tmp_path, bytes_data, monkeypatch):
    """The config file of a plain GPT that trains in a moment, and an empty folder for runs."""
    return small_plain(tmp_path, bytes_data, monkeypatch)


@pytest.fixture
def here(monkeypatch):
    return in_this_process(monkeypatch)


@pytest.fixture
def browser(tmp_path):
    """A Browser, whose pages logged nothing and asked for nothing when the test is over."""
    if not CHROMIUM:
        pytest.skip("no Chromium or Chrome is installed, so no page can be opened")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()
    assert browser.events and browser.complaints() == []
