"""Fixtures of the tests that need torch."""

from __future__ import annotations

import pytest
from tiny import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Folder of the tiny model: 2 layers, 4 query and 2 KV heads, 256 positions."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))
