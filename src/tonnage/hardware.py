"""The catalogue of cards: what their drivers report, for planning with no device at hand.

Totals are what ``cuMemGetInfo`` reports, below the marketing figure: the driver and ECC keep some. Where engines'
start-up logs differ from machine to machine, ``total.low`` and ``total.high`` hold the range that was seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tonnage.errors import InvalidSetting
from tonnage.terms import Chip, Quantity, Source
from tonnage.units import GiB, MiB, round_down

CUDA_PAGE_BYTES = 2 * MiB
HOST_PAGE_BYTES = 2 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One kind of device. ``kind`` is "cuda" or "host".

    total                  bytes the driver reports, with the range seen
    sm, num_sms            compute capability times ten, and multiprocessors; 0 where unknown or a host
    page_bytes             granularity of virtual memory: arenas are committed in whole pages
    bandwidth              bytes per second from the data sheet; None where it is not known for sure
    context, libraries     what the first context, and the first matrix product beside it, take; None: not measured
    """

    name: str
    kind: str
    total: Quantity
    sm: int
    num_sms: int
    page_bytes: int = CUDA_PAGE_BYTES
    bandwidth: int | None = None
    context: Quantity | None = None
    libraries: Quantity | None = None
    aliases: tuple[str, ...] = ()
    note: str = ""

    @property
    def total_bytes(self) -> int:
        return self.total.bytes

    @property
    def chip(self) -> Chip:
        return Chip(name=self.name, sm=self.sm, num_sms=self.num_sms, total_bytes=self.total_bytes)

    def with_total(self, total_bytes: int) -> Card:
        """The same card with a given total (a partition of it, or a smaller budget)."""
        return replace(self, total=Quantity.exact(total_bytes, Source.ASKED, "given by the user"))


def _bytes(best: int, low: int, high: int, *, ref: str) -> Quantity:
    return Quantity(bytes=best, low=low, high=high, source=Source.CATALOGUE, ref=ref)


def _mib(best: int, low: int | None = None, high: int | None = None, *, ref: str) -> Quantity:
    return _bytes(best * MiB, (best if low is None else low) * MiB, (best if high is None else high) * MiB, ref=ref)


def _gib(best: str, low: str | None = None, high: str | None = None) -> Quantity:
    """From figures in GiB with two decimals, as engines print them."""

    def whole(text: str) -> int:
        return round_down(round(float(text) * GiB), MiB) // MiB

    return _mib(whole(best), whole(low or best), whole(high or best), ref="totals in engines' start-up logs")


CARDS: tuple[Card, ...] = (
    Card(
        name="H200", kind="cuda", sm=90, num_sms=132, bandwidth=4_800 * 10**9, aliases=("H200 SXM", "H200-141GB"),
        total=_bytes(150_109_880_320, 150_109_880_320, 143_167 * MiB, ref="cuMemGetInfo, driver 580"),
        context=_mib(524, 480, 600, ref="first context, driver 580, CUDA 13.0"),
        libraries=_mib(164, 164, 330, ref="first bf16 matmul through torch; 98 MiB of it torch's own workspace"),
    ),
    Card(
        name="H100-80GB", kind="cuda", sm=90, num_sms=132, bandwidth=3_350 * 10**9,
        total=_gib("79.19", "79.10", "79.22"), aliases=("H100", "H100 SXM", "H100 80GB HBM3"),
    ),
    Card(
        name="H100-NVL", kind="cuda", sm=90, num_sms=132, bandwidth=3_900 * 10**9,
        total=_gib("93.10", "93.00", "94.50"), aliases=("H100 NVL 94GB",),
    ),
    Card(
        name="H20-96GB", kind="cuda", sm=90, num_sms=78, bandwidth=4_000 * 10**9,
        total=_gib("93.58", "93.00", "95.10"), aliases=("H20",),
    ),
    Card(
        name="A100-80GB", kind="cuda", sm=80, num_sms=108, bandwidth=2_039 * 10**9,
        total=_gib("79.15", "79.10", "79.33"), aliases=("A100 SXM4 80GB", "A100 80GB PCIe"),
        note="bandwidth of the SXM form",
    ),
    Card(
        name="A100-40GB", kind="cuda", sm=80, num_sms=108, bandwidth=1_555 * 10**9,
        total=_gib("39.39", "39.38", "39.59"), aliases=("A100 SXM4 40GB", "A100 PCIe 40GB"),
    ),
    Card(
        name="L40S", kind="cuda", sm=89, num_sms=142, bandwidth=864 * 10**9,
        total=_gib("44.39", "44.30", "44.60"), aliases=("L40S-48GB",), note="with ECC on, as shipped",
    ),
    Card(
        name="L4", kind="cuda", sm=89, num_sms=58, bandwidth=300 * 10**9,
        total=_gib("22.03", "21.95", "22.49"), aliases=("L4-24GB",), note="nominal: no log names the card beyond doubt",
    ),
    Card(
        name="A10", kind="cuda", sm=86, num_sms=72, bandwidth=600 * 10**9,
        total=_gib("22.06", "21.95", "22.49"), aliases=("A10-24GB", "A10G"),
        note="the A10G of some clouds has 80 multiprocessors",
    ),
    Card(
        name="RTX 5090", kind="cuda", sm=120, num_sms=170, bandwidth=1_792 * 10**9,
        total=_gib("31.36", "31.30", "31.85"), aliases=("5090", "RTX5090-32GB"), note="a display takes some more",
    ),
    Card(
        name="RTX PRO 6000", kind="cuda", sm=120, num_sms=188, bandwidth=1_792 * 10**9,
        total=_gib("95.60", "95.00", "95.70"), aliases=("RTX PRO 6000 Blackwell", "RTX PRO 6000 96GB"),
    ),
    Card(
        name="RTX 4090", kind="cuda", sm=89, num_sms=128, bandwidth=1_008 * 10**9,
        total=_gib("23.55", "23.50", "23.67"), aliases=("4090", "RTX4090-24GB"), note="a display takes some more",
    ),
    Card(
        name="RTX 3090", kind="cuda", sm=86, num_sms=82, bandwidth=936 * 10**9,
        total=_gib("23.58", "23.50", "23.69"), aliases=("3090", "RTX3090-24GB"), note="a display takes some more",
    ),
    Card(
        name="V100-32GB", kind="cuda", sm=70, num_sms=80, bandwidth=900 * 10**9,
        total=_gib("31.73", "31.73", "31.74"), aliases=("V100", "V100 SXM2 32GB"),
    ),
    Card(
        name="T4", kind="cuda", sm=75, num_sms=40, bandwidth=300 * 10**9,
        total=_gib("14.56", "14.56", "14.75"), aliases=("T4-16GB", "Tesla T4"),
    ),
)  # fmt: skip


#: Names that cards of several sizes go by; a plan for the wrong one would be off by half a device.
AMBIGUOUS = {"a100": ("A100-40GB", "A100-80GB")}
#: Cards of which no start-up log at hand says what the driver reports; plain spelling -> how it is written.
WITHOUT_TOTAL = {
    "b200": "B200", "gh200": "GH200", "rtxa6000": "RTX A6000", "a6000": "RTX A6000", "rtx6000ada": "RTX 6000 Ada",
    "6000ada": "RTX 6000 Ada", "l40": "L40", "a30": "A30",
}  # fmt: skip
#: The first compute capability (times ten) with arithmetic in bfloat16.
BFLOAT16_SM = 80
#: How alike a name must be to be suggested: one slip of the finger in a short name, and not another maker's card.
ALIKE = 0.7


def find_card(name: str) -> Card:
    """A card by name or alias; case and punctuation do not matter. Raises ``InvalidSetting`` naming close ones."""
    spellings = {_plain(known): card for card in CARDS for known in (card.name, *card.aliases)}
    wanted = _plain(name)
    if wanted in spellings:
        return spellings[wanted]
    if wanted in AMBIGUOUS:
        sizes = " or ".join(AMBIGUOUS[wanted])
        raise InvalidSetting("device", name, "there are several sizes of this card", remedy=f"write {sizes}")
    if wanted in WITHOUT_TOTAL:
        raise InvalidSetting(
            "device", name,
            f"a {WITHOUT_TOTAL[wanted]} is not in the catalogue, for no log at hand says what its driver reports",
            remedy="give the total that nvidia-smi or a start-up log shows, alone, such as --memory 45GiB",
        )  # fmt: skip
    import difflib  # only a misspelt name needs it

    near = difflib.get_close_matches(wanted, spellings, n=3, cutoff=ALIKE)
    close = ", ".join(dict.fromkeys(spellings[known].name for known in near))
    raise InvalidSetting(
        "device",
        name,
        "not in the catalogue" + (f"; close: {close}" if close else ""),
        remedy=f"use one of {', '.join(card.name for card in CARDS)}, or give the size with --memory 80GiB",
    )


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
    _check_total(total_bytes)
    total = Quantity.exact(total_bytes, Source.ASKED, "given by the user")
    return Card(name="generic", kind="cuda", total=total, sm=0, num_sms=0, note="only the size is known")


def host_card(total_bytes: int, *, name: str = "host", page_bytes: int = HOST_PAGE_BYTES) -> Card:
    """Host memory used as the device, ``total_bytes`` of it."""
    _check_total(total_bytes)
    total = Quantity.exact(total_bytes, Source.ASKED, "given by the user")
    return Card(name=name, kind="host", total=total, sm=0, num_sms=0, page_bytes=page_bytes)


def is_host(device: str) -> bool:
    """Whether that name means host memory."""
    return _plain(device) in ("host", "cpu")


def card_for(device: str | None, memory_bytes: int | None) -> Card:
    """The card that a device name, a size, or both describe; "host" and "cpu" mean host memory and need the size."""
    if device is not None and is_host(device):
        if memory_bytes is None:
            raise InvalidSetting("device", device, "host memory has no size of its own", remedy="add --memory 8GiB")
        return host_card(memory_bytes)
    if device is None:
        if memory_bytes is None:
            raise InvalidSetting("device", None, "not given", remedy="give --device NAME or --memory 80GiB")
        return generic_card(memory_bytes)
    card = find_card(device)
    if memory_bytes is None:
        return card
    _check_total(memory_bytes)
    return card.with_total(memory_bytes)


def _check_total(total_bytes: int) -> None:
    if total_bytes <= 0:
        raise InvalidSetting("memory", total_bytes, "not a size above zero", remedy="write a size such as 80GiB")


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|tesla|amd)+", "", plain)
