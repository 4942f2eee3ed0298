"""Rules of an engine that nobody has: simple enough to reckon by hand. Tests put them in the place of vLLM's.

total x share - weights - 40 bytes x sequences x words - 1 GiB of collectives for each rank beyond the first = pool.
"""

from __future__ import annotations

from fractions import Fraction

from tonnage.peers.launch import Launch
from tonnage.peers.start import Check, Count, Rule, Start, Term
from tonnage.terms import Quantity, Source
from tonnage.units import GiB, MiB, format_bytes

RULE = Rule(name="sampler peak", says="40 bytes for each sequence and word", source="made up for tests")
TOTAL = Rule(name="share", says="share x total", source="made up for tests")
CALLED: list[Launch] = []


def predict(launch: Launch) -> Start:
    CALLED.append(launch)
    total = launch.card.total_bytes
    share = launch.get("gpu_memory_utilization") or launch.get("mem_fraction_static") or Fraction(9, 10)
    assert isinstance(share, Fraction)
    sequences = launch.get("max_num_seqs", 1024)
    assert isinstance(sequences, int)
    peak = 40 * sequences * launch.config.vocab_size
    collectives = GiB if launch.rank.tp > 1 else 0
    graphs = 0 if launch.get("enforce_eager") else 512 * MiB
    width = 1 if launch.kv_dtype else 2
    heads = max(1, launch.config.num_kv_heads // launch.rank.tp)
    rate = 2 * launch.config.num_layers * heads * 64 * width
    pool = int(total * share) - launch.weights.bytes - peak - collectives
    length = launch.get("max_model_len") or launch.get("context_length") or 8192
    assert isinstance(length, int)
    tokens = max(0, pool) // rate
    left = total - int(total * share) - graphs
    terms = (
        Term(name="weights", bytes=launch.weights, rule=TOTAL),
        Term(name="sampler peak", bytes=_about(peak), rule=RULE),
        Term(name="non-torch", bytes=_about(collectives), rule=RULE),
        Term(name="pool", bytes=_about(pool), rule=TOTAL),
        Term(name="graphs", bytes=_about(graphs), rule=RULE, is_budgeted=False),
        Term(name="left free", bytes=_about(left), rule=TOTAL, is_budgeted=False),
    )
    return Start(
        launch=launch,
        terms=terms,
        pool=_about(pool),
        bytes_per_token=Fraction(rate),
        tokens=Count.exact(tokens),
        logged_tokens=Count.exact(tokens),
        concurrency=Count.exact(1000 * tokens // length),
        max_model_len=length,
        defaults=(("max_num_seqs", "1,024", "of that release"),) if launch.get("max_num_seqs") is None else (),
        checks=(
            Check(
                name="one request",
                passes=pool > 0 and tokens >= length,
                need=f"{length:,} tokens",
                have=format_bytes(max(0, pool)),
                says="one request of full length has to fit into the pool",
                rule=TOTAL,
            ),
        ),
    )


def _about(value: int) -> Quantity:
    wide = value // 50 if value > 0 else 0
    return Quantity(bytes=value, low=value - wide, high=value + wide, source=Source.PREDICTED, ref="made up")
