"""Another engine's start as plain data: what its table and its JSON both show."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from tonnage.peers.log_lines import log_lines
from tonnage.peers.start import Check, Count, Rule, Start, Term
from tonnage.report import codec
from tonnage.terms import Quantity

START_SCHEMA = "tonnage.engine-start/1"
#: Names of the pool's terms; every engine calls them in one of these ways, the longest name first.
POOL_TERMS = ("pool", "kv", "kv cache", "kv pool", "token pool", "state pool", "verification states",
              "recurrent states", "padding")  # fmt: skip
#: Terms that nobody has taken.
FREE_TERMS = ("left free", "slack", "unused", "free")


def start_text(start: Start) -> str:
    """Canonical JSON text."""
    return codec.dumps(start_document(start))


def start_document(start: Start) -> dict[str, Any]:
    """The start as plain JSON values; fractions as text, absent figures null."""
    launch = start.launch
    return {
        "schema": START_SCHEMA,
        "engine": launch.engine,
        "version": str(launch.version),
        "model": launch.config.name,
        "device": launch.card.name,
        "device_bytes": launch.card.total_bytes,
        "rank": codec.to_json(launch.rank),
        "settings": {name: _plain(value) for name, value in sorted(launch.settings.items())},
        "kv_dtype": launch.kv_dtype,
        "dtype": launch.dtype,
        "starts": start.starts,
        "terms": [_term(term) for term in start.terms],
        "pool": _quantity(start.pool),
        "bytes_per_token": None if start.bytes_per_token is None else str(Fraction(start.bytes_per_token)),
        "tokens": _count(start.tokens),
        "logged_tokens": _count(start.logged_tokens),
        "concurrency_thousandths": _count(start.concurrency),
        "max_model_len": start.max_model_len,
        "log": list(log_lines(start)),
        "defaults": [{"name": name, "value": value, "why": why} for name, value, why in start.defaults],
        "checks": [_check(check) for check in start.checks],
        "notes": list(start.notes),
        "rules": [_rule(rule) for rule in start.rules],
    }


def free_of(start: Start) -> Quantity:
    """What nobody takes; nothing where no term says so."""
    for term in reversed(start.terms):
        if is_free(term):
            return term.bytes
    return Quantity.exact(0, start.pool.source, "")


def is_pool(term: Term) -> bool:
    return term.name in POOL_TERMS or term.name.startswith("kv ")


def is_free(term: Term) -> bool:
    return term.name in FREE_TERMS or (not term.is_budgeted and term.name.endswith("free"))


def rule_text(rule: Rule) -> str:
    """Since when, and where it is from: ``since 0.17, 59 logs; source of 0.33``."""
    told = []
    if rule.since is not None:
        told.append(f"since {dotted(rule.since)}")
    if rule.before is not None:
        told.append(f"before {dotted(rule.before)}")
    if rule.records:
        told.append(f"{len(rule.records)} log{'s' if len(rule.records) > 1 else ''}")
    when = ", ".join(told)
    return "; ".join(part for part in (when, rule.source) if part)


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)


def times_text(thousandths: int) -> str:
    """``3.38`` of 3,384 thousandths, as engines' logs round."""
    hundredths = (thousandths + 5) // 10
    return f"{hundredths // 100:,}.{hundredths % 100:02d}"


def _term(term: Term) -> dict[str, Any]:
    return {"name": term.name, **_quantity(term.bytes), "is_budgeted": term.is_budgeted, "rule": _rule(term.rule)}


def _check(check: Check) -> dict[str, Any]:
    return {
        "name": check.name, "passes": check.passes, "need": check.need, "have": check.have, "says": check.says,
        "remedy": check.remedy, "rule": _rule(check.rule),
    }  # fmt: skip


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "name": rule.name, "says": rule.says, "since": None if rule.since is None else dotted(rule.since),
        "before": None if rule.before is None else dotted(rule.before), "records": list(rule.records),
        "source": rule.source,
    }  # fmt: skip


def _quantity(quantity: Quantity) -> dict[str, Any]:
    return {"bytes": quantity.bytes, "low_bytes": quantity.low, "high_bytes": quantity.high}


def _count(count: Count | None) -> dict[str, int] | None:
    return None if count is None else {"best": count.best, "low": count.low, "high": count.high}


def _plain(value: object) -> Any:
    if isinstance(value, Fraction):
        return str(value)
    return list(value) if isinstance(value, tuple) else value if isinstance(value, int | bool) else str(value)
