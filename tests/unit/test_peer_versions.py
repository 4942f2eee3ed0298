"""Versions as people write them: how much each says, and what it can and cannot be."""

from __future__ import annotations

import pytest

from tonnage.errors import InvalidSetting
from tonnage.peers.version import Version


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("0.19.1", (0, 19, 1), (0, 19, 1)),
        ("v0.19", (0, 19, 0), (0, 19, 10**6)),
        ("0.27.x", (0, 27, 0), (0, 27, 10**6)),
        ("0.6.4.post2.dev", (0, 6, 4), (0, 6, 4)),
        ("0.26.1rc1.dev608", (0, 26, 1), (0, 26, 1)),
        ("0.2x (2026-06)", (0, 20, 0), (0, 29, 10**6)),
        ("0.2x", (0, 20, 0), (0, 29, 10**6)),
        ("0.5.1x 2026-05", (0, 5, 10), (0, 5, 19)),
        ("0.5.x", (0, 5, 0), (0, 5, 10**6)),
    ],
)
def test_what_a_text_says(text, first, last):
    version = Version.read(text)
    assert (version.first, version.last, str(version)) == (first, last, text)


@pytest.mark.parametrize("text", ["2026", "2026-07 fork", "main 2026-08", "fork 2026-09", "", "9" * 5000 + ".1"])
def test_no_release(text):
    version = Version.read(text)
    assert version.first is None
    assert version.may_be(since=(0, 17), before=(0, 18))
    assert not version.is_surely(since=(0, 17))
    with pytest.raises(InvalidSetting, match="no release"):
        Version.asked(text, knob="engine")


def test_bounds():
    version = Version.read("0.19.1")
    assert version.is_surely(since=(0, 19), before=(0, 20))
    assert not version.may_be(since=(0, 20))
    assert not version.may_be(before=(0, 19, 1))
    vague = Version.read("0.1x")
    assert vague.may_be(before=(0, 11))
    assert not vague.is_surely(before=(0, 11))
    assert not vague.may_be(since=(0, 20))
