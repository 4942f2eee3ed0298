"""From ``ENGINE:KNOB=VALUE`` to our knobs. Only what is typed is translated: an engine's defaults are not assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import TypeAlias

from tonnage.config import DEFAULT_BLOCK_TOKENS, Knobs, LimitKnobs, Origin, Setting
from tonnage.errors import InvalidSetting, UserError
from tonnage.peers.engines import VLLM, find_engine
from tonnage.peers.equivalent import DIGITS, ONE
from tonnage.peers.facts import PlanFacts
from tonnage.peers.table import By, Match, PeerKnob, find_knob
from tonnage.terms import MemoryPlan
from tonnage.units import ceil_div, format_bytes

#: Plans with the knobs given, so that a fraction of something measured can be computed.
PlanWith: TypeAlias = Callable[[Knobs, LimitKnobs], MemoryPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One knob of another engine as it was typed: all of it, and the text behind the equals sign."""

    knob: PeerKnob
    typed: str
    text: str

    @property
    def flag(self) -> str:
        return f"--like {self.typed}"

    def value(self) -> object:
        """Our value, None where the text leaves our knob alone. Raises ``InvalidSetting``."""
        return self.knob.read(self.text, f"--like {self.knob.full_name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """Our knobs with what was asked in another engine's, and a sentence for each translation that is not exact."""

    knobs: Knobs
    limit_knobs: LimitKnobs
    notes: tuple[str, ...] = ()

    def setting(self, name: str) -> Setting[object]:
        found: Setting[object] = getattr(self._home(name), name)
        return found

    def put(self, name: str, setting: Setting[object], *notes: str) -> Translated:
        """With one of our knobs set, in whichever of the two it lives."""
        if self._home(name) is self.knobs:
            changed: dict[str, object] = {"knobs": replace(self.knobs, **{name: setting})}  # type: ignore[arg-type]
        else:
            changed = {"limit_knobs": replace(self.limit_knobs, **{name: setting})}  # type: ignore[arg-type]
        return replace(self, notes=(*self.notes, *notes), **changed)  # type: ignore[arg-type]

    def _home(self, name: str) -> Knobs | LimitKnobs:
        return self.knobs if name in {f.name for f in fields(Knobs)} else self.limit_knobs


def parse_like(typed: str) -> Asked:
    """``vllm:max_num_seqs=64``; dashes and underscores are the same. Raises ``UserError`` with what is close to it."""
    engine_name, colon, rest = typed.strip().partition(":")
    if not colon:
        raise UserError(
            f"--like {typed} names no engine",
            need="ENGINE:KNOB=VALUE",
            remedy="write for example --like vllm:gpu_memory_utilization=0.9; --like help lists every knob",
        )
    engine = find_engine(engine_name, typed=typed)
    name, equals, text = rest.partition("=")
    knob = find_knob(engine, name, typed=typed)
    if not equals and not knob.is_switch:
        raise UserError(
            f"--like {typed} has no value", need="ENGINE:KNOB=VALUE", remedy=f"write --like {knob.full_name}=VALUE"
        )
    return Asked(knob=knob, typed=typed.strip(), text=text.strip())


def translate(
    likes: Sequence[str], *, knobs: Knobs | None = None, limit_knobs: LimitKnobs | None = None, plan_with: PlanWith
) -> Translated:
    """Our knobs for those of other engines; ``knobs`` and ``limit_knobs`` hold what was asked in our own words.

    Shares of something that only a plan knows cost one more plan, by ``plan_with``, without them.
    Raises ``UserError`` for what cannot be read, and where two flags say one thing; whatever ``plan_with`` raises.
    """
    made = Translated(knobs=knobs or Knobs(), limit_knobs=limit_knobs or LimitKnobs())
    asked, ignored = _without_ignored([parse_like(typed) for typed in likes])
    _refuse_conflicts(asked, made)
    made = replace(made, notes=ignored)
    for kind in (By.VALUE, By.BLOCK):
        for each in asked:
            if each.knob.by == kind:
                made = _put_value(each, made)
    made = _room_for_decoding(asked, made)
    shares = [each for each in asked if each.knob.by == By.PLAN]
    if shares:
        made = _keep_nothing_free(shares[0], made)
        facts = PlanFacts.of(plan_with(made.knobs, made.limit_knobs))
        for each in shares:
            made = _put_share(each, made, facts)
    return made


def _put_value(asked: Asked, made: Translated) -> Translated:
    value = asked.value()
    if value is None:
        return made
    text = asked.text
    if asked.knob.by == By.BLOCK:
        assert isinstance(value, int)
        value *= made.knobs.block_tokens.or_else(DEFAULT_BLOCK_TOKENS)
        text = f"{value:,}"
    return _put(asked, value, text, made)


def _put(asked: Asked, value: object, text: str, made: Translated, *notes: str) -> Translated:
    """The value under our name, with where it came from; nothing is kept free where the other engine would not."""
    knob = asked.knob
    differs = [f"{asked.flag}: {knob.differs}"] if knob.match is Match.ABOUT else []
    if knob.takes_all:
        made = _keep_nothing_free(asked, made)
    return made.put(knob.ours, Setting(value, text or str(value), Origin.PEER, asked.flag), *differs, *notes)


def _keep_nothing_free(asked: Asked, made: Translated) -> Translated:
    """The other engines know no memory that is left alone; what was asked for in our own words stays."""
    if made.knobs.keep_free_bytes.is_set:
        return made
    return made.put("keep_free_bytes", Setting(0, None, Origin.PEER, asked.flag))


def _put_share(asked: Asked, made: Translated, facts: PlanFacts) -> Translated:
    share = asked.value()
    assert isinstance(share, Fraction)
    if asked.knob.engine is VLLM:
        return _put_utilization(asked, share, made, facts)
    return _put_static(asked, share, made, facts)


def _put_utilization(asked: Asked, share: Fraction, made: Translated, facts: PlanFacts) -> Translated:
    """vLLM's budget is ceil(share * device), beside what was there before its first look at free memory."""
    budget = ceil_div(facts.device * share.numerator, share.denominator)
    total = budget + facts.outside
    notes = []
    if budget > facts.before:
        notes.append(
            f"{asked.flag}: vLLM would refuse to start, for it wants {format_bytes(budget)} free at its first look and "
            f"would find {format_bytes(facts.before)}"
        )
    told = f"{format_bytes(total)} ({format_bytes(budget)} + {format_bytes(facts.outside)} outside)"
    return _put(asked, total, told, made, *notes)


def _put_static(asked: Asked, share: Fraction, made: Translated, facts: PlanFacts) -> Translated:
    """SGLang's pools get share * (free before weights) - weights."""
    both = facts.before * share.numerator // share.denominator
    pool = both - facts.weights
    if pool <= 0:
        least = ceil_div((facts.weights + facts.least) * ONE, facts.before) if facts.before > 0 else ONE
        raise InvalidSetting(
            f"--like {asked.knob.full_name}",
            asked.text,
            f"it comes to {format_bytes(both)} for weights and pool, and weights alone take "
            f"{format_bytes(facts.weights)}",
            remedy=f"use at least 0.{least:0{DIGITS}d}" if least < ONE else "use a larger device",
        )
    told = f"{format_bytes(pool)} ({format_bytes(both)} - {format_bytes(facts.weights)} of weights)"
    return _put(asked, pool, told, made)


def _room_for_decoding(asked: Sequence[Asked], made: Translated) -> Translated:
    """SGLang's chunk may be smaller than its batch, our step may not: it has room for every decoding sequence."""
    chunk = next((each for each in asked if each.knob.full_name == "sglang:chunked_prefill_size"), None)
    rows, tokens = made.limit_knobs.max_batch_size.value, made.limit_knobs.max_num_tokens.value
    if chunk is None or rows is None or tokens is None or tokens >= rows:
        return made
    note = f"{chunk.flag}: raised to max_batch_size = {rows:,}, for every running sequence decodes in each step"
    return made.put("max_num_tokens", Setting(rows, f"{rows:,}", Origin.PEER, chunk.flag), note)


def _without_ignored(asked: Sequence[Asked]) -> tuple[list[Asked], tuple[str, ...]]:
    """vLLM looks at its share of the device only where no absolute size of the cache is given."""
    given = {each.knob.full_name: each for each in asked}
    share, size = given.get("vllm:gpu_memory_utilization"), given.get("vllm:kv_cache_memory_bytes")
    if share is None or size is None:
        return list(asked), ()
    note = f"{share.flag} has no effect beside {size.flag}: vLLM ignores the share where the size is given"
    return [each for each in asked if each is not share], (note,)


def _refuse_conflicts(asked: Sequence[Asked], made: Translated) -> None:
    """One knob of ours, one flag. Also where both say the same: only one of them can be what is reported."""
    seen: dict[str, str] = {}
    for each in asked:
        ours = each.knob.ours
        own = made.setting(ours)
        other = (own.where or ours) if own.is_set else seen.get(ours)
        if other is not None:
            raise UserError(
                f"{other} and {each.flag} both set {ours}", need="one of them", remedy="leave one of the two out"
            )
        seen[ours] = each.flag
