"""Words of a command that start an engine: which engine, which model, which flags."""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tonnage.peers.commands import kinds
from tonnage.peers.commands.command import Command, Flag, Place
from tonnage.peers.commands.images import engine_of_image, may_be_vllm, version_of_image
from tonnage.peers.commands.kinds import Kind
from tonnage.peers.commands.shell import Simple, Word, simple_commands

#: Modules that are servers, by the engine that they belong to.
MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.openai": "vllm",
    "sglang.launch_server": "sglang",
    "tensorrt_llm.commands.serve": "trtllm",
}
_PIN = re.compile(r"(vllm|sglang|tensorrt[-_]llm)(?:\[[\w,-]*\])?==(\d+(?:\.\w+)+)")
_PIN_ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm"}
_MODEL_FLAG = re.compile(r"--model(=|$)")
#: Programs that are given a command as one word, or as several.
_CARRIERS = ("eval", "tmux", "screen", "ssh", "su")
#: Shells inside shells that are followed.
_DEPTH = 4


def launches_in(simple: Simple, place: Place, where: str, *, depth: int = 0) -> list[Command]:
    """The engines that one simple command starts, those inside ``bash -c`` and ``docker run`` too."""
    from tonnage.peers.commands import docker

    words, variables = simple.words, dict(simple.variables)
    texts = [word.text for word in words]
    run = docker.run_of(texts)
    if run is not None and depth < _DEPTH:
        inner, inside = docker.container(words, run, replace(place, variables={**place.variables, **variables}))
        return container_launches(inner, inside, where, depth=depth + 1)
    place = replace(place, variables={**place.variables, **variables, **_env_words(texts)})
    script = _script(words)
    if script is not None and depth < _DEPTH:
        found = []
        for each in simple_commands(script.text, place.variables):
            found += launches_in(each, place, where, depth=depth + 1)
        return found
    begins = _begins(texts)
    if begins is None:
        return _carried(words, place, where, depth=depth + 1)
    engine, start = begins
    version = version_of_image(place.image) or _pinned(texts[:start], engine)
    return [command_of(engine, words[start:], place=place, where=where, version=version)]


def _carried(words: Sequence[Word], place: Place, where: str, *, depth: int) -> list[Command]:
    """The engines in the words of a program that runs other commands: ``eval $CMD``, ``tmux new -d "..."``."""
    name = words[0].text.rsplit("/", 1)[-1] if words else ""
    if name not in _CARRIERS or depth >= _DEPTH:
        return []
    texts = [word.text for word in words[1:]]
    found = []
    for text in [" ".join(texts)] if name == "eval" else [text for text in texts if " " in text]:
        for each in simple_commands(text, place.variables):
            found += launches_in(each, place, where, depth=depth + 1)
    return found


def container_launches(words: Sequence[Word], place: Place, where: str, *, depth: int = 0) -> list[Command]:
    """The engines that a container starts: by its words, or by the entry point of an engine's own image."""
    found = launches_in(Simple(tuple(words), {}), place, where, depth=depth) if words else []
    if found:
        return found
    engine = engine_of_image(place.image)
    if engine is None and may_be_vllm(place.image) and any(_MODEL_FLAG.match(word.text) for word in words):
        engine = "vllm"
    if engine == "vllm" and not (words and _is_other_program(words[0].text)):
        return [command_of(engine, words, place=place, where=where, version=version_of_image(place.image))]
    return []


def _is_other_program(word: str) -> bool:
    """Whether a container's first word names a program, not a flag nor a model."""
    return not word.startswith("-") and (
        word in ("bash", "sh", "sleep", "python", "python3") or word.startswith("/bin")
    )


def _begins(texts: Sequence[str]) -> tuple[str, int] | None:
    """The engine that the words start, and where its own words begin."""
    for at, text in enumerate(texts):
        name = text.rsplit("/", 1)[-1]
        after = texts[at + 1] if at + 1 < len(texts) else ""
        if name in ("vllm", "sglang") and after == "serve":
            return name, at + 2
        if name == "trtllm-serve":
            return "trtllm", at + 1 + (after == "serve")
        if text == "-m" and after in MODULES:
            return MODULES[after], at + 2
        if name == "launch_server.py" and "sglang" in text:
            return "sglang", at + 1
        if name == "api_server.py" and "vllm" in text:
            return "vllm", at + 1
    return None


def _script(words: Sequence[Word]) -> Word | None:
    """The text behind ``bash -c``, ``sh -lc`` ..."""
    for at, word in enumerate(words[:-1]):
        if re.fullmatch(r"-[a-z]*c", word.text) and at and words[at - 1].text.rsplit("/", 1)[-1] in (
            "bash", "sh", "zsh", "dash", "-l", "-e", "-x", "-ex", "-lc",
        ):  # fmt: skip
            return words[at + 1]
    return None


def _env_words(texts: Sequence[str]) -> dict[str, str]:
    """Assignments behind ``env``."""
    if not texts or texts[0].rsplit("/", 1)[-1] != "env":
        return {}
    found = {}
    for text in texts[1:]:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            break
        found[name] = value
    return found


def _pinned(texts: Sequence[str], engine: str) -> str | None:
    """A release in the words in front of the engine's, as ``uvx vllm==0.19.0`` has one."""
    for text in texts:
        pin = _PIN.search(text)
        if pin and _PIN_ENGINES[pin[1]] == engine:
            return pin[2]
    return None


def command_of(
    engine: str, words: Sequence[Word], *, place: Place | None = None, where: str = "", version: str | None = None
) -> Command:
    """The flags among ``words``, and the model."""
    flags: list[Flag] = []
    bare: list[Word] = []
    left = deque(words)
    while left:
        word = left.popleft()
        if word.text == "--":
            continue
        if _is_flag(word.text):
            flags.append(_flag(engine, word, left))
        else:
            bare.append(word)
    model = next((flag for flag in reversed(flags) if flag.name in kinds.MODEL_FLAGS[engine]), None)
    first = next((word for word in bare if word.text != "serve"), None)
    named = None if model is None or model.text is None else Word(model.text, model.unknown)
    chosen = named or first
    return Command(
        engine=engine,
        version=version,
        model=None if chosen is None else chosen.text,
        flags=tuple(flags),
        place=place or Place(),
        where=where,
        unknown=() if chosen is None else chosen.unknown,
        open_words=tuple(word for word in bare if word.unknown and word is not chosen),
    )


def _is_flag(text: str) -> bool:
    return len(text) > 1 and text.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", text)


def _flag(engine: str, word: Word, left: deque[Word]) -> Flag:
    """One flag, with the words behind it that are its value; they are taken off ``left``."""
    written, equals, value = word.text.partition("=")
    if engine == "vllm" and (level := re.fullmatch(r"-O(\d)", written)):
        return Flag(name="optimization_level", written=word.text, text=level[1])
    name, is_off = _name(engine, written)
    if equals:
        return Flag(name=name, written=written, text=value, is_off=is_off, unknown=word.unknown)
    taken = _values(engine, name, left, is_off=is_off)
    unknown = tuple(dict.fromkeys(n for each in taken for n in each.unknown))
    text = " ".join(each.text for each in taken) if taken else None
    return Flag(name=name, written=written, text=text, is_off=is_off, unknown=unknown)


def _name(engine: str, written: str) -> tuple[str, bool]:
    """The canonical name; ``--no-enable-x`` is ``enable_x`` switched off; an abbreviation is its only long form."""
    name = kinds.canonical(engine, written)
    if written.startswith(("--no-", "--no_")):
        return kinds.canonical(engine, written[5:]), True
    if written.startswith("--") and kinds.kind_of(engine, name) is None and "." not in name and len(name) > 3:
        from tonnage.peers.commands import known

        names = known.names(engine)
        if name not in names:
            longer = {kinds.canonical(engine, each) for each in names if each.startswith(name)}
            return (longer.pop() if len(longer) == 1 else name), False
    return name, False


def _values(engine: str, name: str, left: deque[Word], *, is_off: bool) -> list[Word]:
    if not left or _is_flag(left[0].text):
        return []
    if kinds.is_switch(engine, name) or is_off:
        return [left.popleft()] if left[0].text.lower() in ("true", "false") else []
    taken = [left.popleft()]
    several = kinds.kind_of(engine, name) is Kind.COUNTS or name in ("served_model_name", "lora_modules", "middleware")
    while several and left and not _is_flag(left[0].text):
        taken.append(left.popleft())
    return taken


def close_to(engine: str, name: str) -> str | None:
    """The flag that was probably meant."""
    from tonnage.peers.commands import known

    near = difflib.get_close_matches(name, sorted(known.names(engine)), n=1, cutoff=0.75)
    return near[0] if near else None


def with_options(command: Command, file: str, options: Mapping[str, object]) -> Command:
    """The command with the flags of an options file in front of its own, which win where both say something."""
    from tonnage.peers.commands.options import flags_of

    read = flags_of(command.engine, options, file=file)
    model = command.model or next((f.text for f in read if f.name in kinds.MODEL_FLAGS[command.engine]), None)
    return replace(command, flags=(*read, *command.flags), model=model, files=(*command.files, file))
