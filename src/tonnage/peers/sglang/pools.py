"""From free memory to slots and tokens: SGLang's arithmetic of one rank at one point of its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.sglang.cells import Cells
from tonnage.units import round_down

#: Kept from the pools of a model that reads pictures.
MEDIA_BYTES = 100 * 1000 * 1000
#: State slots that one request may hold: its own, one being written, one in the prefix cache.
SLOTS_PER_REQUEST = 3
#: Bounds of the estimate of how many requests may run.
LEAST_REQUESTS, MOST_REQUESTS, SEQUENCES = 2048, 4096, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What the pools are made for, resolved.

    num_drafts      tokens that are verified at once, 0 without drafts
    slots           state slots as asked; None: by ``states_ratio``
    slots_each      state slots of one request
    has_spare       one slot is set aside before the states' share is divided, from about 0.5.10 on
    media_bytes     reserve of a model that reads pictures
    """

    context_tokens: int
    page_tokens: int
    max_requests: int | None
    max_tokens: int | None
    num_drafts: int
    states_ratio: Fraction
    slots: int | None
    slots_each: int
    has_spare: bool
    media_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """What comes out. ``rest`` is the budget of all pools; negative where the weights alone are too much.

    slots, verify_rows   state slots counted, and rows of verification states allocated (0 without)
    """

    rest: int
    slots: int
    state_bytes: int
    verify_bytes: int
    tokens: int
    window_tokens: int
    token_bytes: int
    max_requests: int

    @property
    def all_bytes(self) -> int:
        """Of all pools together; 0 where states alone are more than the budget, for then none is made."""
        return 0 if self.rest < 0 else self.state_bytes + self.verify_bytes + self.token_bytes


def shapes(launch: Launch, settings: Settings, *, has_media: bool, is_compressed: bool) -> Shapes:
    """The resolved settings. Raises ``InvalidSetting`` for one that SGLang would not read."""
    length = launch.config.max_position_embeddings
    page = 256 if is_compressed else 1
    drafts = settings.maybe("speculative_num_draft_tokens", least=0) or 0
    recent = launch.version.may_be(since=(0, 5, 10))
    kept = settings.switch("disable_radix_cache")
    requests = settings.maybe("max_running_requests")
    if drafts and requests is None:
        requests = settings.took("max_running_requests", 48, "48", "with drafts, where it is left out")
    slots = settings.maybe("max_mamba_cache_size")
    if slots is None and kept and requests is not None:
        slots = requests
    return Shapes(
        context_tokens=settings.whole("context_length", length, "the model's own length"),
        page_tokens=settings.whole("page_size", page, "the attention backend may ask for more"),
        max_requests=requests,
        max_tokens=settings.maybe("max_total_tokens"),
        num_drafts=drafts,
        states_ratio=settings.share("mamba_full_memory_ratio", Fraction(9, 10), "states to tokens")
        if _has_states(launch)
        else Fraction(9, 10),
        slots=slots,
        slots_each=1 if kept else SLOTS_PER_REQUEST,
        has_spare=recent,
        media_bytes=MEDIA_BYTES if has_media and recent else 0,
    )


def pools(kept: Cells, made: Shapes, *, before: int, weights: int, fraction: Fraction) -> Pools:
    """``before``: free before the weights load. Bytes of one rank, none of them below 0 but ``rest``."""
    rest = before - weights - int(before * (1 - fraction)) - made.media_bytes
    slots, verify_rows = _slots(kept.state, made, max(rest, 0))
    state_bytes = (slots + 1) * kept.state if slots > 0 else 0
    verify_bytes = kept.verify_bytes(verify_rows, made.num_drafts)
    # The budget counts a slot less than is allocated, and whole states for what is verified.
    counted = max(slots, 0) * kept.state + max(verify_rows - 1, 0) * made.num_drafts * kept.state
    tokens = int(max(rest - counted, 0) / kept.token) if kept.token else made.max_tokens or made.context_tokens
    if made.max_tokens is not None:
        tokens = min(tokens, made.max_tokens)
    tokens = round_down(tokens, made.page_tokens)
    return Pools(
        rest=rest - counted,
        slots=max(slots, 0),
        state_bytes=state_bytes,
        verify_bytes=verify_bytes,
        tokens=tokens,
        window_tokens=0 if kept.window is None else round_down(int(tokens * kept.ratio), made.page_tokens),
        token_bytes=int(tokens * kept.token),
        max_requests=_requests(tokens, slots if kept.state else None, made),
    )


def _slots(state: int, made: Shapes, rest: int) -> tuple[int, int]:
    """(state slots, rows of verification states with the one that is not counted)."""
    if not state:
        return 0, 0
    drafts, each = made.num_drafts, made.slots_each
    if made.slots is not None:
        slots = made.slots
    else:
        share = int(rest * made.states_ratio / (1 + made.states_ratio)) - (state if made.has_spare else 0)
        slots = int(share / (state * (1 + Fraction(drafts, each))))
    if not drafts:
        return slots, 0
    return slots, max(min(made.max_requests or slots, slots // each), 0) + 1


def _requests(tokens: int, slots: int | None, made: Shapes) -> int:
    """How many requests may run at once."""
    estimated = min(max(tokens * SEQUENCES // made.context_tokens, LEAST_REQUESTS), MOST_REQUESTS)
    found = min(estimated if made.max_requests is None else made.max_requests, tokens // 2)
    return found if slots is None else max(min(found, slots // made.slots_each), 0)


def _has_states(launch: Launch) -> bool:
    from tonnage.peers.sglang.cells import num_state_layers

    return num_state_layers(launch) > 0
