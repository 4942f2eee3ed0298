"""Which manager of the reference runs, and when block reuse is taken away from a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.budget.reference.knobs import Manager
from tonnage.errors import InvalidSetting

#: Compute capabilities (times ten) on which latent attention may reuse blocks.
_LATENT_REUSE_SMS = frozenset({90, 100, 103, 120})
_LATENT_REUSE_DTYPES = frozenset({"auto", "float16", "bfloat16", "float32", "fp8"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The manager, and what is said where it is not the one wished for."""

    manager: Manager
    warning: str | None = None


def chosen_manager(
    asked: Literal["auto", "V1", "V2"],
    *,
    prefers_v2: bool = False,
    needs_v2: bool = False,
    has_connector: bool = False,
    beam_width: int = 1,
) -> Choice:
    """``auto`` follows the model. A connector or beams send V2 back to V1.

    prefers_v2  the model is better off with V2;  needs_v2: sparse attention or hybrid layers, which know no other
    Raises ``InvalidSetting`` where a model that needs V2 meets a connector or beams.
    """
    wants = needs_v2 or asked == "V2" or (asked == "auto" and prefers_v2)
    obstacle = "a cache connector" if has_connector else f"{beam_width} beams" if beam_width > 1 else None
    if not wants or obstacle is None:
        return Choice(manager="V2" if wants else "V1")
    if needs_v2:
        what = f"this model needs the page manager, which does not work with {obstacle}"
        raise InvalidSetting("use_kv_cache_manager_v2", asked, what, remedy="use no connector and one beam")
    return Choice(manager="V1", warning=f"the page manager does not work with {obstacle}: the block manager is used")


def effective_reuse(*, is_enabled: bool, is_latent: bool, sm: int, kv_dtype: str) -> bool:
    """Whether blocks are reused. Latent attention may only on some cards, and in a cache that is plain or fp8."""
    if not is_latent:
        return is_enabled
    return is_enabled and sm in _LATENT_REUSE_SMS and kv_dtype in _LATENT_REUSE_DTYPES
