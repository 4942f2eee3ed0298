"""How tokens are chosen, as flags of ``tonnage run``: each is a field of ``SamplingParams``, and a key of a line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from tonnage.cli.options import Text, option
from tonnage.errors import InvalidSetting
from tonnage.sampling import SamplingParams
from tonnage.units import parse_count, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """How a token is chosen. Field names are those of ``SamplingParams``; None, an empty list and False: not given."""

    temperature: Annotated[Text, option("--temperature", "T", "0 (default): always the most probable token.")] = None
    top_k: Annotated[Text, option("--top-k", "K", "Draw from the K most probable tokens.")] = None
    top_p: Annotated[Text, option("--top-p", "P", "Draw from the fewest tokens that hold this probability.")] = None
    min_p: Annotated[Text, option("--min-p", "P", "Draw from tokens at least this share as probable as the best.")] = (
        None
    )
    repetition_penalty: Annotated[
        Text, option("--repetition-penalty", "X", "Above 1: tokens of prompt and output become less probable.")
    ] = None
    presence_penalty: Annotated[
        Text, option("--presence-penalty", "X", "Taken off once from tokens of the output.")
    ] = None
    frequency_penalty: Annotated[
        Text, option("--frequency-penalty", "X", "Taken off for each time a token was in the output.")
    ] = None

    def values(self) -> dict[str, Any]:
        """The fields that were given, checked. Raises ``InvalidSetting`` naming the flag and the text typed."""
        found: dict[str, Any] = {}
        for field in fields(self):
            text = getattr(self, field.name)
            if text not in (None, [], False):
                found[field.name] = value = _value(field.name, text)
                _check(field.name, text, {field.name: value})
        if "min_tokens" in found:
            _check("min_tokens", getattr(self, "min_tokens", None), found)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(ChoiceOptions):
    """All that a request may be given by a flag."""

    max_tokens: Annotated[
        Text, option("--max-tokens", "N", "Tokens to generate for a request (default: 128, or what fits).")
    ] = None
    min_tokens: Annotated[Text, option("--min-tokens", "N", "Do not stop before that many tokens.")] = None
    seed: Annotated[Text, option("--seed", "N", "The same seed draws the same tokens.")] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the text before TEXT; may be repeated.", show_default=False),
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")] = False
    n: Annotated[Text, option("--n", "N", "Independent samples of each prompt.")] = None
    logprobs: Annotated[
        Text, option("--logprobs", "N", "Keep log-probabilities, and those of the N most probable tokens.")
    ] = None


def _value(name: str, text: Any) -> object:
    """A number where the text is one; what is none is left to ``SamplingParams``, which says what it wants."""
    if not isinstance(text, str):
        return text
    if name == "max_tokens":
        return parse_count(text, knob="--max-tokens")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _check(name: str, text: object, values: dict[str, Any]) -> None:
    try:
        SamplingParams(**values)
    except InvalidSetting as bad:
        why = bad.what.removeprefix(f"{bad.knob} = {bad.value!r}: ")
        raise InvalidSetting(f"--{name.replace('_', '-')}", shown(text), why, remedy=bad.remedy) from None
