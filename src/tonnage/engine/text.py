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
        return list(self.tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Raises ``InputError``."""
        if not self.has_chat_template:
            raise InputError("This model has no chat template", remedy="send plain prompts (--no-chat)")
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

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class Detokenizer:
    """Text piece by piece: ``push`` returns what a new token adds, holding back halves of a character.

    Two windows are decoded, the one already told and the one with the new token; their difference is new. Decoding
    from the start of the last told piece keeps the cost of a token constant.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._ids: list[int] = []
        self._begin = 0  # first token of the window
        self._told = 0  # tokens whose text has been returned

    def push(self, token: int) -> str:
        self._ids.append(token)
        before = self._text.decode(self._ids[self._begin : self._told])
        now = self._text.decode(self._ids[self._begin :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._begin, self._told = self._told, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """Whatever was held back, at the end of the sequence."""
        before = self._text.decode(self._ids[self._begin : self._told])
        self_text = self._text.decode(self._ids[self._begin :])
        self._begin = self._told = len(self._ids)
        return self_text[len(before) :]


def stop_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence ids from the generation config, else the config. The tokenizer's own are wrong for some GGUFs."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text()).get("eos_token_id")
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
