"""Which engine and release a start is asked of: ``vllm==0.19``, or a name alone for the newest that is known."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tonnage.errors import InvalidSetting, UserError
from tonnage.peers.engines import SGLANG, TRTLLM, VLLM, close_to
from tonnage.peers.version import Version

FLAG = "--engine"
_BUILD = re.compile(r"b?(\d{3,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One engine whose starts are predicted: its names, its first release, and the newest whose rules are known."""

    name: str
    title: str
    aliases: tuple[str, ...]
    newest: str
    oldest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An engine and a release. ``is_newest``: no release was named."""

    known: Known
    version: Version
    is_newest: bool

    @property
    def name(self) -> str:
        return self.known.name

    @property
    def told(self) -> str:
        """``vLLM 0.19``"""
        return f"{self.known.title} {self.version}"

    @property
    def is_beyond(self) -> bool:
        """Whether the release is newer than any whose rules are known."""
        return is_beyond(self.known, self.version)


KNOWN = (
    Known(name=VLLM.name, title=VLLM.title, aliases=VLLM.aliases, newest=VLLM.version, oldest="0.1"),
    Known(name=SGLANG.name, title=SGLANG.title, aliases=SGLANG.aliases, newest=SGLANG.version, oldest="0.1"),
    Known(name=TRTLLM.name, title=TRTLLM.title, aliases=TRTLLM.aliases, newest="1.2", oldest="0.5"),
    Known(name="llamacpp", title="llama.cpp", aliases=("llama.cpp", "llama-cpp", "llama_cpp", "lcpp"), newest="b9900"),
)


def read_engine(text: str, *, flag: str = FLAG) -> Asked:
    """Raises ``UserError`` for an engine that is not known, ``InvalidSetting`` for what is no release."""
    name, equals, version = text.strip().partition("=")
    known = find_known(name, typed=f"{flag} {text}")
    if equals and not version.startswith("="):
        raise InvalidSetting(
            flag, text, "a release stands behind two equals signs", remedy=f"write {known.name}=={version}"
        )
    version = version.removeprefix("=").strip()
    if equals and not version:
        raise InvalidSetting(flag, text, "no release behind the name", remedy=f"write {known.name}=={known.newest}")
    if not equals:
        return Asked(known=known, version=newest_of(known), is_newest=True)
    return Asked(known=known, version=version_of(known, version, flag=flag), is_newest=False)


def find_known(name: str, *, typed: str) -> Known:
    """The engine of that name or alias. Raises ``UserError`` with what is close to it."""
    wanted = name.strip().lower()
    spellings = {each: known for known in KNOWN for each in (known.name, *known.aliases)}
    if wanted in spellings:
        return spellings[wanted]
    raise UserError(
        f"{typed}: there are no rules of an engine {name.strip()!r} here{close_to(wanted, spellings)}",
        need=f"one of {', '.join(known.name for known in KNOWN)}",
        remedy=f"write for example {FLAG} vllm==0.19",
    )


def newest_of(known: Known) -> Version:
    """The newest release whose rules are known."""
    return version_of(known, known.newest)


def is_beyond(known: Known, version: Version) -> bool:
    """Whether ``version`` is surely newer than any whose rules are known."""
    newest = newest_of(known)
    return version.first is not None and newest.last is not None and version.first > newest.last


def version_of(known: Known, text: str, *, flag: str = FLAG) -> Version:
    """A release; llama.cpp numbers its builds."""
    build = _BUILD.fullmatch(text) if known.name == "llamacpp" else None
    if build is None and known.name == "llamacpp":
        raise InvalidSetting(flag, text, "no build has such a number", remedy="write one such as b9265")
    if build is None:
        version = Version.asked(text, knob=flag)
        if version.may_be(since=Version.read(known.oldest).first):
            return version
        remedy = f"write {known.oldest} or a later one, such as {known.newest}"
        raise InvalidSetting(flag, text, f"{known.title} began with {known.oldest}", remedy=remedy)
    number = (int(build[1]), 0, 0)
    return Version(text=text, first=number, last=number)
