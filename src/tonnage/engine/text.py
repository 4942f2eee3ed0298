"""Between text and tokens: the chat template, the stop tokens, and detokenising one token at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tonnage.errors import InputError, ModelConfigError

Message = dict[str, str]


class Text:
    """The tokenizer of a model folder, with the stop tokens of its generation config."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            # Some converted tokenizers ask for a clean-up of spaces that is wrong for them, and warn about it.
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False)
        except (OSError, ValueError) as error:
            raise ModelConfigError(
                f"The tokenizer in {folder} cannot be read ({str(error).splitlines()[0]})",
                knob="MODEL",
                value=str(folder),
                remedy="copy tokenizer.json and tokenizer_config.json of the model into the folder",
            ) from None
        self.stop_ids = stop_ids(folder)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a text. Raises ``InputError`` for one that is no Unicode (half of a surrogate pair)."""
        _require_unicode(prompt, "The prompt")
        return list(self.tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Raises ``InputError``."""
        if not self.has_chat_template:
            raise InputError("This model has no chat template", remedy="send plain prompts (--no-chat)")
        for message in messages:
            for part in message.values():
                if isinstance(part, str):
                    _require_unicode(part, "A message")
        try:
            made = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # noqa: BLE001 - templates are programs of the model's authors and raise anything
            raise InputError(
                f"The chat template refused the messages ({type(error).__name__}: {error})",
                remedy="check roles and their order",
            ) from None
        return list(made["input_ids"])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


#: UTF-8 has at most four bytes a character (RFC 3629, section 3).
_MAX_CHARACTER_BYTES = 4
#: So many characters at the end of a text may be broken only because the rest of their bytes is still to come.
_MAX_UNFINISHED = _MAX_CHARACTER_BYTES - 1
#: What is kept of tokens that are no text: the first, and the last; more than twice the last are cut down to that.
_NUM_FIRST = _MAX_CHARACTER_BYTES
_NUM_LAST = _MAX_UNFINISHED + _MAX_UNFINISHED * 3


class Detokenizer:
    """Text piece by piece: ``push`` returns what a new token adds, holding back halves of a character.

    The pieces and ``flush`` joined are ``text.decode`` of all tokens. How a token reads depends on the ones before it
    (a word at the start of a text loses its space), so the last tokens that were told are decoded with it, and no
    more of them, which keeps the cost of a token constant::

        told, no longer looked at | _front: told | _rest: told up to _num_told characters, the others held back

    Two things would let the rest grow. Tokens that decode to nothing anywhere (special ones that are skipped) are
    forgotten at once. Of bytes that go on and on without an end that is whole, the middle is (``_shorten``).

    One exception: a tokenizer that falls back to single bytes decodes a run of them all or nothing, and a byte that
    spoils a run may come after characters of it have been told. They stay told.
    """

    def __init__(self, text: Text, *, skip_special_tokens: bool = True) -> None:
        self._text, self._skip = text, skip_special_tokens
        self._front: list[int] = []
        self._front_text = ""
        self._rest: list[int] = []
        self._num_told = 0

    def push(self, token: int) -> str:
        text = self._text_of([*self._rest, token])
        whole = len(text) - _num_unfinished(text)
        piece = text[self._num_told : whole]
        # A space at the start of a text is nothing there, but two of them are one: it counts for what follows.
        if not piece and not self._decode([token, token]):
            return ""
        self._rest.append(token)
        self._num_told += len(piece)
        if whole == len(text):
            self._move_on()
        elif len(self._rest) > 2 * _NUM_LAST:
            self._shorten(held=text[self._num_told :])
        return piece

    def flush(self) -> str:
        """Whatever was held back, at the end of the sequence."""
        piece = self._text_of(self._rest)[self._num_told :]
        self._num_told += len(piece)
        return piece

    def _text_of(self, rest: list[int]) -> str:
        text = self._decode(self._front + rest)
        if text.startswith(self._front_text):
            return text[len(self._front_text) :]
        return self._decode(rest)  # a run of bytes with a half character at its end has lost all its characters

    def _move_on(self) -> None:
        """Everything is told. A front without any text (a lone space, say) would not do as one: it gets longer."""
        told, front = self._front + self._rest, self._rest
        while not (text := self._decode(front)) and len(front) < len(told):
            front = told[-2 * len(front) :]
        self._front, self._front_text = front, text
        self._rest, self._num_told = [], 0

    def _shorten(self, *, held: str) -> None:
        """Forget the middle of a rest that stays without a whole end; ``held`` is what of its text is not told.

        Each of its tokens is a byte at least. The first four spoil a run of bytes for good: had they begun with a
        character, it would have been told and moved on from. At the end, a lead byte begins anew whatever comes
        before it, so what follows the last tokens reads the same once at most three of them, a character's other
        bytes, are misread because of the gap; the others hold the text not told, each broken character of which has
        at most three bytes.
        """
        short = self._rest[:_NUM_FIRST] + self._rest[-_NUM_LAST:]
        text = self._text_of(short)
        if text.endswith(held):
            self._rest, self._num_told = short, len(text) - len(held)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids, skip_special_tokens=self._skip)


def _num_unfinished(text: str) -> int:
    """Characters at the end that may be bytes of a character whose rest is still to come.

    They are decoded as U+FFFD: one for all of them or one for each, by the tokenizer.
    """
    return min(len(text) - len(text.rstrip("\ufffd")), _MAX_UNFINISHED)


def _require_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is no valid Unicode text: character {error.start + 1} is half of a pair",
            remedy="send the whole character, or leave it out",
        ) from None


def stop_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence ids from the generation config, else the config. The tokenizer's own are wrong for some GGUFs."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text()).get("eos_token_id")
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
