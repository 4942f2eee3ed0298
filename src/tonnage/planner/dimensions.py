"""The knobs that a fit may turn: their candidate values, what giving each up costs, and how they enter a question.

Whatever the user set is no dimension. The values do not depend on what else is set, so that pinning a chosen value
changes no other; where two interact, ``with_values`` makes them agree in the direction that keeps a plan monotone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.budget.fit import Dimension, Value, Values
from tonnage.config import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_NUM_TOKENS, Origin, Setting
from tonnage.layout import DTYPE_BYTES
from tonnage.planner.buckets import default_sizes
from tonnage.planner.graphs import DEFAULT, NONE, named_sizes, read_graphs
from tonnage.planner.limits import HOST_MAX_BATCH_SIZE, HOST_MAX_NUM_TOKENS
from tonnage.planner.question import Question

#: Sets of graphs, each part of the one before it.
ALL_GRAPHS, POWERS, SMALL, NO_GRAPHS = DEFAULT, "powers of two", "up to 8", NONE
#: Steps no smaller than this are offered: below it weights are read more often than is of use.
LEAST_NUM_TOKENS, HOST_LEAST_NUM_TOKENS = 512, 64
NARROW_KV = "float8_e4m3fn"
#: Where a value came from that a goal asked for.
CHOSEN = "chosen for the goal"

COSTS = {
    "graphs": "decode steps of other sizes are launched kernel by kernel",
    "max_num_tokens": "long prompts take more steps until their first token",
    "max_batch_size": "fewer sequences run at once; the others wait",
    "kv_dtype": "keys and values are rounded to 8 bits, which can change answers",
    "max_seq_len": "longer sequences are refused",
}


#: First given up first. Speed goes before rows, and rows before exact keys and values.
OPEN_ORDER = ("graphs", "max_num_tokens", "max_batch_size", "kv_dtype")
#: A workload says how long and how many: whatever is beyond that goes before what its users would feel.
WORKLOAD_ORDER = ("max_seq_len", "max_batch_size", "graphs", "max_num_tokens", "kv_dtype")


def dimensions(question: Question, *, least_rows: int = 1, least_seq_len: int | None = None) -> tuple[Dimension, ...]:
    """What was left open, in the order of sacrifice.

    ``least_rows`` and ``least_seq_len`` are what the goal needs; None: max_seq_len is the goal itself, or settled.
    """
    asked, knobs = question.limit_knobs, question.knobs
    on_host = question.card.kind == "host"
    candidates: dict[str, tuple[Value, ...]] = {}
    if not knobs.graphs.is_set and not on_host:
        candidates["graphs"] = (ALL_GRAPHS, POWERS, SMALL, NO_GRAPHS)
    if not asked.max_num_tokens.is_set:
        candidates["max_num_tokens"] = _num_tokens(on_host=on_host)
    if not asked.max_batch_size.is_set:
        candidates["max_batch_size"] = _rows(question, least_rows)
    if not knobs.kv_dtype.is_set and not on_host and DTYPE_BYTES[question.dtype] > DTYPE_BYTES[NARROW_KV]:
        candidates["kv_dtype"] = (question.dtype, NARROW_KV)
    if not asked.max_seq_len.is_set and least_seq_len is not None:
        candidates["max_seq_len"] = halved(question.config.max_position_embeddings, least_seq_len)
    order = OPEN_ORDER if least_seq_len is None else WORKLOAD_ORDER
    return tuple(
        # A narrow cache may have to be widened for use, in scratch that grows with it: less is not always less.
        Dimension(name=name, values=candidates[name], costs=COSTS[name], ordered=name != "kv_dtype")
        for name in order
        if name in candidates
    )


def halved(most: int, least: int) -> tuple[int, ...]:
    """``most``, half of it, and so on while above ``least``; then ``least``."""
    found = []
    while most > least:
        found.append(most)
        most //= 2
    return (*found, least)


def with_values(question: Question, values: Values) -> Question:
    """The question with the values in force. ``max_num_tokens`` is never below what ``max_batch_size`` sequences decode
    in a step; graphs are named for the batch size there is."""
    limits: dict[str, Any] = {}
    for name in ("max_seq_len", "max_batch_size"):
        if name in values:
            limits[name] = _chosen(name, int(values[name]), question)
    rows = int(values.get("max_batch_size", question.limit_knobs.max_batch_size.or_else(1)))
    if "max_num_tokens" in values:
        limits["max_num_tokens"] = _chosen(
            "max_num_tokens", max(rows * question.step_tokens, int(values["max_num_tokens"])), question
        )
    knobs: dict[str, Any] = {}
    if values.get("graphs", ALL_GRAPHS) != ALL_GRAPHS:
        knobs["graphs"] = Setting(graphs_text(str(values["graphs"]), rows), None, Origin.FIT, CHOSEN)
    if values.get("kv_dtype", question.dtype) != question.dtype:
        knobs["kv_dtype"] = Setting(str(values["kv_dtype"]), None, Origin.FIT, CHOSEN)
    return replace(
        question,
        limit_knobs=replace(question.limit_knobs, **limits),
        knobs=replace(question.knobs, **knobs),
    )


def graphs_text(choice: str, max_batch_size: int) -> str:
    """A choice of graphs as the knob is written: "none", or sizes between commas, all of them default sizes."""
    if choice in (NO_GRAPHS, ALL_GRAPHS):
        return choice
    powers = {1 << place for place in range(max_batch_size.bit_length())} | {max_batch_size}
    if choice == SMALL:
        powers = {size for size in powers if size <= 8}
    return ",".join(str(size) for size in sorted(powers & set(default_sizes(max_batch_size)))) or NO_GRAPHS


def _num_tokens(*, on_host: bool) -> tuple[int, ...]:
    usual, least = (
        (HOST_MAX_NUM_TOKENS, HOST_LEAST_NUM_TOKENS) if on_host else (DEFAULT_MAX_NUM_TOKENS, LEAST_NUM_TOKENS)
    )
    return halved(usual, least)


def _rows(question: Question, least: int) -> tuple[int, ...]:
    """From the usual batch size to what the goal needs; within a step that was set, and room for graphs that were."""
    usual = HOST_MAX_BATCH_SIZE if question.card.kind == "host" else DEFAULT_MAX_BATCH_SIZE
    least = max(least, largest_graph(question))
    most = min(usual, question.limit_knobs.max_num_tokens.or_else(usual * question.step_tokens) // question.step_tokens)
    return halved(max(most, least), least)


def largest_graph(question: Question) -> int:
    """The largest of the graphs that were asked for by size, 1 for none: a batch size may not be below it."""
    asked = question.knobs.graphs
    if asked.value is None or asked.origin is Origin.PEER:  # a peer's list is cut where it goes beyond
        return 1
    return max(named_sizes(read_graphs(asked.value)), default=1)


def _chosen(name: str, value: int, question: Question) -> Setting[int]:
    """A value that is the usual one is still a default."""
    on_host = question.card.kind == "host"
    usual = {
        "max_seq_len": question.config.max_position_embeddings,
        "max_batch_size": HOST_MAX_BATCH_SIZE if on_host else DEFAULT_MAX_BATCH_SIZE,
        "max_num_tokens": HOST_MAX_NUM_TOKENS if on_host else DEFAULT_MAX_NUM_TOKENS,
    }[name]
    where = {"max_seq_len": "the model's length"}.get(name, "host device" if on_host else None)
    return Setting(value, None, Origin.DEFAULT, where) if value == usual else Setting(value, None, Origin.FIT, CHOSEN)
