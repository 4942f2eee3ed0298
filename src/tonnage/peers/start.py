"""What another engine would do with a device at start-up, term by term: each with its interval, rule and source."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tonnage.peers.launch import Launch
from tonnage.terms import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that an engine does, and since when.

    name     what the rule is of: "sampler peak", "graphs", "pages" ...
    since    first release, as (0, 17); None: from the first on
    before   first release that does something else; None: still so
    says     one sentence, with the formula where there is one
    records  ids of the logged starts that it was taken from
    source   release whose code was read, issue or document, where no record says it
    """

    name: str
    says: str
    since: tuple[int, ...] | None = None
    before: tuple[int, ...] | None = None
    records: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Bytes of one owner on one rank's device, by one rule.

    ``is_budgeted``: the engine subtracts it before it sizes its pool. What is not lies outside, and takes from what
    the engine believes to be free."""

    name: str
    bytes: Quantity
    rule: Rule
    is_budgeted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of tokens, blocks or sequences, with its interval."""

    best: int
    low: int
    high: int

    @classmethod
    def exact(cls, number: int) -> Count:
        return cls(best=number, low=number, high=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One of the engine's own checks at start-up, in its order.

    ``passes`` is None where it depends on where in its interval a term lies. ``remedy`` names the engine's flags, and
    was tried by predicting again."""

    name: str
    passes: bool | None
    need: str
    have: str
    says: str
    remedy: str = ""
    rule: Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The prediction for one rank.

    terms            a partition of the device: pool and what is left free included, in the order of the engine
    pool             bytes of the KV cache (all kinds of blocks and states)
    bytes_per_token  what the engine divides the pool by to tell tokens; None where it has no such rate
    tokens           that can be resident at once, of sequences of full length
    logged_tokens    the number that the engine's own log prints as the size of its cache, whatever it means
    concurrency      sequences of full length that fit, in thousandths
    max_model_len    tokens of the longest sequence, resolved
    defaults         settings that were left out, with the value of that release: (name, value, why)
    checks           the engine's own, in order
    notes            sentences for the reader: what is uncertain and why
    rules            rules that decide something other than the bytes of one term: a default, tokens of a pool
    """

    launch: Launch
    terms: tuple[Term, ...]
    pool: Quantity
    bytes_per_token: Fraction | None
    tokens: Count | None
    logged_tokens: Count | None
    concurrency: Count | None
    max_model_len: int
    defaults: tuple[tuple[str, str, str], ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    @property
    def starts(self) -> bool | None:
        """Whether every check passes; None where none fails for sure and one may."""
        if any(check.passes is False for check in self.checks):
            return False
        return None if any(check.passes is None for check in self.checks) else True

    def term(self, name: str) -> Term:
        """The term of that name; ``KeyError`` where there is none."""
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(name)
