"""Flags of other engines typed at our verbs, as habit has it: whose each is, and what to write here instead."""

from __future__ import annotations

from collections.abc import Collection


def told_of(flag: str, own: Collection[str]) -> str | None:
    """Whose flag it is and what to write, one sentence each; None where no engine has it.

    ``own``: the flags of the verb, with their dashes.
    """
    from tonnage.peers.engines import ENGINES

    name = flag.lstrip("-").replace("-", "_")
    found = {engine.title: write for engine in ENGINES if (write := _write(engine.name, name, own))}
    if not found:
        return None
    ways = list(dict.fromkeys(found.values()))
    plain = [way for way in ways if way.startswith("write --")] or [way for way in ways if way != _LINT] or ways
    *others, last = found
    whose = f"{', '.join(others)} and {last}" if others else last
    return f"{flag} is a flag of {whose}. To change: {'; or '.join(plain)}"


_LINT = "leave it out; tonnage lint reads whole commands: tonnage lint --device H100 -- vllm serve MODEL ..."


def _write(engine: str, name: str, own: Collection[str]) -> str | None:
    """What to write for ``name`` of one engine; None where it has no such flag."""
    from tonnage.peers import read
    from tonnage.peers.commands import known
    from tonnage.peers.own_settings import OWN
    from tonnage.peers.table import KNOBS, Match

    #: Readers after which the value that was typed may stay as it is.
    alike = (read.count, read.vllm_count, read.sglang_count, read.vllm_length, read.dtype)
    for knob in KNOBS:
        if knob.engine.name != engine or name not in (knob.name, *knob.aliases):
            continue
        ours = knob.instead or f"--{knob.ours.replace('_', '-')}"
        if knob.instead or (knob.match is Match.EXACT and knob.read in alike and not knob.is_switch):
            return f"write {ours}" if ours in own else _LINT
        if knob.ours and "--like" in own:
            return f"write --like {knob.full_name}{'' if knob.is_switch else '=VALUE'}"
    if "--engine" in own and any(name in (knob.name, *knob.aliases) for knob in OWN[engine]):
        return f"with --engine {engine}, write --like {engine}:{name}=VALUE"
    return _LINT if name in known.names(engine) - known.FRONT_END else None
