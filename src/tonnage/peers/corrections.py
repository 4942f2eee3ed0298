"""Differences between a start-up log and its prediction, kept for the next prediction on the same machine.

A correction is data with a name: the engine and its minor release, the card, the ranks, and the bytes by which each
term was larger in the log than the rules said. It is applied where all of these are the same, to the terms of which
the rules say what they said then, and the prediction says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt
from pathlib import Path
from typing import Any

from tonnage.errors import InputError
from tonnage.files import to_read, to_write, why, write_whole
from tonnage.peers.launch import Launch
from tonnage.peers.start import Count, Start, Term
from tonnage.peers.version import Version
from tonnage.terms import Quantity, Source
from tonnage.units import MiB, format_bytes

SCHEMA = "tonnage.corrections/2"
#: How a note about it begins.
APPLIED = "corrected by a log: "
#: Terms that depend on the model and not on the machine, or are what is left: a difference is not carried over.
NOT_CARRIED = ("pool", "free", "left", "rounding")
#: Half of the last digit of a log: its figures are rounded to hundredths of a GiB.
ROUNDING_BYTES = 6 * MiB
#: Terms that are the machine's: a difference in them holds for other models on it too.
OF_THE_MACHINE = ("non-torch", "context")
_MOST = 1_000_000
_FIELDS = ("engine", "minor", "card", "tp", "pp", "model", "log", "terms", "rules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """``terms``: name -> bytes to add to what the rules say. ``log``: the log's name, and a hash of its text.

    ``rules``: name -> bytes that the rules said for the log's own start. Where they say something else, other settings
    decide (no graphs, fewer sequences) or the rules are other ones: then the difference says nothing.
    """

    engine: str
    minor: str
    card: str
    tp: int
    pp: int
    model: str
    log: str
    terms: Mapping[str, int]
    rules: Mapping[str, int]

    @property
    def key(self) -> tuple[str, str, str, int, int, str]:
        return self.engine, self.minor, self.card, self.tp, self.pp, self.model


def minor_of(version: Version) -> str:
    """``0.19.1`` as ``0.19``: what a correction is kept for. Empty where the release is not known to that."""
    if version.first is None or version.last is None or version.first[:2] != version.last[:2]:
        return ""
    return ".".join(str(number) for number in version.first[:2])


def key_of(launch: Launch) -> tuple[str, str, str, int, int, str]:
    """What a correction must have the same to be applied to a launch."""
    minor, rank = minor_of(launch.version), launch.rank
    return launch.engine, minor, launch.card.name, rank.tp, rank.pp, launch.config.name


def corrected(start: Start, corrections: Sequence[Correction]) -> Start:
    """The prediction with the difference of the last fitting correction: the terms that the log told carry it, pool,
    tokens and checks are those of the rules with it, and a note says which log it was. The same object where none fits.

    One of the same model counts before one of another, of which only what is the machine's is taken. What lies inside
    the engine's budget is asked of the rules again as if the weights were so much larger: to a budget bytes are bytes.
    The interval of a corrected term is that of the log's rounding, its source ``MEASURED`` with the log as reference;
    the pool keeps the errors of the terms that were not corrected.
    """
    key = key_of(start.launch)
    fitting = [each for each in corrections if each.key[:-1] == key[:-1]]
    if not fitting or not key[1]:
        return start
    same = [each for each in fitting if each.model == key[-1]]
    correction = same[-1] if same else _of_the_machine(fitting[-1])
    moved = {term.name: _moved(term, correction) for term in start.terms if _is_told(term, correction)}
    if not moved:
        return start
    told = [term for term in start.terms if term.name in moved and term.is_budgeted]
    known = [term.bytes for term in told]
    again = _with_more(start, sum(moved[term.name].bytes - term.bytes.bytes for term in told))
    pool = _close(again.pool, known, correction)
    return replace(
        again,
        launch=start.launch,
        terms=_partition([_term(term, start, moved, known, correction) for term in again.terms], start, moved),
        pool=pool,
        tokens=_scaled(again.tokens, again.pool, pool),
        logged_tokens=_scaled(again.logged_tokens, again.pool, pool),
        concurrency=_scaled(again.concurrency, again.pool, pool),
        notes=(*again.notes, _note(start, moved, correction)),
    )


def _note(start: Start, moved: Mapping[str, Quantity], correction: Correction) -> str:
    told = ", ".join(f"{name} {_signed(each.bytes - start.term(name).bytes.bytes)}" for name, each in moved.items())
    left = [term.name for term in start.terms if term.name in correction.terms and term.name not in moved]
    apart = f"; other settings than the log's decide {', '.join(left)}, left as the rules have it" if left else ""
    return f"{APPLIED}{correction.log}: {told}{apart}"


def _with_more(start: Start, more: int) -> Start:
    """The start by its rules with weights of so many bytes more."""
    if not more:
        return start
    from tonnage.peers.predict import predict

    weights = start.launch.weights
    shifted = replace(
        weights, bytes=max(0, weights.bytes + more), low=max(0, weights.low + more), high=max(0, weights.high + more)
    )
    return predict(replace(start.launch, weights=shifted))


def _partition(terms: Sequence[Term], start: Start, moved: Mapping[str, Quantity]) -> tuple[Term, ...]:
    """The terms with the sum of the start's: what is left, the last that no log told, takes the difference."""
    over = sum(term.bytes.bytes for term in terms) - sum(term.bytes.bytes for term in start.terms)
    rest = [place for place, term in enumerate(terms) if term.name not in moved and "pool" not in term.name.lower()]
    return tuple(
        replace(term, bytes=_less(term.bytes, over)) if rest and place == rest[-1] else term
        for place, term in enumerate(terms)
    )


def _term(
    term: Term, start: Start, moved: Mapping[str, Quantity], known: Sequence[Quantity], correction: Correction
) -> Term:
    """A term of the start that was asked again: as the log told it, or as it was; the pools and the rest are new."""
    if term.name in moved:
        return replace(term, bytes=moved[term.name])
    if "pool" in term.name.lower():
        return replace(term, bytes=_close(term.bytes, known, correction))
    if not _is_carried(term.name):
        return term
    return next((old for old in start.terms if old.name == term.name), term)


def _of_the_machine(correction: Correction) -> Correction:
    terms = {name: value for name, value in correction.terms.items() if name in OF_THE_MACHINE}
    return replace(correction, terms=terms)


def _is_carried(name: str) -> bool:
    return not any(word in name.lower() for word in NOT_CARRIED)


def _is_told(term: Term, correction: Correction) -> bool:
    is_same = correction.rules.get(term.name) == term.bytes.bytes
    return is_same and term.name in correction.terms and _is_carried(term.name)


def _moved(term: Term, correction: Correction) -> Quantity:
    best = max(0, term.bytes.bytes + correction.terms[term.name])
    low, high = max(0, best - ROUNDING_BYTES), best + ROUNDING_BYTES
    return Quantity(bytes=best, low=low, high=high, source=Source.MEASURED, ref=correction.log)


def _close(quantity: Quantity, known: Sequence[Quantity], correction: Correction) -> Quantity:
    """The interval of a pool some of whose terms (``known``, by the rules) are now known to the log's rounding: their
    errors are taken out of its own, as independent ones. What is left is of terms that no log told."""
    down = _without(quantity.bytes - quantity.low, [each.high - each.bytes for each in known])
    up = _without(quantity.high - quantity.bytes, [each.bytes - each.low for each in known])
    room = 4 * ROUNDING_BYTES
    return replace(
        quantity,
        low=max(quantity.low, quantity.bytes - down - room),
        high=min(quantity.high, quantity.bytes + up + room),
        source=quantity.source if down or up else Source.MEASURED,
        ref=f"less {correction.log}",
    )


def _without(error: int, parts: Sequence[int]) -> int:
    return isqrt(max(0, error * error - sum(part * part for part in parts)))


def _less(quantity: Quantity, taken: int) -> Quantity:
    return replace(quantity, bytes=quantity.bytes - taken, low=quantity.low - taken, high=quantity.high - taken)


def _scaled(count: Count | None, before: Quantity, after: Quantity) -> Count | None:
    """Tokens or sequences with the interval of the pool."""
    if count is None or not before.bytes:
        return count
    low, high = (int(Fraction(count.best * end, before.bytes)) for end in (after.low, after.high))
    return Count(best=count.best, low=min(low, count.best), high=max(high, count.best))


def _signed(value: int) -> str:
    return f"+{format_bytes(value)}" if value >= 0 else format_bytes(value)


def default_path() -> Path:
    """The machine's file: under ``XDG_DATA_HOME``, or ``~/.local/share``."""
    base = os.environ.get("XDG_DATA_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share"
    return root / "tonnage" / "corrections.json"


def load_corrections(path: str | os.PathLike[str] | None = None) -> tuple[Correction, ...]:
    """The corrections of ``path``, or of this machine's file; none where the latter is not there.

    Raises ``InputError`` for a file that cannot be read, or was not written by ``tonnage explain-log --save``."""
    try:
        file = default_path() if path is None else Path(path)
    except RuntimeError:  # no home
        return ()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is None:
            return ()
        raise InputError(f"there is no file {file}", value=str(file), remedy="check the path") from None
    except (OSError, UnicodeDecodeError) as fault:
        raise InputError(f"{file} cannot be read: {why(fault)}", value=str(file), remedy=to_read(fault)) from None
    return parse(text, file=str(file))


def parse(text: str, *, file: str) -> tuple[Correction, ...]:
    """Raises ``InputError`` for text that holds no corrections."""
    try:
        document = json.loads(text) if len(text) <= _MOST else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _malformed(file, f"it has no schema {SCHEMA!r}")
    listed = document.get("corrections")
    if not isinstance(listed, list):
        raise _malformed(file, "corrections is not a list")
    return tuple(_read(entry, file, place) for place, entry in enumerate(listed))


def _read(entry: object, file: str, place: int) -> Correction:
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise _malformed(file, f"corrections[{place}] does not have the fields {', '.join(_FIELDS)}")
    terms = entry["terms"]
    rules = entry["rules"]
    texts = all(isinstance(entry[name], str) for name in ("engine", "minor", "card", "model", "log"))
    counts = all(_is_whole(entry[name]) for name in ("tp", "pp"))
    sizes = all(isinstance(each, dict) and all(map(_is_whole, each.values())) for each in (terms, rules))
    if not (texts and counts and sizes):
        raise _malformed(file, f"a value of corrections[{place}] is of the wrong kind")
    return Correction(**entry)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62


def _malformed(file: str, what: str) -> InputError:
    return InputError(
        f"{file} holds no corrections: {what}",
        value=file,
        remedy="name a file that tonnage explain-log --save wrote, or delete it",
    )


def save_correction(correction: Correction, path: str | os.PathLike[str] | None = None) -> Path:
    """Keep it in ``path`` or in the machine's file, in the place of one with the same key. Raises ``InputError`` where
    that cannot be done."""
    file = default_path() if path is None else Path(path)
    kept = load_corrections(file) if file.exists() else ()
    text = dumps([*(each for each in kept if each.key != correction.key), correction])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text, replaces=True)
    except OSError as fault:
        raise InputError(f"{file} cannot be written: {why(fault)}", value=str(file), remedy=to_write(fault)) from None
    return file


def dumps(corrections: Sequence[Correction]) -> str:
    """Canonical JSON text of a file of corrections."""
    listed: list[dict[str, Any]] = [
        {name: dict(value) if isinstance(value := getattr(each, name), Mapping) else value for name in _FIELDS}
        for each in corrections
    ]
    return json.dumps({"schema": SCHEMA, "corrections": listed}, indent=2, sort_keys=True) + "\n"
