"""A log against a prediction: each figure beside the terms that it stands for."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.peers.logs.log import Figure, Log, Unit
from tonnage.peers.logs.rows import Row, row_of
from tonnage.peers.start import Count, Start
from tonnage.units import MiB

#: Engine -> (name of the row, figures whose sum it is, terms that they stand for). The first term takes a difference.
_TERMS: dict[str, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {
    "vllm": (
        ("weights", ("weights",), ("beside the weights", "weights")),
        ("non-torch", ("non_torch",), ("non-torch",)),
        ("activation peak", ("activation_peak",), ("activation peak", "sampler peak")),
        ("graphs", ("cuda_graph",), ("graphs",)),
    ),
    "sglang": (
        ("weights", ("weights",), ("weights",)),
        ("states", ("mamba_conv", "mamba_ssm"), ("state pool",)),
        ("graphs", ("cuda_graph",), ("graphs",)),
        ("prefill graphs", ("prefill_graph",), ("prefill graphs",)),
    ),
    "trtllm": (("weights", ("weights",), ("weights",)),),
}
#: A pool is cut to whole blocks behind the figure that is printed.
_BLOCKS_BYTES = 64 * MiB


def compare(log: Log, start: Start) -> tuple[Row, ...]:
    """A row for each figure that the prediction has a counterpart of, in the order of the engine."""
    return tuple(_rows(log, start))


def _rows(log: Log, start: Start) -> Iterator[Row]:
    total = log.figure("total_gpu_memory")
    if total is not None:
        card = start.launch.card.total
        yield row_of(total, card.bytes, name="device", how=f"catalogue: {start.launch.card.name}",
                     low=card.low, high=card.high)  # fmt: skip
        free = log.figure("free_at_start")
        if free is not None and (row := _of_terms(start, "context", total, total.value - free.value, ("context",))):
            yield row
    for name, figures, terms in _TERMS[log.engine]:
        found = [log.figure(each) for each in figures]
        present = [each for each in found if each is not None]
        if present and len(present) == len(found):
            row = _of_terms(start, name, present[0], sum(each.value for each in present), terms)
            if row is not None:
                yield row
    yield from _pool(log, start)
    for name, figure, count in (
        ("tokens", log.figure("kv_cache_tokens") or log.figure("max_total_tokens"), start.logged_tokens),
        ("concurrency", log.figure("max_concurrency"), start.concurrency),
    ):
        if figure is not None and count is not None:
            yield _counted(name, figure, count)


def _of_terms(start: Start, name: str, figure: Figure, said: int, terms: tuple[str, ...]) -> Row | None:
    present = [term for term in start.terms if term.name in terms]
    if not present:
        return None
    first = min(present, key=lambda term: terms.index(term.name))
    rules = ", ".join(dict.fromkeys(term.rule.name for term in present))
    return Row(
        name=name,
        said=said,
        found=sum(term.bytes.bytes for term in present),
        low=sum(term.bytes.low for term in present) - 2 * figure.rounding,
        high=sum(term.bytes.high for term in present) + 2 * figure.rounding,
        unit=Unit.BYTES,
        how=f"rule {rules}",
        line=figure.line,
        terms=(first.name, *(term.name for term in present if term is not first)),
    )


def _pool(log: Log, start: Start) -> Iterator[Row]:
    keys, values = log.figure("kv_k"), log.figure("kv_v")
    whole = log.figure("kv_cache") or log.figure("kv_cache_available")
    figure = keys or whole
    if figure is None:
        return
    said = keys.value + values.value if keys and values else figure.value
    room = 2 * figure.rounding + _BLOCKS_BYTES
    pool = start.pool
    if said <= 0 and pool.high == 0:
        return  # nothing is left in both; the prediction does not say how much less than nothing
    if log.engine == "sglang":  # states have a line of their own
        states = sum(term.bytes.bytes for term in start.terms if term.name == "state pool")
    else:
        states = 0
    yield Row(
        name="kv cache",
        said=said,
        found=pool.bytes - states,
        low=pool.low - states - room,
        high=pool.high - states + room,
        unit=Unit.BYTES,
        how="what the others leave",
        line=figure.line,
    )


def _counted(name: str, figure: Figure, count: Count) -> Row:
    return row_of(figure, count.best, name=name, how="the prediction's own", low=count.low, high=count.high)


def differences(rows: tuple[Row, ...], start: Start) -> dict[str, int]:
    """Bytes to add to each term so that the prediction says what the log says: what a correction keeps. Where a row
    stands for several terms the first takes the difference, and the next what it cannot: no term falls below zero."""
    found = {}
    for row in rows:
        left = row.difference
        for name in row.terms if row.unit is Unit.BYTES else ():
            taken = max(left, -start.term(name).bytes.bytes)
            found[name] = taken
            left -= taken
    return found
