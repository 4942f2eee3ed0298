"""The reference's scheduling arithmetic: TensorRT-LLM's block needs, admission passes and token budgets, restated.

Pure functions over whole numbers. ``blocks`` are KV blocks of ``block_tokens`` tokens in one window's pool, all
``tokens`` are of one sequence. "Native" marks what the reference computes in its C++ runtime, "Python" what its
PyTorch executor computes; the two disagree where stated, and are both kept.

Our own engine admits by ``admission`` and counts a step's tokens exactly before it starts. Nothing here schedules it:
the file serves the reference's vectors, and comparisons with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tonnage.units import ceil_div, round_down

# -- blocks a request needs --------------------------------------------------------------------------------------------


def remaining_blocks(
    *,
    prompt_tokens: int,
    new_tokens: int,
    block_tokens: int,
    allocated_blocks: int = 0,
    cached_tokens: int = 0,
    reusable_blocks: int = 0,
    window_tokens: int | None = None,
    num_beams: int = 1,
) -> int:
    """Blocks still to be taken until the request has generated ``new_tokens`` (native, remaining to completion).

    allocated_blocks  that each beam holds; cached_tokens: tokens in the cache now
    reusable_blocks   of its prompt that a running sequence references. Free cached ones must not be given: they are
                      in the free count already. Given for a first chunk of a model with one window only: they
                      count until the request holds blocks of its own
    window_tokens     attention window; None: unlimited. Past it the cache is cyclic and may need one block more
    """
    end = prompt_tokens + new_tokens
    window = end if window_tokens is None else window_tokens
    shared = min(prompt_tokens, window) // block_tokens
    total = ceil_div(min(end, window), block_tokens)
    reused = min(reusable_blocks, shared) if allocated_blocks == 0 and window_tokens is None else 0
    last = ceil_div(end, block_tokens)
    cyclic = int(last > total and last > ceil_div(cached_tokens, block_tokens))
    if allocated_blocks < shared - reused:
        return shared - reused - allocated_blocks + (total - shared + cyclic) * num_beams
    return (total - reused - allocated_blocks + cyclic) * num_beams


def reusable_token_estimate(*, prompt_tokens: int, block_tokens: int, reusable_blocks: int) -> int:
    """Prompt tokens that the token budget is not charged for; here free cached blocks count as well (native)."""
    return min(reusable_blocks, prompt_tokens // block_tokens) * block_tokens


def first_step_blocks(
    *,
    prompt_tokens: int,
    new_tokens: int,
    block_tokens: int,
    draft_tokens: int = 0,
    reusable_blocks: int = 0,
    window_tokens: int | None = None,
    num_beams: int = 1,
) -> int:
    """Blocks that a prompt's first chunk takes: those of the whole prompt; its later chunks take none (native)."""
    length = prompt_tokens + draft_tokens
    if window_tokens is not None:
        length = min(length, window_tokens + new_tokens)
    shared, rest = divmod(length, block_tokens)
    return shared + ceil_div(rest, block_tokens) * num_beams - min(reusable_blocks, shared)


def generation_step_blocks(
    *,
    cached_tokens: int,
    generated_tokens: int,
    new_tokens: int,
    block_tokens: int,
    draft_tokens: int = 0,
    look_ahead: bool = False,
    window_tokens: int | None = None,
    num_beams: int = 1,
) -> int:
    """Blocks that one generation step takes, of two steps under ``look_ahead``; none once it passes the window
    (native)."""
    added = min((2 if look_ahead else 1) * (draft_tokens + 1), new_tokens - generated_tokens)
    if window_tokens is not None and cached_tokens + added > window_tokens:
        return 0
    return (ceil_div(cached_tokens + added, block_tokens) - ceil_div(cached_tokens, block_tokens)) * num_beams


def whole_life_blocks(
    *, prompt_tokens: int, new_tokens: int, block_tokens: int, num_beams: int = 1, extra_tokens: int = 0
) -> int:
    """Blocks of the whole life, those already held included (Python; ``num_beams`` = 1 is the plain form).

    With ``extra_tokens`` = draft reserve + extra tokens it is the request budget: one that exceeds the device's
    blocks is refused on arrival.
    """
    shared, rest = divmod(prompt_tokens, block_tokens)
    return shared + ceil_div(rest + new_tokens + extra_tokens, block_tokens) * num_beams


# -- capacity: who runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A request in front of ``no_evict_pass``.

    needs          blocks to completion in each pool: one entry for every window size, and the cross cache
    adapter, adapter_pages  its adapter and the device pages that holds
    produces       key of the first block of its prompt that nobody has computed; None: it is no first chunk
    """

    id: str
    needs: tuple[int, ...]
    adapter: str | None = None
    adapter_pages: int = 0
    produces: Hashable = None


def no_evict_pass(
    running: Sequence[Candidate],
    waiting: Sequence[Candidate],
    *,
    free_blocks: Sequence[int],
    max_requests: int,
    adapter_pages: int = 0,
    is_static: bool = False,
) -> list[str]:
    """Ids of the ``waiting`` that are admitted beside all of ``running``, in order (GUARANTEED_NO_EVICT).

    What runs is reserved first, whatever ends the pass: where the reference stops reserving at its cap or at the end
    of the token budget, it admits against blocks that running requests will need. Then the head of the line that does
    not fit stops the pass, one whose adapter does not fit is passed over, and one that would compute a block which
    another is about to compute is put off. ``is_static`` (STATIC_BATCH): nobody joins while something runs.
    """
    left = list(free_blocks)
    adapters: set[str | None] = {None}
    for request in running:
        left = [have - need for have, need in zip(left, request.needs, strict=True)]
        if request.adapter not in adapters:
            adapters.add(request.adapter)
            adapter_pages -= request.adapter_pages
    produced = {request.produces for request in running} - {None}
    admitted: list[str] = []
    for request in () if is_static and running else waiting:
        if len(running) + len(admitted) >= max_requests:
            break
        if request.produces in produced:
            continue
        if any(need > have for have, need in zip(left, request.needs, strict=True)):
            break
        pages = 0 if request.adapter in adapters else request.adapter_pages
        if pages > adapter_pages:
            continue
        left = [have - need for have, need in zip(left, request.needs, strict=True)]
        adapter_pages -= pages
        adapters.add(request.adapter)
        produced |= {request.produces} - {None}
        admitted.append(request.id)
    return admitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """A request in front of ``max_utilization_pass``: blocks it needs for one step, and ids of those it holds.

    ``started``: it generates, or is past the first chunk of its prompt; only such a one can be paused.
    """

    id: str
    step_blocks: int
    blocks: tuple[int, ...] = ()
    started: bool = False


def max_utilization_pass(
    active: Sequence[Active], *, free_blocks: int, max_requests: int
) -> tuple[list[str], list[str]]:
    """Ids that run in this step and ids that are paused for it, newest first (MAX_UTILIZATION).

    The scan has a movable end. Where a request does not find its blocks, the last started one between it and the end,
    itself included, is paused: its blocks are free once nobody else references them, the end moves to it, and the
    request is tried again. Nobody is paused twice, for the end never moves back.
    """
    references = Counter(block for request in active for block in request.blocks)
    scheduled: list[str] = []
    paused: list[str] = []
    at, end, used = 0, len(active), 0
    while at < end and len(scheduled) < max_requests:
        if used + active[at].step_blocks <= free_blocks:
            used += active[at].step_blocks
            scheduled.append(active[at].id)
            at += 1
            continue
        end = next((i for i in range(end - 1, at, -1) if active[i].started), at)
        if not active[end].started:
            break
        references.subtract(active[end].blocks)
        free_blocks += sum(references[block] == 0 for block in active[end].blocks)
        paused.append(active[end].id)
    return scheduled, paused


# -- tokens of a step --------------------------------------------------------------------------------------------------


def charged_tokens(*, chunk: int, reusable: int, remaining: int) -> int:
    """What a prompt chunk costs the token budget when ``reusable`` of its ``remaining`` tokens are thought cached.

    A chunk in the middle costs itself, since its window shifts past what is cached; only the last one gets shorter.
    """
    if reusable <= 0 or reusable + chunk < remaining:
        return chunk
    return max(0, remaining - reusable)


def estimated_charge(*, chunk: int, reusable: int, remaining: int, position: int = 0) -> int:
    """``charged_tokens`` as the batch-wait estimator has it: never below 1 for a last chunk, and no credit for tokens
    before ``position``, which the second manager has already passed."""
    credit = max(0, reusable - position)
    charge = charged_tokens(chunk=chunk, reusable=credit, remaining=remaining)
    return charge if credit <= 0 or credit + chunk < remaining else max(1, charge)


def shifted_chunk(*, chunk: int, reused: int, prompt_tokens: int, block_tokens: int) -> int:
    """The chunk after ``reused`` tokens turned out to be cached: its window moves right, and ends on a block boundary
    unless it ends the prompt."""
    end = reused + chunk
    return (round_down(end, block_tokens) if end < prompt_tokens else prompt_tokens) - reused


def fcfs_chunks(
    remaining: Sequence[int], *, max_tokens: int, unit_tokens: int, max_chunk_tokens: int | None = None
) -> list[int]:
    """Chunks in order of arrival: as much as is left of ``max_tokens``, whole units unless it is all that remains.

    A chunk of 0 is not scheduled in this step.
    """
    chunks: list[int] = []
    for rest in remaining:
        chunk = min(rest, max_tokens, rest if max_chunk_tokens is None else max_chunk_tokens)
        chunk = chunk if chunk == rest else round_down(chunk, unit_tokens)
        chunks.append(chunk)
        max_tokens -= chunk
    return chunks


def equal_progress_chunks(
    remaining: Sequence[int], *, max_tokens: int, unit_tokens: int, max_chunk_tokens: int | None = None
) -> list[int]:
    """Chunks that grow together: one unit (or all that remains) to each per round, until nobody's fits."""
    chunks = [0] * len(remaining)
    grew = True
    while grew:
        grew = False
        for i, rest in enumerate(remaining):
            more = min(unit_tokens, rest - chunks[i])
            within = max_chunk_tokens is None or chunks[i] + more <= max_chunk_tokens
            if 0 < more <= max_tokens and within:
                chunks[i] += more
                max_tokens -= more
                grew = True
    return chunks


# -- attended tokens: the cap on workspace that grows with them --------------------------------------------------------


def attended_cap(
    *, budget_bytes: int, kv_token_bytes: int, attended_token_bytes: int, max_attended_tokens: int
) -> tuple[Fraction, int | None]:
    """Bytes reserved for the workspace, and the attended tokens of prompts that one step may have; None: no cap.

    reserve = min(w L, B w / (k + w)), cap = floor(reserve / w); a cap of 0 is one.
    """
    if min(budget_bytes, kv_token_bytes, attended_token_bytes, max_attended_tokens) <= 0:
        return Fraction(0), None
    worst = Fraction(attended_token_bytes * max_attended_tokens)
    share = Fraction(budget_bytes * attended_token_bytes, kv_token_bytes + attended_token_bytes)
    reserve = min(worst, share)
    return reserve, int(reserve / attended_token_bytes)


def worst_attended_tokens(
    *, max_batch_size: int, max_num_tokens: int, max_seq_len: int, asked_tokens: int | None = None
) -> int:
    """The most that one step can attend to; a user's figure replaces it between one sequence and that."""
    worst = min(max_batch_size, max_num_tokens) * max_seq_len
    return worst if asked_tokens is None else min(max(asked_tokens, max_seq_len), worst)


def attended_tokens(*, position: int, chunk: int, prompt_tokens: int, estimate: int = 0) -> int:
    """Tokens that a prompt chunk attends to; ``estimate``: how much of a first chunk's prompt is thought cached."""
    return min(prompt_tokens, max(position, estimate) + chunk)


def num_within_cap(attended: Sequence[int], cap: int | None) -> int:
    """How many of the prompts, from the front, stay in the step. The first one always does, so that it progresses."""
    if cap is None:
        return len(attended)
    total = 0
    for kept, tokens in enumerate(attended):
        total += tokens
        if total > cap and kept > 0:
            return kept
    return len(attended)


# -- repair: a step with too many tokens -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [position, position + count) of a prompt that ends ``remaining`` after ``position``; 1 <= count.

    ``draft_tokens`` ride on the last chunk. ``is_fixed``: it must not be cut (bidirectional attention inside).
    """

    position: int
    count: int
    remaining: int
    draft_tokens: int = 0
    is_fixed: bool = False

    @property
    def is_last(self) -> bool:
        return self.count >= self.remaining

    @property
    def num_tokens(self) -> int:
        """What it costs the step."""
        return min(self.count, self.remaining) + (self.draft_tokens if self.is_last else 0)


def shrink_chunk(*, position: int, count: int, excess: int, block_tokens: int) -> int:
    """The chunk with at least ``excess`` tokens less, ending on a block boundary; never less than up to the first.

    A chunk that cannot get shorter that way is returned as it is.
    """
    least = block_tokens - position % block_tokens
    target = round_down(position + count - excess, block_tokens) - position
    return min(count, max(least, target))


def fit_token_budget(
    chunks: Sequence[Chunk], *, max_num_tokens: int, block_tokens: int, decode_tokens: int = 0
) -> list[Chunk]:
    """The same chunks, in order, shrunk until the step has at most ``max_num_tokens`` or none can shrink.

    Shrinks only: none is dropped and none becomes 0. The newest last chunks go first (only they carry credits and
    drafts), then the newest others. A last chunk that shrinks is a last one no more.
    """
    fitted = list(chunks)
    excess = decode_tokens + sum(chunk.num_tokens for chunk in chunks) - max_num_tokens
    for i in sorted(range(len(chunks)), key=lambda i: (chunks[i].is_last, i), reverse=True):
        if excess <= 0:
            break
        if not chunks[i].is_fixed:
            fitted[i] = _shrunk(chunks[i], excess=excess, block_tokens=block_tokens)
            excess -= chunks[i].num_tokens - fitted[i].num_tokens
    return fitted


def _shrunk(chunk: Chunk, *, excess: int, block_tokens: int) -> Chunk:
    count = min(chunk.count, chunk.remaining)
    shorter = shrink_chunk(position=chunk.position, count=count, excess=excess, block_tokens=block_tokens)
    return replace(chunk, count=shorter)
