"""An engine of paper in the place of vLLM: from 0.21 on its graphs are deducted before the pool."""

from __future__ import annotations

from fractions import Fraction

from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.start import Check, Count, Rule, Start, Term
from tonnage.terms import Quantity, Source
from tonnage.units import GiB

POOL = Rule(name="pool", says="The share less all that is deducted.", source="paper")
WEIGHTS = Rule(name="weights", says="As they are.", source="paper")
OLD_GRAPHS = Rule(name="graphs", says="Graphs come after the pool.", before=(0, 21), records=("a", "b"), source="paper")
GRAPHS = Rule(name="graphs", says="Graphs are deducted before the pool.", since=(0, 21), source="paper")
FREE = Rule(name="left free", says="The rest.", source="paper")
GRAPH_BYTES, TOKEN_BYTES = 10 * GiB, 2**17


def predict(launch: Launch) -> Start:
    settings = Settings(launch)
    share = settings.share("gpu_memory_utilization", Fraction(9, 10), "of the whole device")
    total, is_new = launch.card.total_bytes, launch.version.is_surely(since=(0, 21))
    pool = max(int(total * share) - launch.weights.bytes - GRAPH_BYTES * is_new, 0)
    free = total - launch.weights.bytes - pool - GRAPH_BYTES
    tokens = pool // TOKEN_BYTES

    def term(name: str, size: int, rule: Rule, *, is_budgeted: bool = True) -> Term:
        return Term(name=name, bytes=Quantity.exact(size, Source.PREDICTED, "paper"), rule=rule,
                    is_budgeted=is_budgeted)  # fmt: skip

    return Start(
        launch=launch,
        terms=(
            term("weights", launch.weights.bytes, WEIGHTS),
            term("graphs", GRAPH_BYTES, GRAPHS if is_new else OLD_GRAPHS, is_budgeted=is_new),
            term("kv cache", pool, POOL),
            term("left free", free, FREE, is_budgeted=False),
        ),
        pool=Quantity(bytes=pool, low=pool - GiB, high=pool + GiB, source=Source.PREDICTED, ref="paper"),
        bytes_per_token=Fraction(TOKEN_BYTES),
        tokens=Count.exact(tokens),
        logged_tokens=Count.exact(tokens),
        concurrency=Count.exact(tokens * 1000 // 4096),
        max_model_len=int(str(launch.get("max_model_len", 4096))),
        defaults=tuple(settings.defaults),
        checks=(
            Check(name="free", passes=pool > 0, need="a pool", have=str(pool), says="There must be a pool.", rule=POOL,
                  remedy="" if pool else "--gpu-memory-utilization 0.95"),
        ),
    )  # fmt: skip
