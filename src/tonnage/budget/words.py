"""Words that several lines, steps and refusals share, so that they are told alike."""

from __future__ import annotations

from fractions import Fraction

from tonnage.budget.pool import SPARE_STATES, GroupPrice
from tonnage.config import Limits, Setting
from tonnage.layout import KVGroupKind
from tonnage.units import format_bytes

#: What each limit on the pool prevents, and what that costs.
WHY_CAP = {
    "budget": "a pool above it would leave the other lines too little, and the first step that needs them would run "
    "out of memory; it costs nothing, for there is no more",
    "total_bytes": "other programs count on the rest of the device, and would run out of memory first; the rest stays "
    "unused by this engine",
    "kv_fraction": "memory that nobody declared finds room beside the pool instead of ending the engine; that room "
    "holds no tokens",
    "kv_bytes": "a larger cache would take what others count on, and they would run out of memory; sequences beyond it "
    "wait, whatever else is free",
    "kv_tokens": "a larger cache would take what others count on, and they would run out of memory; sequences beyond "
    "it wait, whatever else is free",
    "limits": "all sequences that may run at once never fill more, so more would be committed and never touched; raise "
    "max_batch_size or max_seq_len to use it",
    "ranks": "ranks run one schedule, and a request that the smallest cannot hold would stop all of them; the others "
    "leave the difference unused",
}


def told(name: str, setting: Setting[int] | Setting[Fraction]) -> str:
    """``total_bytes = 4GiB (--total-bytes)``."""
    return f"{name} = {setting.text or setting.value}" + (f" ({setting.where})" if setting.where else "")


def counted(number: int, noun: str) -> str:
    """``1 block``, ``2,048 blocks``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def why_fixed(group: GroupPrice, limits: Limits) -> str:
    """Why a group of layers takes the same whatever the number of tokens."""
    rows = counted(limits.max_batch_size, "sequence")
    if group.kind == KVGroupKind.STATE:
        return (
            f"recurrent states of {rows} at once and {SPARE_STATES} spare: without its own a sequence could not run, "
            "and one that is not running leaves its own unused; a smaller max_batch_size gives them to the pool"
        )
    return (
        f"what an encoder of {counted(limits.max_encoder_tokens, 'token')} leaves for {rows}: it must stay until the "
        "sequence ends; a smaller max_batch_size gives it to the pool"
    )


def why_fraction(fraction: Fraction) -> str:
    return (
        f"kv_fraction {fraction} of the rest goes to the pool; the operand is what it leaves, as room for whatever "
        "nobody declared"
    )


def why_pages(page_bytes: int) -> str:
    return f"weights and scratch are committed in whole pages of {format_bytes(page_bytes)}, the device's own unit"


def why_keep_free(setting: Setting[int]) -> str:
    return "left alone on the device, " + ("as asked" if setting.is_set else "the default; keep_free_bytes changes it")
