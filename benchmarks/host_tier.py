"""What a host tier is worth: hit rate and tokens a second against its size, with a device pool too small for the work.

The demo model talks with several users in turns; every turn repeats the whole conversation so far. All conversations
together are the working set, and the pool on the device holds a quarter of it. Texts must not depend on the tier.

    python benchmarks/host_tier.py --output benchmarks/results/host-tier.json
"""

from __future__ import annotations

import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

from filing import file_away, parser
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import Engine, EngineOptions, start
from tonnage.sampling import SamplingParams
from tonnage.units import MiB, ceil_div

BLOCK_TOKENS = 16
NUM_USERS, NUM_TURNS, FIRST_TOKENS, TURN_TOKENS, NEW_TOKENS = 16, 4, 192, 32, 16
#: Tokens of all conversations at their end.
WORKING_SET = NUM_USERS * (FIRST_TOKENS + NUM_TURNS * (TURN_TOKENS + NEW_TOKENS))
SIZES = (Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2))


def talk(engine: Engine) -> tuple[list[list[int]], float]:
    """All conversations, turn by turn, everybody in each turn; and the seconds that it took."""
    ids = engine.text.encode((Path(__file__).parents[1] / "LICENSE").read_text())
    need = FIRST_TOKENS + NUM_TURNS * TURN_TOKENS
    said = [[ids[(97 * user + i) % len(ids)] for i in range(need)] for user in range(NUM_USERS)]
    talks = [[] for _ in range(NUM_USERS)]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    for turn in range(NUM_TURNS):
        for user, conversation in enumerate(talks):
            num = FIRST_TOKENS + TURN_TOKENS if turn == 0 else TURN_TOKENS
            conversation += said[user][:num]
            del said[user][:num]
            engine.submit(engine.request(f"{turn}-{user}", params, token_ids=list(conversation)))
        while engine.has_work:
            for done in engine.step():
                talks[int(done.request_id.partition("-")[2])] += done.token_ids
    return talks, time.perf_counter() - began


def measure(share: Fraction, slab_bytes: int) -> dict[str, Any]:
    host_blocks = ceil_div(int(share * WORKING_SET), BLOCK_TOKENS)
    options = EngineOptions(
        model="smollm2",
        memory_bytes=1536 * MiB,
        knobs=Knobs(
            kv_tokens=Setting(WORKING_SET // 4),
            host_kv_bytes=Setting(host_blocks * slab_bytes) if host_blocks else Setting(),
        ),
        limit_knobs=LimitKnobs(max_seq_len=Setting(512), max_batch_size=Setting(4), max_num_tokens=Setting(512)),
        fence=False,
    )
    with start(options) as engine:
        talks, seconds = talk(engine)
        stats = engine.stats()
    return {
        "host_share_of_working_set": str(share),
        "host_blocks": host_blocks,
        "hit_rate": round(stats["kv.hit_tokens"] / stats["kv.queried_tokens"], 4),
        "tokens_per_second": round(NUM_USERS * NUM_TURNS * NEW_TOKENS / seconds, 1),
        **{name: stats[f"kv.{name}"] for name in ("offloaded", "loaded", "evicted")},
        "talks": talks,
    }


def slab() -> int:
    from tonnage.costs.kv import kv_layout
    from tonnage.costs.models import find_config

    return kv_layout(find_config("smollm2"), kv_dtype="float32", block_tokens=BLOCK_TOKENS).slab_bytes


def main() -> int:
    given = parser(__doc__).parse_args()
    rows = [measure(share, slab()) for share in SIZES]
    talks = [row.pop("talks") for row in rows]
    identical = all(one == talks[0] for one in talks)
    print("host / working set | hit rate | tokens/s | to the host | back")
    for row in rows:
        print(
            f"{row['host_share_of_working_set']:>18} | {row['hit_rate']:8.1%} | {row['tokens_per_second']:8} | "
            f"{row['offloaded']:11,} | {row['loaded']:4,}"
        )
    print(f"texts identical: {identical}")
    figures = {"working_set_tokens": WORKING_SET, "device_share": "1/4", "rows": rows, "texts_identical": identical}
    file_away(given.output, figures, commit=given.commit)
    rates = [row["hit_rate"] for row in rows]
    return 0 if identical and rates[-1] > rates[0] else 1


if __name__ == "__main__":
    sys.exit(main())
