"""Sequences whose cache waits in host memory: how many, how many bytes, and what bringing one back costs.

What the device evicts goes there, and comes back when a text begins alike: a sequence that was suspended most of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tonnage.errors import DoesNotFit
from tonnage.hardware import Card, Form
from tonnage.layout import sequence_bytes as slab_bytes_of
from tonnage.terms import MemoryPlan, Source
from tonnage.units import ceil_div, format_bytes

#: What every offer ends with: what the tier does, and what it does not relax.
WHAT_FOR = (
    "evicted blocks go there and come back on a match, those of suspended sequences too; "
    "one sequence must still fit on the device"
)

_LANES, _BITS = 16, 8
#: Of 130 bits on the wire 128 are data; a packet carries 256 bytes behind 24 of header, sequence number and checksum.
_CODING, _PACKETS = Fraction(128, 130), Fraction(256, 280)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins a card to the host. ``bytes_per_second`` in one direction, pinned memory, nothing else on it."""

    name: str
    bytes_per_second: int
    ref: str
    source: Source = Source.ASSUMED


def _pcie(generation: int, giga_transfers: int) -> Link:
    raw = Fraction(giga_transfers * 10**9 * _LANES, _BITS)
    return Link(
        name=f"PCIe gen{generation} x16",
        bytes_per_second=int(raw * _CODING * _PACKETS),
        ref=f"PCI Express base specification: {giga_transfers} GT/s a lane, 16 lanes, 128b/130b, 256-byte payloads",
    )


GEN3, GEN4, GEN5 = _pcie(3, 8), _pcie(4, 16), _pcie(5, 32)

C2C = Link(
    name="NVLink-C2C", bytes_per_second=450 * 10**9, ref="GH200 data sheet: 900 GB/s in both directions together"
)

#: By name in the catalogue, from the cards' data sheets. A board may give a card fewer lanes than it has. Unified
#: machines have none: there is no other side.
LINKS: dict[str, Link] = {
    "H200": GEN5, "H100-80GB": GEN5, "H100-NVL": GEN5, "H20-96GB": GEN5, "H20-141GB": GEN5, "RTX 5090": GEN5,
    "RTX PRO 6000": GEN5, "RTX PRO 4500": GEN5, "B200": GEN5, "B300": GEN5, "MI300X": GEN5, "MI355X": GEN5,
    "A100-80GB": GEN4, "A100-40GB": GEN4, "A30": GEN4, "L40S": GEN4, "L40": GEN4, "L20": GEN4, "L4": GEN4, "A10": GEN4,
    "RTX 4090": GEN4, "RTX 3090": GEN4, "RTX A6000": GEN4, "RTX 6000 Ada": GEN4, "RX 7900 XTX": GEN4,
    "V100-32GB": GEN3, "T4": GEN3, "RTX 2080 Ti 22GB": GEN3, "GH200-96GB": C2C, "GH200-144GB": C2C,
}  # fmt: skip


def link_of(card: Card) -> Link | None:
    """The card's link, gen4 where only the size of the device is known; None where its memory is the host's."""
    return None if card.form in (Form.HOST, Form.UNIFIED) else LINKS.get(card.whole_name, GEN4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """``num_resident`` sequences of ``seq_tokens`` on the device, the cache of ``num_waiting`` more on the host.

    sequence_bytes  cache of one sequence at full length, over all ranks
    rank_bytes      the largest share of it that crosses one link: ranks swap side by side
    kv_bytes        host memory for all that wait
    """

    num_resident: int
    num_waiting: int
    seq_tokens: int
    sequence_bytes: int
    rank_bytes: int
    link: Link

    @property
    def kv_bytes(self) -> int:
        return self.num_waiting * self.sequence_bytes

    @property
    def copy_seconds(self) -> Fraction:
        """One sequence in one direction."""
        return Fraction(self.rank_bytes, self.link.bytes_per_second)

    @property
    def swap_seconds(self) -> Fraction:
        """One sequence out and another in, one after the other."""
        return 2 * self.copy_seconds

    def told(self) -> str:
        """Two clauses: what lies where, and what a swap costs."""
        total = self.num_resident + self.num_waiting
        return (
            f"{self.num_resident:,} of {total:,} sequences of {self.seq_tokens:,} tokens resident, the KV of "
            f"{self.num_waiting:,} more ({format_bytes(self.kv_bytes)}) in host memory; "
            f"a swap moves {format_bytes(self.sequence_bytes)} out and as much in, {milliseconds(self.swap_seconds)} "
            f"at the rate of {self.link.name} ({format_rate(self.link.bytes_per_second)} each way, "
            f"{self.link.source.value})"
        )


def host_tier(
    plans: Sequence[MemoryPlan], card: Card, *, num_sequences: int, num_resident: int, seq_tokens: int
) -> HostTier | None:
    """The tier for sequences that do not all fit beside these plans, one of each pipeline stage.

    None where there is nothing to swap with (no sequence resident, or all of them), no link, or no prefix cache: what
    is evicted would never be looked for.
    """
    link = link_of(card)
    if link is None or not 0 < num_resident < num_sequences or not plans[0].limits.prefix_caching:
        return None
    shares = [(sequence_bytes(plan, seq_tokens), plan.rank.tp * plan.rank.cp) for plan in plans]
    return HostTier(
        num_resident=num_resident,
        num_waiting=num_sequences - num_resident,
        seq_tokens=seq_tokens,
        sequence_bytes=sum(each * num_ranks for each, num_ranks in shares),
        rank_bytes=max(each for each, _ in shares),
        link=link,
    )


def sequence_bytes(plan: MemoryPlan, seq_tokens: int) -> int:
    """Cache of one sequence of that length on one rank: whole slabs, which is what is moved and kept."""
    tokens = ceil_div(seq_tokens + plan.limits.extra_tokens, plan.rank.cp)
    return slab_bytes_of(plan.kv.layout, tokens, encoder_tokens=plan.limits.max_encoder_tokens)


def whole_slabs(share_bytes: int, slab_bytes: int) -> int:
    """Bytes that a rank takes of its share of the tier."""
    return share_bytes // slab_bytes * slab_bytes


def refuse_less_than_a_slab(asked_bytes: int, *, num_ranks: int, slab_bytes: int, knob: str = "host_kv_bytes") -> None:
    """Raise ``DoesNotFit`` for a tier of which a rank's share holds not one slab, as an engine does when it starts."""
    least = num_ranks * slab_bytes
    if not 0 < asked_bytes < least:
        return
    each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    raise DoesNotFit(
        f"{knob} of {format_bytes(asked_bytes)} holds not one block of the KV cache{each}",
        need_bytes=least,
        have_bytes=asked_bytes,
        need=f"{least:,} bytes for a block{each}",
        have=f"{asked_bytes:,} bytes",
        remedies=(f"set {knob} to at least {least} bytes", f"leave {knob} out"),
        where="host",
    )


def held_text(plans: Sequence[MemoryPlan]) -> str:
    """What the host memory that was given holds, for plans of one of each stage; empty where none was given, or where
    it is of no use."""
    given, limits = plans[0].host.kv_bytes, plans[0].limits
    if not limits.prefix_caching:
        return ""
    each = sum(sequence_bytes(plan, limits.max_seq_len) * plan.rank.tp * plan.rank.cp for plan in plans)
    if not given or not each:
        return ""
    number = given // each
    return (
        f"host_kv_bytes {format_bytes(given)} holds the cache of {number:,} more full-length "
        f"sequence{'' if number == 1 else 's'} ({format_bytes(each)} each, over all ranks){_blocks_text(plans[0])}; "
        f"{WHAT_FOR}"
    )


def _blocks_text(plan: MemoryPlan) -> str:
    """What one rank takes of it: whole blocks, never more than was asked."""
    slab_bytes, share = plan.kv.layout.slab_bytes, plan.host.kv_bytes // plan.rank.size
    number, rest = plan.host.taken_bytes // slab_bytes, share - plan.host.taken_bytes
    told = f", in {number:,} whole blocks of {format_bytes(slab_bytes)}{' a rank' if plan.rank.size > 1 else ''}"
    return f"{told}, {rest:,} bytes of what was asked are none and are not taken" if rest else told


def milliseconds(seconds: Fraction) -> str:
    """``0.4 ms``, ``12 ms``, ``1,204 ms``: as exact as an assumed rate deserves."""
    tenths = round(seconds * 10_000)
    return f"{tenths // 10}.{tenths % 10} ms" if tenths < 100 else f"{round(seconds * 1000):,} ms"


def format_rate(bytes_per_second: int) -> str:
    return f"{bytes_per_second / 10**9:.1f} GB/s"
