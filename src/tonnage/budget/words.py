"""Words that several lines, steps and refusals share, so that they are told alike."""

from __future__ import annotations

from fractions import Fraction

from tonnage.config import Setting


def told(name: str, setting: Setting[int] | Setting[Fraction]) -> str:
    """``total_bytes = 4GiB (--total-bytes)``."""
    return f"{name} = {setting.text or setting.value}" + (f" ({setting.where})" if setting.where else "")


def counted(number: int, noun: str) -> str:
    """``1 block``, ``2,048 blocks``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def why_keep_free(setting: Setting[int]) -> str:
    return "left alone on the device, " + ("as asked" if setting.is_set else "the default; keep_free_bytes changes it")
