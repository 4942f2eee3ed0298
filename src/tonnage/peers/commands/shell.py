"""Shell text cut into simple commands, as far as a launch needs it: quotes, comments, continuations, variables, arrays.

Nothing is ever run. What only a run could tell (``$(...)``, a variable that nothing gives a value to) stays in the
word as it was typed, and the word says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tonnage.errors import InputError

#: Characters of a file of commands that are read. Longer ones are data, not commands.
MOST_CHARACTERS = 1_000_000
#: Characters that all words may come to once variables are followed: values that name themselves twice double.
MOST_EXPANDED = 4 * MOST_CHARACTERS
#: Times that variables may stand in one another's values.
_DEPTH = 8
#: Characters of a word in which variables are looked for.
_LONGEST_WORD = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)
_ENDS = ";&|\n()"
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n")
_ASSIGNS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_ARRAY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_ELEMENTS = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}")
_GIVES = re.compile(r"\$\{([A-Za-z_]\w*):?=([^}]*)\}")
_BLANKS = re.compile(r"[ \t\n]+")
_CONTINUES = "\\\n"


@dataclass(frozen=True, slots=True)
class Word:
    """One word after quotes and variables. ``unknown``: variables in it without a value."""

    text: str
    unknown: tuple[str, ...] = ()


@dataclass(slots=True)
class Room:
    """Characters that the values of variables may still come to, in all of a text."""

    left: int = MOST_EXPANDED

    def take(self, text: str) -> str:
        """``text`` as it is. Raises ``InputError`` where it is more than there is room for."""
        self.left -= len(text)
        if self.left < 0:
            raise InputError(
                f"its variables come to more than {MOST_EXPANDED:,} characters", remedy="give the command alone"
            )
        return text


@dataclass(frozen=True, slots=True)
class Simple:
    """One simple command: its assignments, its words, and the line that it begins on."""

    words: tuple[Word, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    line: int = 1


def simple_commands(text: str, given: Mapping[str, str] | None = None) -> list[Simple]:
    """Every simple command of ``text`` in order. ``given``: values of variables that the text does not set.

    Assignments that stand alone, and those of ``export``, hold for the commands after them. Raises ``InputError`` for
    a quote that never ends, and for text that is too long.
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{len(text):,} characters are too many for a launch command", remedy="give the command alone")
    known = dict(given or {})
    lists: dict[str, list[Word]] = {}
    found = []
    room = Room()
    for line, raw in _Lexer(text).commands():
        words = _expanded(raw, known, lists, room)
        if words and words[0].text in ("export", "declare", "set", "readonly", "local"):
            words = [word for word in words[1:] if not word.text.startswith("-")]
            known.update(_taken(words)[0])
            continue
        variables, rest = _taken(words)
        if rest:
            found.append(Simple(tuple(rest), variables, line))
        else:
            known.update(variables)
    return found


def _taken(words: list[Word]) -> tuple[dict[str, str], list[Word]]:
    """The assignments in front, and what is left. One whose value is not known assigns nothing."""
    variables: dict[str, str] = {}
    for place, word in enumerate(words):
        match = _ASSIGNMENT.fullmatch(word.text)
        if match is None:
            return variables, words[place:]
        if not word.unknown:
            variables[match[1]] = (variables.get(match[1], "") if match[2] else "") + match[3]
    return variables, []


#: A word as it was read: pieces of text, each with the quote that it stood in. In no quotes ("") variables count and
#: their values are cut at blanks; in double quotes they count; in single quotes and behind a backslash nothing does.
_Raw = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Array:
    """``NAME=(...)``; ``adds``: it was ``NAME+=(...)``."""

    name: str
    adds: bool
    words: list[_Raw]


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._lines = [match.start() for match in re.finditer("\n", self._text)]
        self._at = 0

    def commands(self) -> list[tuple[int, list[_Raw | _Array]]]:
        found: list[tuple[int, list[_Raw | _Array]]] = []
        words: list[_Raw | _Array] = []
        begins = 0
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter in " \t":
                self._at += 1
            elif self._text.startswith(_CONTINUES, self._at):
                self._at += 2
            elif letter == "#" and self._at_word_start():
                self._skip_line()
            elif letter in "<>" or (letter == "&" and self._text[self._at + 1 : self._at + 2] == ">"):
                self._redirection(words)
            elif letter in _ENDS:
                self._at += 1
                if words:
                    found.append((self._line(begins), words))
                words = []
            else:
                begins = begins if words else self._at
                word = self._word()
                array = _ARRAY.fullmatch(word[0][0]) if len(word) == 1 else None
                is_array = array is not None and self._text.startswith("(", self._at)
                words.append(_Array(array[1], bool(array[2]), self._elements()) if array and is_array else word)
        if words:
            found.append((self._line(begins), words))
        return found

    def _elements(self) -> list[_Raw]:
        """What stands in the brackets of an array."""
        words: list[_Raw] = []
        self._at += 1
        while self._at < len(self._text) and self._text[self._at] != ")":
            letter = self._text[self._at]
            if letter == "#" and self._at_word_start():
                self._skip_line()
            elif letter in " \t\n<>" + _ENDS:
                self._at += 1
            elif self._text.startswith(_CONTINUES, self._at):
                self._at += 2
            else:
                words.append(self._word())
        self._at += 1
        return words

    def _line(self, place: int) -> int:
        from bisect import bisect_left

        return bisect_left(self._lines, place) + 1

    def _at_word_start(self) -> bool:
        return self._at == 0 or self._text[self._at - 1] in " \t" + _ENDS

    def _skip_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _redirection(self, words: list[_Raw | _Array]) -> None:
        """The operator, and the number of a stream in front of it; the target is dropped as well."""
        if document := _HEREDOC.match(self._text, self._at):
            closing = re.compile(rf"^[ \t]*{re.escape(document[2])}[ \t]*$", re.MULTILINE)
            end = closing.search(self._text, document.end())
            self._at = len(self._text) if end is None else end.end()
            return
        last = words[-1] if words else None
        if isinstance(last, list) and self._text[self._at - 1] not in " \t\n" and last[-1][0].isdigit():
            words.pop()
        while self._at < len(self._text) and self._text[self._at] in "<>&":
            self._at += 1
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        if self._at < len(self._text) and self._text[self._at] not in _ENDS:
            self._word()

    def _word(self) -> _Raw:
        pieces: _Raw = []
        plain = ""
        while self._at < len(self._text) and self._text[self._at] not in " \t<>" + _ENDS:
            letter = self._text[self._at]
            if letter in "'\"":
                pieces += [(plain, "")] if plain else []
                pieces.append((self._quoted(letter), letter))
                plain = ""
            elif self._text.startswith(_CONTINUES, self._at):
                self._at += 2
            elif letter == "\\" and self._at + 1 < len(self._text):
                pieces += [*([(plain, "")] if plain else []), (self._text[self._at + 1], "'")]
                plain = ""
                self._at += 2
            elif self._text.startswith("$(", self._at) or letter == "`":
                plain += self._substitution(letter)
            elif self._text.startswith("${", self._at):
                end = self._text.find("}", self._at)
                end = len(self._text) if end < 0 else end + 1
                plain += self._text[self._at : end]
                self._at = end
            else:
                plain += letter
                self._at += 1
        return [*pieces, (plain, "")] if plain or not pieces else pieces

    def _quoted(self, quote: str) -> str:
        start = self._at + 1
        at = start
        while at < len(self._text) and self._text[at] != quote:
            at += 2 if quote == '"' and self._text[at] == "\\" else 1
        if at >= len(self._text):
            raise InputError(f"line {self._line(self._at)}: a quote {quote} that never ends", remedy="close it")
        self._at = at + 1
        inside = self._text[start:at]
        return inside if quote == "'" else re.sub(r'\\(["\\`])', r"\1", inside.replace(_CONTINUES, ""))

    def _substitution(self, letter: str) -> str:
        """``$(...)`` or `...` whole: it stays a value that nobody knows."""
        start, depth = self._at, 0
        self._at += 1
        while self._at < len(self._text):
            now = self._text[self._at]
            self._at += 1
            depth += (now == "(") - (now == ")") if letter == "$" else 0
            if (letter == "$" and now == ")" and depth == 0) or (letter == "`" and now == "`"):
                break
        return self._text[start : self._at]


def _expanded(raw: list[_Raw | _Array], known: dict[str, str], lists: dict[str, list[Word]], room: Room) -> list[Word]:
    """The words after variables. Arrays go to ``lists``, and what ``${NAME:=VALUE}`` gives to ``known``."""
    found: list[Word] = []
    for item in raw:
        if isinstance(item, _Array):
            inside = [word for each in item.words for word in _expand(each, known, lists, room)]
            lists[item.name] = [*(lists.get(item.name, []) if item.adds else []), *inside]
            continue
        for given in (match for text, quote in item if quote != "'" for match in _GIVES.finditer(text)):
            if not known.get(given[1]) and not (value := filled(given[2], known, room=room)).unknown:
                known[given[1]] = value.text
        found += _expand(item, known, lists, room)
    return found


def _expand(raw: _Raw, known: Mapping[str, str], lists: Mapping[str, list[Word]], room: Room) -> list[Word]:
    """The words that one word becomes: none for an empty value in no quotes, several for one with blanks in it."""
    if len(raw) == 1 and raw[0][1] != "'" and (array := _ELEMENTS.fullmatch(raw[0][0])) and array[1] in lists:
        whole = lists[array[1]]
        room.take("".join(f"{word.text:16}" for word in whole))  # a word takes room, short as it may be
        return whole if raw[0][1] else [Word(part, word.unknown) for word in whole for part in word.text.split()]
    is_cut = not _ASSIGNS.match(raw[0][0]) or raw[0][1] != ""  # the value of an assignment stays one word
    texts: list[str | None] = [None]
    unknown: dict[str, None] = {}
    for text, quote in raw:
        word = Word(text) if quote == "'" else filled(text, known, room=room)
        unknown.update(dict.fromkeys(word.unknown))
        if quote or not is_cut or word.text == text or _RUNS in word.unknown:
            texts[-1] = (texts[-1] or "") + word.text
            continue
        first, *more = _BLANKS.split(word.text)
        texts[-1] = ((texts[-1] or "") + first) or texts[-1]
        texts += [part or None for part in more]
    return [Word(text, tuple(unknown)) for text in texts if text is not None]


#: What stands for a command whose output nobody knows among the names of variables without a value.
_RUNS = "$(...)"
_VARIABLE = re.compile(r"\\\$|\$(?:(?P<plain>[A-Za-z_]\w*|[@*#?\d])|\{(?P<braced>[^}]*)\}|(?P<run>\())|`")
_BRACED = re.compile(r"([A-Za-z_]\w*|\d)(?:(:?[-=])(.*)|(:?\?.*))?", re.DOTALL)


def filled(text: str, known: Mapping[str, str], depth: int = 0, *, room: Room | None = None) -> Word:
    """``text`` with its variables' values in it; those without one stay as typed and are named. ``room``: for their
    values, shared with other texts; raises ``InputError`` where they come to more."""
    room = room or Room()
    if len(text) > _LONGEST_WORD:
        return Word(text)
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[0] == "\\$":
            return "$"
        if match["run"] or match[0] == "`":
            unknown.append(_RUNS)
            return match[0]
        name, default = match["plain"], None
        if name is None:
            braced = _BRACED.fullmatch(match["braced"])
            if braced is None:
                unknown.append("${" + match["braced"] + "}")
                return match[0]
            name, default = braced[1], braced[3] if braced[2] else None
        if known.get(name):
            return room.take(known[name])
        if default is not None and depth < _DEPTH:
            inner = filled(default, known, depth + 1, room=room)
            unknown.extend(inner.unknown)
            return inner.text
        if name in known:
            return known[name]
        unknown.append(name)
        return match[0]

    done = _VARIABLE.sub(value, text) if "$" in text or "`" in text else text
    return Word(done, tuple(dict.fromkeys(unknown)))
