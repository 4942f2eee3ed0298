"""Flags that let a refused start pass: each tried by predicting again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

from tonnage.errors import InvalidSetting
from tonnage.peers.launch import Launch
from tonnage.peers.start import Check, Start
from tonnage.peers.vllm.pages import longest, pages_of
from tonnage.peers.vllm.setup import resolve

#: Shares of the card that are worth trying, and numbers of sequences.
_SHARES = (Fraction(90, 100), Fraction(92, 100), Fraction(95, 100), Fraction(97, 100))
_SEQUENCES = (256, 128, 64, 16)
#: Lengths below what fits by best guess: the interval must allow it too.
_LENGTH_STEP = 256
_MOST = 3


def with_remedies(start: Start, again: Callable[[Launch], Start]) -> Start:
    """The same start, each failing check with what helps."""
    if all(check.passes is not False for check in start.checks):
        return start
    text = "; ".join(_tried(start, again))
    return replace(start, checks=tuple(_with(check, text) for check in start.checks))


def _with(check: Check, text: str) -> Check:
    if check.passes is not False:
        return check
    return replace(check, remedy=text or "no single flag was found that helps: more cards, or a smaller model")


def _tried(start: Start, again: Callable[[Launch], Start]) -> Iterator[str]:
    found = 0
    for text, launch in _candidates(start, again):
        if found < _MOST and _starts(again, launch):
            found += 1
            yield text


def _starts(again: Callable[[Launch], Start], launch: Launch) -> bool:
    """Whether it may start; a change that the engine refuses beside the other settings helps nobody."""
    try:
        return again(launch).starts is not False
    except InvalidSetting:
        return False


def _candidates(start: Start, again: Callable[[Launch], Start]) -> Iterator[tuple[str, Launch]]:
    launch, setup = start.launch, resolve(start.launch)
    if (auto := _longest(start)) and auto < setup.max_model_len:
        yield f"--max-model-len {auto}", _changed(launch, max_model_len=auto)
    for share in _SHARES:
        if share > setup.utilisation:
            change = _changed(launch, gpu_memory_utilization=share)
            if _starts(again, change):
                yield f"--gpu-memory-utilization {float(share):g}", change
                break
    for number in _SEQUENCES:
        if number < setup.max_num_seqs:
            change = _changed(launch, max_num_seqs=number)
            if _starts(again, change):
                yield f"--max-num-seqs {number}", change
                break
    if launch.kv_dtype is None and not setup.launch.get("kv_cache_dtype"):
        yield "--kv-cache-dtype fp8", replace(launch, kv_dtype="fp8")


def _longest(start: Start) -> int:
    """Tokens that fit by best guess, in whole steps; 0 where there is no pool at all."""
    setup = resolve(start.launch)
    pages = pages_of(setup)
    if pages is None:
        return 0
    return longest(pages, setup, start.pool.bytes // pages.block_bytes) // _LENGTH_STEP * _LENGTH_STEP


def _changed(launch: Launch, **settings: object) -> Launch:
    changed: Mapping[str, object] = MappingProxyType({**launch.settings, **settings})
    return replace(launch, settings=changed)
