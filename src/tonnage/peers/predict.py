"""What another engine's start would give: one row for each engine whose rules are known."""

from __future__ import annotations

from importlib import import_module

from tonnage.errors import UserError
from tonnage.peers.launch import Launch
from tonnage.peers.start import Start

#: Engine -> the function that knows its rules, ``Launch`` -> ``Start``. Imported when it is first asked.
RULES = {
    "vllm": "tonnage.peers.vllm.start:predict",
    "sglang": "tonnage.peers.sglang.start:predict",
    "trtllm": "tonnage.planner.trtllm:predict",  # its derivation is fed by the planner, a row above
    "llamacpp": "tonnage.peers.llamacpp.start:predict",
}


def predict(launch: Launch) -> Start:
    """The start of one rank by the engine's own rules of that release.

    A start that its engine would refuse is no error: ``Start.checks`` says so. Raises ``UserError`` for an engine
    that is not known, and ``InvalidSetting`` for a setting that the engine would not read.
    """
    if launch.engine not in RULES:
        raise UserError(
            f"there are no rules of an engine {launch.engine!r} here",
            need=f"one of {', '.join(RULES)}",
            remedy="write for example --engine vllm==0.19",
        )
    module, _, name = RULES[launch.engine].partition(":")
    found: Start = getattr(import_module(module), name)(launch)
    return found
