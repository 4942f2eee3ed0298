"""The reference's probe: which prompts it runs, and how large a pool it builds only for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tonnage.budget.cost import Cost
from tonnage.budget.reference.knobs import ReferenceKnobs, Speculation
from tonnage.budget.reference.tokens import resume_quota, tokens_for_budget
from tonnage.units import ceil_div, round_down, round_up

#: Compute capability times ten from which the long latent probe is used.
LONG_PROBE_SM = 100


def probe_lengths(*, max_num_tokens: int, max_seq_len: int, num_copies: int = 1) -> list[int]:
    """Prompt lengths of the probe: as long as a step and the model allow, together one full step.

    ``num_copies`` is the number of ranks under attention data parallelism, each of which gets one share of the list.
    """
    longest = min(max_num_tokens, max(1, max_seq_len - 1))
    whole, rest = divmod(max_num_tokens, longest)
    return ([longest] * whole + ([rest] if rest else [])) * num_copies


def encoder_probe(
    knobs: ReferenceKnobs, *, max_num_tokens: int | None, max_batch_size: int | None
) -> tuple[int, int] | None:
    """Tokens and items of the encoder's own run, whose output stays alive while the text is probed.

    What is not set falls back to the text model's; None: nothing to run. The output is dropped before the device is
    read again, so it counts in the peak and not in what is held beside it.
    """
    tokens = knobs.encoder_max_num_tokens if knobs.encoder_max_num_tokens is not None else max_num_tokens
    items = knobs.encoder_max_batch_size if knobs.encoder_max_batch_size is not None else max_batch_size
    return (tokens, items) if tokens and items and tokens > 0 and items > 0 else None


def long_mla_probe(*, chunk_tokens: int, buffer_batch_size: int, max_num_tokens: int, max_seq_len: int) -> int | None:
    """Length of the one prompt that drives the chunked latent path to its peak; None: too long for the model.

    Two chunks of cached prefix in whole steps, since the expanded keys of one may still be alive while the next is
    expanded, and one step of new tokens.
    """
    cached = round_up(2 * chunk_tokens * buffer_batch_size, max_num_tokens)
    length = cached + max_num_tokens
    return length if length <= max_seq_len - 1 else None


def wants_long_probe(
    *, is_latent: bool, backend: str, sparse_algorithm: str | None, is_chunked: bool, chunk_tokens: int, sm: int
) -> bool:
    """Whether the long probe is tried. Skip-softmax is sparse by name but runs the dense kernels."""
    is_dense = sparse_algorithm in (None, "skip_softmax")
    return is_latent and backend == "TRTLLM" and is_dense and is_chunked and chunk_tokens > 0 and sm >= LONG_PROBE_SM


def extra_probe_tokens(speculation: Speculation | None, *, is_overlapped: bool) -> int:
    """Entries each prompt of the probe takes beyond its own tokens: one, and what drafts write ahead."""
    if speculation is None:
        return 1
    ahead = speculation.tokens_per_step - 1
    return 1 + (ahead if is_overlapped else 0) + ahead + speculation.extra_kv_tokens


def manager_max_seq_len(max_seq_len: int, speculation: Speculation | None, *, is_overlapped: bool) -> int:
    """The cache manager's own longest sequence, look-ahead and drafts included."""
    drafts, extra = (speculation.draft_tokens, speculation.extra_kv_tokens) if speculation else (0, 0)
    ahead = 1 + drafts if is_overlapped else 0
    return max_seq_len + ahead + extra + drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporaryPool:
    """The pool of the probe. ``quota_bytes`` is what V2 gives it and None under V1."""

    blocks: int
    tokens: int
    quota_bytes: int | None = None


def temporary_blocks(
    lengths: Sequence[int],
    *,
    max_seq_len: int,
    max_batch_size: int,
    max_graph_batch_size: int,
    block_tokens: int,
    extra_tokens: int = 1,
    num_copies: int = 1,
    pool_groups: int = 1,
    beam_width: int = 1,
) -> int:
    """Blocks for the probe's prompts; for a full sequence beside one block for each captured row; for each sequence.

    The largest of the three, times groups of layers (``pool_groups``, V2 only) and beams.
    """
    prompts = ceil_div(sum(ceil_div(length + extra_tokens, block_tokens) for length in lengths), num_copies)
    one_sequence = ceil_div(max_seq_len + 1, block_tokens) + min(max_batch_size, max_graph_batch_size) - 1
    return max(prompts, one_sequence, max_batch_size) * pool_groups * beam_width


def num_pool_groups(knobs: ReferenceKnobs, *, windows: Sequence[int], layer_types: Sequence[str]) -> int:
    """Pools that one token may need a page in: the distinct windows, else the distinct kinds of layer; 1 under V1."""
    if knobs.manager == "V1":
        return 1
    return max(1, len(set(windows)) or len(set(layer_types)))


def temporary_pool(
    blocks: int, knobs: ReferenceKnobs, *, cost: Cost, free_bytes: int, block_tokens: int | None = None
) -> TemporaryPool:
    """The blocks asked for, held within the device and within the user's caps.

    ``free_bytes`` are free before the pool exists. V1 is cut to what the fraction of them pays for; V2 is given a
    quota instead: the fraction of them, at most ``max_gpu_total_bytes``, at most what the tokens need.
    """
    size = block_tokens or knobs.tokens_per_block
    tokens = blocks * size
    allowed = int(free_bytes * knobs.free_gpu_memory_fraction)
    if knobs.manager == "V1":
        tokens = min(tokens, round_down(tokens_for_budget(cost, allowed), size))
    if knobs.max_tokens:
        tokens = min(tokens, knobs.max_tokens)
    quota = None
    if knobs.manager == "V2":
        capped = min(allowed, knobs.max_gpu_total_bytes) if knobs.max_gpu_total_bytes else allowed
        quota = min(capped, resume_quota(cost.at(tokens), resume_fraction=knobs.max_util_for_resume))
    return TemporaryPool(blocks=ceil_div(tokens, size), tokens=tokens, quota_bytes=quota)


def probing(knobs: ReferenceKnobs, *, max_seq_len: int) -> ReferenceKnobs:
    """The knobs as the probe sees them.

    A pool ratio that suits serving may starve one pool during the probe, which then hangs, so there is none, and
    pools are shaped for the longest sequence. Explicit tiers on host and disk are left out.
    """
    return replace(
        knobs,
        pool_ratio=None,
        avg_seq_len=max_seq_len,
        host_cache_bytes=None,
        disk_cache_bytes=None,
        disk_cache_path=None,
    )


@dataclass(slots=True, kw_only=True)
class SharedSettings:
    """What the reference's managers all look at while it starts; the probe changes it for a while."""

    knobs: ReferenceKnobs
    max_seq_len: int


@contextmanager
def overridden_for_probe(settings: SharedSettings) -> Iterator[SharedSettings]:
    """The probe's knobs inside, the user's again afterwards, however the probe ends.

    ``max_seq_len`` is put back too: the temporary manager may lower it where it cannot hold one full sequence.
    """
    knobs, max_seq_len = settings.knobs, settings.max_seq_len
    settings.knobs = probing(knobs, max_seq_len=max_seq_len)
    try:
        yield settings
    finally:
        settings.knobs, settings.max_seq_len = knobs, max_seq_len


def num_sequences(*, max_batch_size: int, pp: int, has_headroom: bool) -> int:
    """Seats: running sequences of every pipeline stage, doubled for overlapping steps where there is one stage.

    Serving prefill and decode apart doubles only V2's table of indices, never the seats: all that is kept for each
    seat (sampler states, draft probabilities, penalty tables) would double with them.
    """
    seats = max_batch_size * pp
    return 2 * seats if pp == 1 and has_headroom else seats
