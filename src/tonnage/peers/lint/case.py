"""A launch that can be predicted again with other flags: what every finding and every suggestion is asked of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tonnage.costs.config import ModelConfig
from tonnage.costs.dtypes import FP8_DS_MLA, parse_dtype
from tonnage.errors import InvalidSetting, UserError
from tonnage.hardware import Card
from tonnage.peers.commands.command import Command
from tonnage.peers.commands.meaning import meaning
from tonnage.peers.launch import Launch
from tonnage.peers.lint.parallel import Parallel, parallel_of, rank_of
from tonnage.peers.predict import predict
from tonnage.peers.start import Count, Start
from tonnage.peers.version import Version
from tonnage.terms import Quantity, Rank

#: Bytes of one rank's weights in a dtype (None: the model's own).
Weights = Callable[[Rank, str | None], Quantity]
#: What becomes of a prediction before it is used: a correction from a log.
Correct = Callable[[Start], Start]

_NOTHING: Mapping[str, object] = MappingProxyType({})
_DTYPE_WORDS = {"auto": None, "half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``settings``: the launch's own, parsed. ``in_use_bytes``: what other processes hold on each device.
    ``draft``: a model that drafts, where its shape is known; ``weights`` has its own too.
    ``known``: starts that were tried; a case that is changed in any other field begins with none."""

    command: Command
    version: Version
    config: ModelConfig
    card: Card
    weights: Weights
    settings: Mapping[str, object] = field(default_factory=dict)
    in_use_bytes: int = 0
    correct: Correct = lambda start: start
    draft: ModelConfig | None = None
    known: dict[str, Start | None] = field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def engine(self) -> str:
        return self.command.engine

    def parallel(self, changes: Mapping[str, object] = _NOTHING) -> Parallel:
        return parallel_of(self.engine, {**self.settings, **changes})

    def launch(self, changes: Mapping[str, object] = _NOTHING, *, stage: int = 0) -> Launch:
        """The launch with other settings. Raises ``InvalidSetting`` for ranks that the model cannot be split over."""
        settings = {name: value for name, value in {**self.settings, **changes}.items() if value is not None}
        rank = rank_of(parallel_of(self.engine, settings), self.config, stage=stage)
        dtype = _dtype(settings.get("dtype"), "dtype")
        return Launch(
            engine=self.engine,
            version=self.version,
            config=self.config,
            weights=self.weights(rank, dtype),
            card=self.card,
            rank=rank,
            dtype=dtype,
            kv_dtype=kv_dtype_of(settings),
            settings=meaning(self.engine, settings, self.command.place.variables),
            draft=self.draft,
        )

    def predict(self, changes: Mapping[str, object] = _NOTHING) -> Start:
        """The start of the pipeline stage that decides: the first that fails, else the one that holds least."""
        stages = range(self.parallel(changes).pp)
        starts = [self.correct(predict(self.launch(changes, stage=stage))) for stage in stages]
        failing = [start for start in starts if start.starts is False]
        return failing[0] if failing else min(starts, key=held)

    def tried(self, changes: Mapping[str, object]) -> Start | None:
        """The start with these changes; None where it does not surely start, or cannot be asked. Asked once."""
        key = repr(sorted(changes.items()))
        if key not in self.known:
            try:
                start = self.predict(changes)
            except UserError:
                self.known[key] = None
            else:
                self.known[key] = start if start.starts else None
        return self.known[key]


def held(start: Start) -> int:
    """Tokens that a start holds, or bytes where it tells no tokens: to compare starts of one engine by."""
    return start.tokens.best if start.tokens is not None else start.pool.bytes


def kv_dtype_of(settings: Mapping[str, object]) -> str | None:
    """The dtype that the cache is asked for in; None: that of the model. Raises ``InvalidSetting``."""
    text = settings.get("kv_cache_dtype")
    if text is None or text in ("auto", FP8_DS_MLA):
        return None if text != FP8_DS_MLA else FP8_DS_MLA
    word = str(text).lower()
    return parse_dtype({"fp8_inc": "fp8", "int8": "fp8"}.get(word, word), knob="kv_cache_dtype")


def _dtype(value: object, knob: str) -> str | None:
    if value is None or (isinstance(value, str) and _DTYPE_WORDS.get(value.lower(), "") is None):
        return None
    return parse_dtype(_DTYPE_WORDS.get(str(value).lower()) or str(value), knob=knob)


def default_of(start: Start, name: str) -> int | None:
    """The whole number that the release takes where the setting was left out."""
    for known, value, _ in start.defaults:
        if known == name:
            digits = value.replace(",", "").split(" ")[0]
            return int(digits) if digits.isdecimal() and len(digits) < 19 else None
    return None


def number_of(case: Case, start: Start, name: str) -> int | None:
    """A whole number as it will be: as asked, or the release's default."""
    value = case.settings.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return default_of(start, name)


def total(count: Count | None, replicas: int) -> int | None:
    """Of all replicas together."""
    return None if count is None else count.best * replicas


def check_settings(case: Case) -> list[InvalidSetting]:
    """Errors of values that are read as text, and only later: dtypes."""
    wrong: list[InvalidSetting] = []
    try:
        kv_dtype_of(case.settings)
    except InvalidSetting as fault:
        wrong.append(fault)
    try:
        _dtype(case.settings.get("dtype"), "dtype")
    except InvalidSetting as fault:
        wrong.append(fault)
    return wrong
