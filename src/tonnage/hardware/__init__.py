"""The catalogue of cards: what their drivers report, for planning with no device at hand.

``catalogue`` holds the cards, ``mig`` the slices of those that can be cut, ``card`` what a card is, ``find`` what a
name means: what a user types, and what a driver calls the device that is there.
"""

from __future__ import annotations

from tonnage.hardware.card import (
    BFLOAT16_SM,
    CUDA_PAGE_BYTES,
    HOST_PAGE_BYTES,
    Card,
    Form,
    dtype_warning,
    generic_card,
    host_card,
)
from tonnage.hardware.catalogue import CARDS
from tonnage.hardware.find import AMBIGUOUS, WITHOUT_TOTAL, card_for, find_card, is_host, recognise
from tonnage.hardware.mig import profiles_of, slice_of

__all__ = [
    "AMBIGUOUS",
    "BFLOAT16_SM",
    "CARDS",
    "CUDA_PAGE_BYTES",
    "HOST_PAGE_BYTES",
    "WITHOUT_TOTAL",
    "Card",
    "Form",
    "card_for",
    "dtype_warning",
    "find_card",
    "generic_card",
    "host_card",
    "is_host",
    "profiles_of",
    "recognise",
    "slice_of",
]
