"""What a card is to a plan: its size with the range that was seen, and whose memory that is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from tonnage.errors import InvalidSetting
from tonnage.terms import Chip, Quantity, Source
from tonnage.units import GiB, MiB, format_bytes, round_down

CUDA_PAGE_BYTES = 2 * MiB
HOST_PAGE_BYTES = 2 * MiB
#: The first compute capability (times ten) with arithmetic in bfloat16.
BFLOAT16_SM = 80
#: What WSL held of a 32 GB card (start logs), and the most that a desktop beside it was seen to hold (1528 MiB idle).
WSL_BYTES, WSL_MOST_BYTES = 770 * 10**6, 770 * 10**6 + 1528 * MiB


class Form(StrEnum):
    """Whose memory the device's memory is. Beside ``Card.kind``, which says who computes and so which formulas hold:
    a unified machine runs the same kernels as a card."""

    DISCRETE = "discrete"  # the card's own
    COHERENT = "coherent"  # the card's own, and a memory node of the operating system, which may use it
    UNIFIED = "unified"  # the machine's, shared with everything that runs on it
    SLICE = "slice"  # a MIG instance, part of a card
    WSL = "wsl"  # a card that Windows shares out
    HOST = "host"  # the machine's memory, and no card at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One kind of device. ``kind`` is "cuda" or "host".

    form                   whose memory it is
    total                  bytes the driver reports, with the range seen; its ``ref`` says in which records
    sm, num_sms            compute capability times ten, and multiprocessors; 0 where unknown or a host
    page_bytes             granularity of virtual memory: arenas are committed in whole pages
    bandwidth              bytes per second from the data sheet; None where it is not known for sure
    context, libraries     what the first context, and the first matrix product beside it, take; None: not measured
    system                 what the operating system and its programs hold of it; None: nothing, it is the card's own
    part_of                the card that a slice is cut from, "" for a whole one
    """

    name: str
    kind: str
    total: Quantity
    sm: int
    num_sms: int
    form: Form = Form.DISCRETE
    page_bytes: int = CUDA_PAGE_BYTES
    bandwidth: int | None = None
    context: Quantity | None = None
    libraries: Quantity | None = None
    system: Quantity | None = None
    part_of: str = ""
    aliases: tuple[str, ...] = ()
    note: str = ""

    @property
    def total_bytes(self) -> int:
        return self.total.bytes

    @property
    def chip(self) -> Chip:
        return Chip(name=self.name, sm=self.sm, num_sms=self.num_sms, total_bytes=self.total_bytes)

    @property
    def whole_name(self) -> str:
        """The name of the card that it is, or is cut from."""
        return self.part_of or self.name

    def with_total(self, total_bytes: int) -> Card:
        """The same card with a given total (a partition of it, or a smaller budget)."""
        return replace(self, total=Quantity.exact(total_bytes, Source.ASKED, "given by the user"))

    def under_wsl(self) -> Card:
        """The same card as Windows shares it out: less of it can be had, and nobody tells how much less."""
        held = replace(
            self.total, bytes=self.total.bytes - WSL_BYTES, low=self.total.low - WSL_MOST_BYTES,
            ref=f"{self.total.ref}; less what WSL (about 770 MB) and a desktop hold",
        )  # fmt: skip
        return replace(self, name=f"{self.name} under WSL", form=Form.WSL, total=held, part_of=self.whole_name)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a plan for it has to say, a sentence each."""
        told = _TOLD.get(self.form)
        found = [f"{self.name}: {told}"] if told else []
        if self.system is not None:
            low, high = format_bytes(self.system.low), format_bytes(self.system.high)
            found.append(
                f"{self.name}: {format_bytes(self.system.bytes)} are left to the operating system and its programs "
                f"({low} to {high}: {self.system.ref}); what is free there is MemAvailable of /proc/meminfo"
            )
        return tuple(found)


_TOLD = {
    Form.UNIFIED: (
        "its memory is the machine's, shared with everything that runs there; page cache counts as used when an engine "
        "looks, so the same start may find more or less, and host memory for evicted blocks is the same memory"
    ),
    Form.COHERENT: (
        "its memory is a node of the operating system too, which may fill it with page cache: an engine that looks at "
        "what is free may find less than this"
    ),
    Form.SLICE: (
        "a MIG instance: NVML does not tell what each process holds of it, so an engine can only infer its own bytes"
    ),
    Form.WSL: (
        "under WSL the card is shared with the Windows desktop, NVML does not tell what other processes hold, and "
        "address space for virtual memory is scarcer than on Linux"
    ),
}


def dtype_warning(card: Card, dtype: str) -> str:
    """A sentence where the card cannot compute in that dtype; empty where it can, or nobody knows."""
    if dtype != "bfloat16" or not 0 < card.sm < BFLOAT16_SM:
        return ""
    return (
        f"{card.name} has no arithmetic in bfloat16, and engines may refuse it there; --dtype float16 plans for what "
        "it can do"
    )


def generic_card(total_bytes: int) -> Card:
    """A CUDA device of which only the size is known."""
    check_total(total_bytes)
    total = Quantity.exact(total_bytes, Source.ASKED, "given by the user")
    return Card(name="generic", kind="cuda", total=total, sm=0, num_sms=0, note="only the size is known")


def host_card(total_bytes: int, *, name: str = "host", page_bytes: int = HOST_PAGE_BYTES) -> Card:
    """Host memory used as the device, ``total_bytes`` of it."""
    check_total(total_bytes)
    total = Quantity.exact(total_bytes, Source.ASKED, "given by the user")
    return Card(name=name, kind="host", form=Form.HOST, total=total, sm=0, num_sms=0, page_bytes=page_bytes)


def check_total(total_bytes: int) -> None:
    """Raises ``InvalidSetting`` for a size that is none."""
    if total_bytes <= 0:
        raise InvalidSetting("memory", total_bytes, "not a size above zero", remedy="write a size such as 80GiB")


def from_catalogue(best: int, low: int | None = None, high: int | None = None, *, ref: str) -> Quantity:
    """Bytes with the range that was seen, and where."""
    least, most = best if low is None else low, best if high is None else high
    return Quantity(bytes=best, low=least, high=most, source=Source.CATALOGUE, ref=ref)


def gib(text: str) -> int:
    """Bytes of a figure in GiB with two decimals, as engines print them, in whole MiB."""
    return round_down(round(float(text) * GiB), MiB)
