"""What ``tonnage run`` is asked to do: prompts from the command line or from JSON lines.

A broken line is a ``Failure`` with its number; the lines around it are read all the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from tonnage.errors import InputError, TonnageError
from tonnage.sampling import SamplingParams

SAMPLING_KEYS = frozenset(each.name for each in fields(SamplingParams))
KEYS = SAMPLING_KEYS | {"id", "prompt", "messages"}
#: How other engines' requests ask for several ways on, of which the best is kept.
_BEAM_KEYS = ("num_beams", "beam_width", "use_beam_search", "best_of")
#: Digits that a token id may be written with, zeros in front among them.
MAX_ID_DIGITS = 100
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_EXAMPLE = '{"prompt": "Hello"}'
_WRITE_ONE = f"write one object a line, such as {_EXAMPLE}"
_WRITE_MESSAGES = 'write "messages": [{"role": "user", "content": "Hello"}]'

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as it was read; exactly one of ``prompt`` and ``messages`` is given. ``where``: "line 3"."""

    id: str
    where: str
    params: SamplingParams
    prompt: str | None = None
    messages: list[Message] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that did not finish, and why; ``id`` is None where none could be read."""

    where: str
    id: str | None
    why: str

    def told(self) -> str:
        return f"{self.where}{f' (id {self.id})' if self.id else ''}: {self.why}"


@dataclass(slots=True)
class Asks:
    """Everything that was read. ``ignored`` counts keys of input lines that mean nothing here.

    typed: the prompts were typed by hand, so that each answer is wanted whole.
    """

    asks: list[Ask] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    typed: bool = False

    @property
    def total(self) -> int:
        return len(self.asks) + len(self.failures)


def from_prompts(prompts: Sequence[str], *, sampling: Mapping[str, Any] = _NOTHING) -> Asks:
    """One request a ``--prompt``. ``sampling``: fields of ``SamplingParams`` that the flags gave."""
    params = SamplingParams(**sampling)
    asks = [
        Ask(id=f"prompt-{n}", where=f"--prompt {n}", prompt=text, params=params) for n, text in enumerate(prompts, 1)
    ]
    return Asks(asks, typed=True)


def from_lines(lines: Iterable[bytes], *, file: str, sampling: Mapping[str, Any] = _NOTHING) -> Asks:
    """One request a line; blank lines are passed over. Raises ``InputError`` where there is nothing but blank lines.

    A line's keys count before ``sampling``, what the flags gave; null is as good as no key.
    """
    found, seen = Asks(), dict[str, int]()
    for number, raw in enumerate(lines, 1):
        if raw.strip() in (b"", b"\xef\xbb\xbf"):
            continue
        given: dict[str, Any] = {}
        try:
            given = _object(raw)
            ask = _ask(given, number, seen, sampling)
        except TonnageError as broken:
            known = given.get("id")
            name = None if known is None else str(known)
            found.failures.append(Failure(where=f"line {number}", id=name, why=str(broken)))
            continue
        found.asks.append(ask)
        found.ignored.update(given.keys() - set(KEYS))
    if not found.total:
        raise InputError(f"{file} holds no requests", value=file, remedy=_WRITE_ONE)
    return found


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as fault:
        raise InputError(f"not UTF-8 text (byte {fault.start + 1})", remedy="write the line as UTF-8") from None
    except json.JSONDecodeError as fault:
        raise InputError(f"not JSON at column {fault.colno} ({fault.msg})", remedy=_WRITE_ONE) from None
    except (ValueError, RecursionError) as fault:
        raise InputError(f"not JSON ({fault})", remedy=_WRITE_ONE) from None
    if not isinstance(value, dict):
        raise InputError(f"not an object such as {_EXAMPLE}", remedy="write one object a line")
    return value


def _ask(given: dict[str, Any], number: int, seen: dict[str, int], sampling: Mapping[str, Any]) -> Ask:
    name = _id(given.get("id", f"line-{number}"))
    if name in seen:
        remedy = "give each line an id of its own, or none"
        raise InputError(f"id {name!r} is that of line {seen[name]} too", remedy=remedy)
    prompt, messages = given.get("prompt"), given.get("messages")
    if (prompt is None) == (messages is None):
        both = prompt is not None
        remedy = "leave one of them out" if both else 'add "prompt": "Hello"'
        raise InputError('needs either "prompt" or "messages"' + (", not both" if both else ""), remedy=remedy)
    if prompt is not None and not isinstance(prompt, str):
        raise InputError('"prompt" is not text', remedy='write "prompt": "Hello"')
    _refuse_beams(given)
    ask = Ask(
        id=name,
        where=f"line {number}",
        prompt=prompt,
        messages=None if messages is None else _messages(messages),
        params=_params(given, sampling),
    )
    seen[name] = number
    return ask


def _refuse_beams(given: Mapping[str, Any]) -> None:
    """Beams are no key that may be passed over: the text would be another one. A single beam is none."""
    for key in _BEAM_KEYS:
        value = given.get(key)
        if value is True or (value not in (None, False, 1) and not (key == "best_of" and value == given.get("n"))):
            raise InputError(
                f'"{key}": beam search is not supported, a sequence goes on in one way',
                remedy='leave it out, or ask for independent samples with "n"',
            )


def _id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise InputError('"id" is neither text nor a whole number', remedy='write "id": "a", or leave it out')
    return str(value)


def _params(given: Mapping[str, Any], sampling: Mapping[str, Any]) -> SamplingParams:
    own = {key: given[key] for key in SAMPLING_KEYS & given.keys() if given[key] is not None}
    if isinstance(own.get("logit_bias"), dict):
        own["logit_bias"] = {_token(key): value for key, value in own["logit_bias"].items()}
    return SamplingParams(**{**sampling, **own})


def _token(key: str) -> int | str:
    """A token id, which JSON can only write as text; anything else is left for ``SamplingParams`` to refuse. Python
    makes no number of some thousand digits."""
    return int(key) if key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS else key


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise InputError('"messages" is not a list of messages', remedy=_WRITE_MESSAGES)
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            what = f'"messages"[{place}] is not an object with text under "role" and "content"'
            raise InputError(what, remedy=_WRITE_MESSAGES)
    return [{"role": message["role"], "content": message["content"]} for message in value]
