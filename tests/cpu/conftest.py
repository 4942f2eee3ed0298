"""What several files here need: a small model, and a small device."""

from __future__ import annotations

import pytest
from tiny import save_tiny_llama

from tonnage.device.host import HostDriver

PAGE = 2**16


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Folder of the tiny model: 2 layers, 4 query and 2 KV heads, 256 positions."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def driver():
    """64 pages of 64 KiB; whatever a test made of them is given back when it ends."""
    driver = HostDriver(64 * PAGE, page_bytes=PAGE)
    yield driver
    assert driver.close() == ()
