"""Tests here need neither torch nor numpy; ``make test`` runs them where neither can be imported."""

from __future__ import annotations

import without_engine

if without_engine.is_asked():
    without_engine.block()
