"""``tonnage devices --catalogue``: the cards that plans know, and where each figure is from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.hardware import CARDS, Card, profiles_of, slice_of
from tonnage.terms import Quantity
from tonnage.units import GiB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

SCHEMA = "tonnage.catalogue/1"
MET = "H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReport:
    """One card as JSON has it. ``context`` None: assumed, as on an H200, with a wide bar."""

    name: str
    form: str
    kind: str
    part_of: str
    total: Quantity
    context: Quantity | None
    system: Quantity | None
    page_bytes: int
    bandwidth: int | None
    sm: int
    num_sms: int
    aliases: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueReport:
    """All cards, and the slices that they can be cut into."""

    schema: str = SCHEMA
    cards: tuple[CardReport, ...]
    slices: tuple[CardReport, ...]


def catalogue() -> CatalogueReport:
    cut = [slice_of(card, profile.name) for card in CARDS for profile in profiles_of(card)]
    return CatalogueReport(cards=tuple(map(_report, CARDS)), slices=tuple(_report(each) for each in cut if each))


def show_catalogue(*, as_json: bool) -> None:
    if as_json:
        from tonnage.report.codec import dumps, to_json

        print(dumps(to_json(catalogue())), end="")
        return
    from tonnage.report.draw import console_for, show

    show(_parts(catalogue()), console_for(sys.stdout))


def _report(card: Card) -> CardReport:
    return CardReport(
        name=card.name, form=card.form.value, kind=card.kind, part_of=card.part_of, total=card.total,
        context=card.context, system=card.system, page_bytes=card.page_bytes, bandwidth=card.bandwidth, sm=card.sm,
        num_sms=card.num_sms, aliases=card.aliases, note=card.note,
    )  # fmt: skip


def _parts(made: CatalogueReport) -> Iterator[RenderableType]:
    from rich.text import Text

    from tonnage.report.draw import grid

    yield grid(["card", "memory", "total", "context", "bandwidth"], map(_row, made.cards), title="Cards")
    yield grid(
        ["card", "total from"], [(card.name, _source(card)) for card in made.cards], title="Where totals are from"
    )
    rows = [(each.name, _range(each.total), each.total.ref) for each in made.slices]
    yield grid(["slice", "total", "from"], rows, title="MIG slices, whose memory is a part of the card's")
    yield Text(
        f"Only the {MET} was met in person. A context in brackets is assumed, as on an H200, with a wide bar. Virtual "
        "memory comes in pages of 2 MiB on every card. Add WSL to a name for a card that Windows shares out."
    )


def _row(card: CardReport) -> tuple[str, ...]:
    context = "(524 MiB)" if card.context is None else format_bytes(card.context.bytes)
    speed = "-" if card.bandwidth is None else f"{card.bandwidth / 1e9:,.0f} GB/s"
    return card.name, card.form, _range(card.total), context, speed


def _source(card: CardReport) -> str:
    told = card.total.ref + (f"; {card.note}" if card.note else "")
    return told if card.system is None else f"{told}; its system holds {_range(card.system)}: {card.system.ref}"


def _range(total: Quantity) -> str:
    low, best, high = (f"{each / GiB:.2f}" for each in (total.low, total.bytes, total.high))
    return f"{best} GiB" if low == high else f"{best} GiB ({low} - {high})"
