"""What a name means: one that a user typed, and one by which a driver calls the device that is there."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tonnage.errors import InvalidSetting
from tonnage.hardware.card import Card, check_total, generic_card, host_card
from tonnage.hardware.catalogue import CARDS
from tonnage.hardware.mig import profiles_of, slice_of, split_name, with_profile
from tonnage.units import shown

#: Names that cards of several sizes go by; a plan for the wrong one would be off by half a device.
AMBIGUOUS = {"a100": ("A100-40GB", "A100-80GB")}
#: Cards of which no start-up log at hand says what the driver reports; plain spelling -> how it is written.
WITHOUT_TOTAL = {
    "a40": "A40", "rtx5080": "RTX 5080", "5080": "RTX 5080", "rtx4080": "RTX 4080", "4080": "RTX 4080",
    "rtxa5000": "RTX A5000", "a5000": "RTX A5000", "gb200": "GB200", "gb300": "GB300", "thor": "Jetson Thor",
    "jetsonthor": "Jetson Thor", "orin64": "Jetson Orin 64GB", "orin64gb": "Jetson Orin 64GB",
}  # fmt: skip
#: Characters of a name that is looked for: a manifest may ask for a card by a text of any length.
_LONGEST_NAME = 100
#: How alike a name must be to be suggested: one slip of the finger in a short name, and not another maker's card.
ALIKE = 0.7
#: Several cards in one name: "8xH100", "8 x H100", "H100:8", "H100x8".
_SEVERAL = re.compile(
    r"(?P<before>\d{1,3}) ?[x*] ?(?P<last>[a-z].*)|(?P<first>[a-z].*?) ?[x*:] ?(?P<behind>\d{1,3})", re.IGNORECASE
)
_WSL = re.compile(r"[\s(+-]*(?:under\s+)?wsl2?\)?$", re.IGNORECASE)


def find_card(name: str) -> Card:
    """A card by name or alias, a slice of one ("H100 3g.40gb"), or a card under WSL ("RTX 4090 WSL"); case and
    punctuation do not matter. Raises ``InvalidSetting`` naming close ones."""
    if len(name) > _LONGEST_NAME:
        raise InvalidSetting("device", shown(name), "no card has so long a name", remedy="write one such as H100-80GB")
    if _WSL.search(name):
        return find_card(_WSL.sub("", name)).under_wsl()
    if (cut := split_name(name)) is not None:
        return _slice(name, *cut)
    wanted, spellings = _plain(name), _spellings()
    if wanted in spellings:
        return spellings[wanted]
    if wanted in AMBIGUOUS:
        sizes = " or ".join(AMBIGUOUS[wanted])
        raise InvalidSetting("device", name, "there are several sizes of this card", remedy=f"write {sizes}")
    if wanted in WITHOUT_TOTAL:
        raise InvalidSetting(
            "device", name,
            f"the {WITHOUT_TOTAL[wanted]} is not in the catalogue, for no log at hand says what its driver reports",
            remedy="give the total that nvidia-smi or a start-up log shows, alone, such as --memory 45GiB",
        )  # fmt: skip
    if (several := _SEVERAL.fullmatch(name.strip())) is not None:
        number, one = several["before"] or several["behind"], several["last"] or several["first"]
        if _plain(one) in spellings or _plain(one) in AMBIGUOUS:
            quoted = f"'{one}'" if " " in one else one
            raise InvalidSetting("device", name, f"{number} cards, where a device is one",
                                 remedy=f"write --device {quoted} --tp {number}")  # fmt: skip
    raise _unknown(name, wanted, spellings)


def recognise(name: str, total_bytes: int) -> Card | None:
    """The row of the catalogue for what a driver calls a device; where several sizes share a name, the one whose total
    is nearest. None for a card that is not in it, or that is there under a name of another size."""
    cut = split_name(name)
    wanted = _plain(cut[0] if cut else name)
    found = [card for card in CARDS if wanted in map(_plain, (card.name, *card.aliases))]
    found = found or [card for card in CARDS if card.name in AMBIGUOUS.get(wanted, ())]
    found = found or [card for card in CARDS if card.name in AMBIGUOUS.get(_family(wanted), ())]
    if cut:
        slices = [made for card in found if (made := slice_of(card, cut[1])) is not None]
        return _nearest(slices, total_bytes)
    nearest = _nearest(found, total_bytes)
    return nearest if nearest is not None and _is_about(nearest, total_bytes) else None


def _nearest(found: Iterable[Card], total_bytes: int) -> Card | None:
    return min(found, key=lambda card: abs(card.total_bytes - total_bytes), default=None)


def _is_about(card: Card, total_bytes: int) -> bool:
    """Within a quarter: a card of another size under the same name (a 2080 Ti as sold) is not that card."""
    return abs(card.total_bytes - total_bytes) * 4 <= card.total_bytes


def _family(plain: str) -> str:
    """ "a100" of "a100sxm480gb"."""
    found = re.match(r"[a-z]+\d+", plain)
    return found[0] if found else plain


def _slice(name: str, card_name: str, profile: str) -> Card:
    """Raises ``InvalidSetting`` for a card that cannot be cut, or not so. A card of two sizes is the one that can."""
    sizes = AMBIGUOUS.get(_plain(card_name), ())
    if sizes:
        cards = [card for card in with_profile(profile) if card.name in sizes]
        if len(cards) == 1 and (made := slice_of(cards[0], profile)) is not None:
            return made
    card = find_card(card_name)
    made = slice_of(card, profile)
    if made is None:
        known = ", ".join(each.name for each in profiles_of(card))
        raise InvalidSetting(
            "device", name,
            f"a {card.name} has no MIG profile {profile}" if known else f"a {card.name} cannot be cut into MIG slices",
            remedy=f"use one of {known}" if known else f"write {card.name}",
        )  # fmt: skip
    return made


def _unknown(name: str, wanted: str, spellings: dict[str, Card]) -> InvalidSetting:
    import difflib  # only a misspelt name needs it

    near = difflib.get_close_matches(wanted, spellings, n=3, cutoff=ALIKE)
    close = ", ".join(dict.fromkeys(spellings[known].name for known in near))
    return InvalidSetting(
        "device",
        name,
        "not in the catalogue" + (f"; close: {close}" if close else ""),
        remedy=f"use one of {', '.join(card.name for card in CARDS)}, or give the size with --memory 80GiB",
    )


def _spellings() -> dict[str, Card]:
    return {_plain(known): card for card in CARDS for known in (card.name, *card.aliases)}


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
    check_total(memory_bytes)
    return card.with_total(memory_bytes)


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|tesla|amd)+", "", plain)
