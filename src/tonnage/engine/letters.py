"""Text for models that have no tokenizer: bytes in, letters out."""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.engine.text import Message, Text


class LetterText(Text):
    """Token 98 is "b", and so on round the alphabet: texts that stop strings can be found in.

    ``stop_ids`` end a text, and are left out of it like other special tokens.
    """

    def __init__(self, stop_ids: Sequence[int] = ()) -> None:
        self.stop_ids = frozenset(stop_ids)

    @property
    def has_chat_template(self) -> bool:
        return True

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode(errors="surrogatepass"))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = (token for token in ids if token not in self.stop_ids or not skip_special_tokens)
        return "".join(chr(97 + (token - 97) % 26) for token in kept)
