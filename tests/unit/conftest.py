"""Tests here run in every process, and once more in one where torch and numpy cannot be imported (test_imports.py)."""

from __future__ import annotations

import without_engine

if without_engine.is_asked():
    without_engine.block()
