"""Tests here need neither torch nor numpy; ``make test`` runs them where neither can be imported."""

from __future__ import annotations

import os

import without_engine

if without_engine.is_asked():
    without_engine.block()

# What a start-up log has taught this machine is nothing that a test should find.
os.environ["XDG_DATA_HOME"] = "/nonexistent"
# Nor how wide the terminal is in which the tests were started.
os.environ.pop("COLUMNS", None)
