"""What would make a refused plan work: each suggestion is one change that was planned and fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from tonnage.budget.search import largest, smallest
from tonnage.config import DEFAULT_KEEP_FREE_BYTES, Origin, Setting
from tonnage.errors import DoesNotFit, UserError
from tonnage.planner.aim import Aim, Finder, found_by, in_force, limited, priced
from tonnage.planner.host_tier import WHAT_FOR, host_tier
from tonnage.planner.left_out import FEATURES, given, left_out, nothing_helps, told, without_settings
from tonnage.planner.question import Question, answer, inputs_at
from tonnage.planner.weights import weights_for
from tonnage.reserves.tables import HOST_BOOKS
from tonnage.terms import Fixed, LineKind
from tonnage.units import LARGEST, MiB, TiB, ceil_div, decimal_text, format_bytes

#: Where max_seq_len was left open, a remedy must make room for sequences of this many tokens: fewer are of no use.
USEFUL_TOKENS = 4096
#: What two measured starts may differ by: a remedy must still hold at the next one.
REPEAT_BYTES = 16 * MiB
#: Books of a host tier that are less than one part in so many of the device are in nobody's way.
SMALL_BOOKS = 100
#: Searches for a size of memory stop here.
MOST_BYTES = 64 * TiB


def with_remedies(
    question: Question, refusal: DoesNotFit, *, works: Callable[[Question], bool] | None = None
) -> DoesNotFit:
    """The same refusal with the changes that work, most specific first.

    ``works`` says whether a changed question does; by default, whether it has a plan of its own.
    """
    if refusal.where == "host":
        return refusal  # of the host tier alone, and it has its remedies
    aimed = _aimed(question)
    finders = _REMEDIES if question.limit_knobs.max_seq_len.is_set else _REMEDIES[1:]
    aim = Aim(aimed, works or plans, None if question.limit_knobs.max_seq_len.is_set else question)
    found = found_by(finders, aim) or last_of(aim)
    if not question.limit_knobs.max_seq_len.is_set:
        if found:
            found[-1] += f" (room for sequences of {aimed.limit_knobs.max_seq_len.value:,} tokens)"
        if not any("host_kv_bytes" in each for each in found) and (without := _without_tier(question)):
            found.insert(0, without)
    found = found or [nothing_helps(aim)]
    return refusal.told_as(what=refusal.what + _books_text(aimed), remedies=found, where=place_of(question))


def last_of(aim: Aim) -> list[str]:
    """One remedy for where no single change works: as few changes together as do, else in general what would."""
    if found := without_settings(aim) or _without_settings_on_more_memory(aim):
        return [found]
    return []


def _without_settings_on_more_memory(aim: Aim) -> str | None:
    asked = given(aim)
    if aim.question.measured is not None or not asked:
        return None
    size = _enough_memory(replace(aim, question=left_out(aim, asked)))
    return None if size is None else f"{told(asked)} and {more_memory(aim.question, size)}"


def place_of(question: Question) -> str:
    """Where memory is short."""
    return "host" if question.card.kind == "host" else "device"


def _aimed(question: Question) -> Question:
    """What a remedy must make work: a max_seq_len worth having where the user named none, and some bytes to spare
    where the next start will measure again."""
    measured = question.measured
    if measured is not None:
        context = replace(measured.context, bytes=measured.context.bytes + REPEAT_BYTES)
        question = replace(question, measured=replace(measured, context=context))
    if question.limit_knobs.max_seq_len.is_set:
        return question
    tokens = min(USEFUL_TOKENS, question.config.max_position_embeddings)
    aimed = limited(question, "max_seq_len", tokens)
    # A short max_seq_len would also lower the default of max_num_tokens, and whoever follows a remedy names neither.
    return limited(aimed, "max_num_tokens", min(LARGEST, in_force(question).max_num_tokens))


def plans(question: Question) -> bool:
    """Whether the question has a plan."""
    try:
        answer(question)
    except UserError:
        return False
    return True


def _smaller_seq_len(aim: Aim) -> str | None:
    asked = aim.question.limit_knobs.max_seq_len.or_else(1)
    found = largest(lambda n: aim.with_limit("max_seq_len", n), low=1, high=asked - 1)
    return None if found is None else f"lower max_seq_len to {found}"


def _smaller_tier(aim: Aim) -> str | None:
    """Where the books of the host tier lie on the device, the largest tier beside whose books the rest finds room."""
    question = aim.question
    asked = question.knobs.host_kv_bytes.value
    if not asked or HOST_BOOKS not in _fixed_tables(question):
        return None
    least = question.rank.size * inputs_at(question).layout.slab_bytes
    low, high = ceil_div(least, MiB), (asked - 1) // MiB
    found = largest(lambda n: aim.with_knob("host_kv_bytes", n * MiB), low=low, high=high)
    if found is not None:
        return f"lower host_kv_bytes to {size_text(found * MiB)}"
    without = replace(question, knobs=replace(question.knobs, host_kv_bytes=Setting()))
    return "leave host_kv_bytes out" if aim.works(without) else None


def _without_tier(question: Question) -> str | None:
    """Where no tier leaves room for sequences worth having and none at all leaves room for some, how long those are."""
    if not question.knobs.host_kv_bytes.value or HOST_BOOKS not in _fixed_tables(question):
        return None
    try:
        made = answer(replace(question, knobs=replace(question.knobs, host_kv_bytes=Setting())))
    except UserError:
        return None
    return f"leave host_kv_bytes out (room for sequences of {made.limits.max_seq_len:,} tokens)"


def _fixed_tables(question: Question) -> dict[str, int]:
    """Bytes of the tables that do not grow with the pool, by name."""
    return {
        claim.name: claim.cost.bytes
        for claim in inputs_at(question).claims
        if claim.line is LineKind.TABLES and claim.applies and isinstance(claim.cost, Fixed)
    }


def _books_text(question: Question) -> str:
    """What the tables are mostly made of, where that is the books of the host tier."""
    tables = _fixed_tables(question) if question.asked_host_bytes else {}
    books, total = tables.get(HOST_BOOKS, 0), sum(tables.values())
    if 2 * books <= total or SMALL_BOOKS * books < question.card.total_bytes:
        return ""
    return (
        f"; of its tables of {format_bytes(total)}, {format_bytes(books)} are {HOST_BOOKS}, which finds the blocks of "
        f"host_kv_bytes = {format_bytes(question.asked_host_bytes)}"
    )


def smaller_num_tokens(aim: Aim) -> str | None:
    """A smaller step, where it does not have to be measured first."""
    if aim.question.measured is not None:
        return None  # the probes ran at this size; a smaller one would have to be measured again
    least = aim.question.limit_knobs.max_batch_size.or_else(1) * aim.question.step_tokens
    now = in_force(aim.question).max_num_tokens
    found = largest(lambda n: aim.with_limit("max_num_tokens", n), low=least, high=now - 1)
    return None if found is None else f"lower max_num_tokens to {found}"


def _fewer_rows(aim: Aim) -> int | None:
    if aim.question.measured is not None:
        return None
    now = in_force(aim.question).max_batch_size
    return largest(lambda n: aim.with_limit("max_batch_size", n), low=1, high=now - 1)


def _smaller_batch(aim: Aim) -> str | None:
    found = _fewer_rows(aim)
    return None if found is None else f"lower max_batch_size to {found}"


def _host_tier(aim: Aim) -> str | None:
    """Where so many sequences were asked for and fewer fit, the cache of the others may wait in host memory."""
    question = aim.question
    asked = question.limit_knobs.max_batch_size.value
    rows = None if asked is None else _fewer_rows(aim)
    if asked is None or rows is None:
        return None
    fewer = aim.limited("max_batch_size", rows)
    made = answer(fewer)
    tier = host_tier(
        [made],
        question.card,
        num_sequences=asked,
        num_resident=made.max_concurrency,
        seq_tokens=made.limits.max_seq_len,
    )
    given = question.knobs.host_kv_bytes.value
    if (
        tier is None
        or tier.kv_bytes > MOST_BYTES
        or question.rank.pp > 1
        or (given is not None and given < tier.kv_bytes)
    ):
        return None
    num_mib = ceil_div(tier.kv_bytes, MiB)
    if not aim.works(priced(fewer, "host_kv_bytes", num_mib * MiB)):
        return None  # a policy that knows no such tier
    size = size_text(num_mib * MiB)
    return f"lower max_batch_size to {rows} and set host_kv_bytes to {size} ({tier.told()}; {WHAT_FOR})"


def _smaller_encoder(aim: Aim) -> str | None:
    """What an encoder leaves for every sequence may be the largest part of all."""
    now = 0 if aim.question.measured is not None else in_force(aim.question).max_encoder_tokens
    found = largest(lambda n: aim.with_limit("max_encoder_tokens", n), low=1, high=now - 1)
    return None if found is None else f"lower max_encoder_tokens to {found}"


def _bounded_attended(aim: Aim) -> str | None:
    """Where the worst case of growing scratch is set aside whole, it may be a smaller one."""
    knobs, limits = aim.question.knobs, in_force(aim.question)
    if knobs.scratch.value != "reserve":
        return None
    worst = limits.max_batch_size * limits.max_seq_len
    high = knobs.attended_tokens.or_else(worst) - 1
    found = largest(lambda n: aim.with_knob("attended_tokens", n), low=limits.max_seq_len, high=high)
    return None if found is None else f"set attended_tokens to {found}"


def _narrower_cache(aim: Aim) -> str | None:
    """A cache of half the bytes, where only a plan is asked for: the engine keeps it in the dtype of the weights."""
    question = aim.question
    if question.measured is not None or not question.card.sm or question.knobs.kv_dtype.is_set:
        return None
    narrow = Setting("float8_e4m3fn", "fp8", Origin.FIT, None)
    works = aim.works(replace(question, knobs=replace(question.knobs, kv_dtype=narrow)))
    return "set kv_dtype to fp8" if works else None


def _more_ranks(aim: Aim) -> str | None:
    """Twice the tensor-parallel ranks, or four times, or eight times; each with a share of weights and cache."""
    question = aim.question
    if question.measured is not None or not question.card.sm or question.rank.pp > 1:
        return None
    for times in (2, 4, 8):
        tp = question.rank.tp * times
        rank = replace(question.rank, tp=tp, size=question.rank.size * times)
        try:
            spread = replace(question, rank=rank, weights=weights_for(question, rank))
            if aim.works(spread):
                return f"spread it over tp {tp}"
        except UserError:
            continue  # its heads do not divide by so many
    return None


def narrower(aim: Aim) -> str | None:
    """Half the bytes for weights and cache; a cache narrower than the weights needs a backend that converts."""
    question = aim.question
    if question.measured is not None or question.dtype != "float32" or question.knobs.kv_dtype.is_set:
        return None
    narrow = replace(question, dtype="bfloat16")
    works = aim.works(replace(narrow, weights=weights_for(narrow, question.rank)))
    return "set dtype to bfloat16" if works else None


def _raised(name: str, unit: int) -> Finder:
    """Raise a cap that was set, to the smallest multiple of ``unit`` that works."""

    def find(aim: Aim) -> str | None:
        now = getattr(aim.question.knobs, name).value
        if now is None:
            return None
        low, high = now // unit + 1, ceil_div(MOST_BYTES, unit)
        found = smallest(lambda n: aim.with_knob(name, n * unit), low=low, high=high)
        return None if found is None else f"raise {name} to {size_text(found * unit) if unit > 1 else found}"

    return find


def _larger_fraction(aim: Aim) -> str | None:
    """The smallest share that works, in millionths; where none of them does, all of it."""
    question = aim.question
    now = question.knobs.kv_fraction.value
    if now is None:
        return None

    def with_share(share: Setting[Fraction]) -> bool:
        return aim.works(replace(question, knobs=replace(question.knobs, kv_fraction=share)))

    def enough(millionths: int) -> bool:
        return with_share(Setting(Fraction(millionths, 10**6), None, Origin.FIT, None))

    found = smallest(enough, low=int(now * 10**6) + 1, high=10**6 - 1)
    if found is not None:
        return f"raise kv_fraction to {decimal_text(Fraction(found, 10**6))}"
    return "leave kv_fraction out (all of it)" if with_share(Setting()) else None


def _less_keep_free(aim: Aim) -> str | None:
    now = aim.question.knobs.keep_free_bytes.or_else(DEFAULT_KEEP_FREE_BYTES)
    found = largest(lambda n: aim.with_knob("keep_free_bytes", n * MiB), low=0, high=ceil_div(now, MiB) - 1)
    return None if found is None else f"lower keep_free_bytes to {size_text(found * MiB)}"


def _more_memory(aim: Aim) -> str | None:
    size = _enough_memory(aim)
    if size is not None:
        return more_memory(aim.question, size)
    return _more_memory_and_no_cap(aim)


def more_memory(question: Question, size: str) -> str:
    """A named card has the memory it has; a size of its own can be given instead."""
    return f"use a device of at least {size}" if question.card.sm else f"give it {size} of memory"


def _more_memory_and_no_cap(aim: Aim) -> str | None:
    """For where neither more memory nor a higher cap is enough alone."""
    given = [name for name in _CAPS if getattr(aim.question.knobs, name).is_set]
    for names in (names for count in range(1, len(given) + 1) for names in combinations(given, count)):
        changed: dict[str, Any] = {name: Setting() for name in names}
        free = replace(aim.question, knobs=replace(aim.question.knobs, **changed))
        left_out = ", ".join(f"leave {name} out" for name in names)
        if aim.works(free):
            return left_out if len(names) > 1 else None  # one cap alone has a remedy of its own
        size = _enough_memory(replace(aim, question=free))
        if size is not None:
            return f"{left_out} and {more_memory(aim.question, size)}"
    return None


def _enough_memory(aim: Aim) -> str | None:
    low = aim.question.card.total_bytes // MiB + 1
    found = smallest(lambda n: aim.works(_on_memory(aim.question, n * MiB)), low=low, high=MOST_BYTES // MiB)
    return None if found is None else size_text(found * MiB)


def _on_memory(question: Question, num_bytes: int) -> Question:
    measured = question.measured and replace(question.measured, device_bytes=num_bytes)
    return replace(question, card=question.card.with_total(num_bytes), measured=measured)


def size_text(num_bytes: int) -> str:
    """As a person can type it: exact, without decimals."""
    text = format_bytes(num_bytes)
    return f"{num_bytes // MiB}MiB" if "." in text else text.replace(" ", "")


_CAPS = ("total_bytes", "kv_fraction", "kv_bytes", "kv_tokens")
#: More money, by one cap or another.
MONEY: tuple[Finder, ...] = (
    _raised("kv_bytes", MiB),
    _raised("kv_tokens", 1),
    _raised("total_bytes", MiB),
    _larger_fraction,
    _less_keep_free,
    _more_memory,
)
_REMEDIES: tuple[Finder, ...] = (
    _smaller_seq_len,
    _smaller_tier,
    smaller_num_tokens,
    _smaller_batch,
    _host_tier,
    _smaller_encoder,
    *FEATURES,
    _bounded_attended,
    narrower,
    _narrower_cache,
    *MONEY[:-1],
    _more_ranks,
    MONEY[-1],
)
