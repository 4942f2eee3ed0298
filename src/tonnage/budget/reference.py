"""The reference policy's dense arithmetic: TensorRT-LLM's derivation of a KV pool, as small pure functions.

The pool gets ``free_gpu_memory_fraction`` of what remains beside the measured peak, after the pool that existed
while measuring is added back. All inputs and results are bytes unless a name says tokens or blocks; fractions are
exact. Only what a dense decoder needs; its reserves, splits and windows come later.

No plan calls it: it serves the reference vectors, and comparisons with the reference that come later.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from tonnage.errors import DoesNotFit
from tonnage.units import ceil_div, format_bytes

DEFAULT_FRACTION = Fraction(9, 10)
#: Share of its quota that the page manager lets a resumed request fill.
DEFAULT_RESUME_FRACTION = Fraction(95, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReading:
    """What the reference measures around its probe.

    total_bytes           the driver's total
    torch_peak_bytes      peak allocated by torch during the probe: model and activations
    torch_used_bytes      still allocated by torch afterwards: the model
    device_used_bytes     total - free afterwards, the temporary pool and other processes included
    temporary_pool_bytes  the pool that existed only for the probe
    """

    total_bytes: int
    torch_peak_bytes: int
    torch_used_bytes: int
    device_used_bytes: int
    temporary_pool_bytes: int

    @property
    def extra_cost_bytes(self) -> int:
        """All the device holds that torch does not count as live."""
        return max(self.device_used_bytes - self.torch_used_bytes, 0)

    @property
    def peak_bytes(self) -> int:
        return self.torch_peak_bytes + self.extra_cost_bytes


def probe_lengths(*, max_num_tokens: int, max_seq_len: int) -> list[int]:
    """Prompt lengths of the probe: requests as long as a step and the model allow, together one full step."""
    longest = min(max_num_tokens, max(1, max_seq_len - 1))
    whole, rest = divmod(max_num_tokens, longest)
    return [longest] * whole + ([rest] if rest else [])


def temporary_blocks(
    *,
    max_num_tokens: int,
    max_seq_len: int,
    max_batch_size: int,
    max_graph_batch_size: int,
    block_tokens: int,
    beam_width: int = 1,
) -> int:
    """Blocks of the pool for the probe: its prompts and one token each; a full sequence beside one block for each
    captured row; one block for each sequence. No speculation."""
    lengths = probe_lengths(max_num_tokens=max_num_tokens, max_seq_len=max_seq_len)
    prompts = sum(ceil_div(length + 1, block_tokens) for length in lengths)
    one_sequence = ceil_div(max_seq_len + 1, block_tokens) + min(max_batch_size, max_graph_batch_size) - 1
    return max(prompts, one_sequence, max_batch_size) * beam_width


def pool_budget(reading: ProbeReading, *, fraction: Fraction = DEFAULT_FRACTION, peak_reserves_bytes: int = 0) -> int:
    """B0 = floor((total - peak + temporary pool) * fraction).

    ``peak_reserves_bytes`` are added to the peak, so they keep the fraction's meaning; reserves deducted from the
    result keep the bytes it leaves. Raises ``DoesNotFit`` where the reference would go on with a negative budget.
    """
    peak = reading.peak_bytes + peak_reserves_bytes
    left = reading.total_bytes - peak + reading.temporary_pool_bytes
    if left < 0:
        raise DoesNotFit(
            f"the measured peak of {format_bytes(peak)} is above the device's {format_bytes(reading.total_bytes)}",
            need_bytes=peak - reading.temporary_pool_bytes,
            have_bytes=reading.total_bytes,
        )
    return int(left * fraction)


def unprofiled_budget(*, total_bytes: int, used_bytes: int, fraction: Fraction = DEFAULT_FRACTION) -> int:
    """The budget where nothing is probed: the fraction of what is free now, with nothing set aside for activations."""
    return int((total_bytes - used_bytes) * fraction)


def tokens_within(budget_bytes: int, *, bytes_per_token: int) -> int:
    """Tokens the budget pays for, not yet in whole blocks."""
    return max(0, budget_bytes // bytes_per_token)


def usable_tokens(tokens: int, *, block_tokens: int) -> tuple[int, int]:
    """Whole blocks, and the tokens they hold."""
    blocks = tokens // block_tokens
    return blocks, blocks * block_tokens


def token_cap_bytes(max_tokens: int, *, bytes_per_token: int) -> int:
    """The first manager's hard cap: what ``max_tokens`` cost."""
    return max_tokens * bytes_per_token


def resume_quota(pool_bytes: int, *, resume_fraction: Fraction = DEFAULT_RESUME_FRACTION) -> int:
    """The second manager's quota so that ``pool_bytes`` stay usable by resumed requests, rounded up."""
    return ceil(pool_bytes / resume_fraction)


def resumable_tokens(
    quota_bytes: int, *, bytes_per_token: int, resume_fraction: Fraction = DEFAULT_RESUME_FRACTION
) -> int:
    """Tokens that resumed requests may fill of the second manager's quota."""
    return tokens_within(int(quota_bytes * resume_fraction), bytes_per_token=bytes_per_token)


def packed_fp4_bytes(num_elements: int) -> int:
    """Packed 4-bit data and one 8-bit scale for every 16 elements."""
    return ceil_div(num_elements, 2) + ceil_div(num_elements, 16)
