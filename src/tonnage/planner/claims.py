"""Everything that will be allocated beside weights, cache and what a probe sees: the reserves of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tonnage.config import DEFAULT_BLOCK_TOKENS, Limits
from tonnage.costs.config import ModelConfig
from tonnage.costs.dtypes import parse_dtype
from tonnage.declarations import attention_shapes, declare_for, find_backend, sparse_algorithm
from tonnage.declarations.trtllm_mla import LatentContext
from tonnage.errors import InvalidSetting
from tonnage.layout import KVLayout
from tonnage.reserves import COUNTED, Declared, ReserveInputs, reserve_claims
from tonnage.reserves.tables import step_input_bytes
from tonnage.terms import Chip, Claim, Rank, Scratch

__all__ = ["claims_for", "step_input_bytes", "unlisted", "without"]


def claims_for(
    config: ModelConfig,
    limits: Limits,
    *,
    backend: str = "sdpa",
    dtype: str | None = None,
    kv_dtype: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    rank: Rank | None = None,
    device_kind: str = "cuda",
    chip: Chip | None = None,
    counted: frozenset[str] = COUNTED,
    layout: KVLayout | None = None,
    beam_width: int = 1,
    host_kv_bytes: int = 0,
) -> tuple[Claim, ...]:
    """What ``RESERVES`` claim for one rank, those that do not apply included.

    ``dtype`` of weights and compute defaults to the model's, ``kv_dtype`` to ``dtype``. ``device_kind`` is "cuda" or
    "host"; on a host the pool's bookkeeping lies on the device too. ``chip`` tells how attention expands a cached
    past; without one it is taken to expand all of it. ``counted`` reserves are held by the plan's quantities already.
    ``layout`` tells how many page tables there are; without one, a single table of ``block_tokens``. ``beam_width``
    sequences may share a seat. ``host_kv_bytes`` of host memory, this rank's, hold evicted blocks of the ``layout``,
    where prefixes are cached.
    Raises ``InvalidSetting`` for an unknown backend or dtype.
    """
    rank, dtype = rank or Rank(), dtype or config.dtype
    element = parse_dtype(kv_dtype or dtype, knob="kv_dtype")
    scratch = _declared(
        config, limits, backend=backend, kv_dtype=element, block_tokens=block_tokens, rank=rank, chip=chip
    )
    return reserve_claims(
        ReserveInputs(
            config=config,
            limits=limits,
            rank=rank,
            dtype=dtype,
            block_tokens=block_tokens,
            device_kind=device_kind,
            backend=backend,
            reads=find_backend(backend).reads,
            scratch=scratch,
            algorithm=sparse_algorithm(config),
            counted=counted,
            layout=layout,
            beam_width=beam_width,
            num_host_blocks=host_kv_bytes // layout.slab_bytes if layout is not None and limits.prefix_caching else 0,
        )
    )


def unlisted(listed: Sequence[Claim], extra: Sequence[Claim]) -> tuple[Claim, ...]:
    """Those of ``extra`` whose names are not in ``listed``: a claim counts once, whoever says it and how often.

    Raises ``ValueError`` where two claims of one name differ in what they cost: that is a defect of ours.
    """
    known = {claim.name: claim for claim in listed}
    found = []
    for claim in extra:
        same = known.setdefault(claim.name, claim)
        if (same.cost, same.applies) != (claim.cost, claim.applies):
            raise ValueError(
                f"two claims are named {claim.name!r}, of {same.owner} and {claim.owner}, and cost unalike"
            )
        if same is claim:
            found.append(claim)
    return tuple(found)


def without(claims: Sequence[Claim], disabled: frozenset[str], *, is_what_if: bool = False) -> tuple[Claim, ...]:
    """The claims with some switched off by name. Raises ``InvalidSetting`` for one that cannot be.

    ``is_what_if``: nothing will be built from the plan, so any claim can be, to see what it costs.
    """
    optional = {claim.name for claim in claims if claim.can_disable or is_what_if}
    for name in sorted(disabled - optional):
        known = f"claims that can be switched off: {', '.join(sorted(optional))}" if optional else "none can be here"
        raise InvalidSetting("disabled_claims", name, "no claim of that name can be switched off", remedy=known)
    return tuple(
        replace(claim, applies=False, because="switched off") if claim.name in disabled else claim for claim in claims
    )


def _declared(
    config: ModelConfig,
    limits: Limits,
    *,
    backend: str,
    kv_dtype: str,
    block_tokens: int,
    rank: Rank,
    chip: Chip | None,
) -> tuple[Declared, ...]:
    """The backend's scratch for each kind of layer of this rank; what two kinds declare alike is said once."""
    shapes = attention_shapes(
        config, kv_dtype=kv_dtype, block_tokens=block_tokens, row_tokens=1 + limits.max_draft_tokens, rank=rank
    )
    found: dict[Scratch, str] = {}
    for shape in shapes:
        for scratch in declare_for(backend, shape, limits=limits, chip=chip):
            found.setdefault(scratch, shape.label)
    names = [(scratch.backend, scratch.name) for scratch in found]
    return tuple(
        Declared(
            scratch=scratch,
            label=label if names.count((scratch.backend, scratch.name)) > 1 else "",
            is_context=isinstance(scratch, LatentContext),
            in_reference=not isinstance(scratch, LatentContext) or scratch.in_reference,
        )
        for scratch, label in found.items()
    )
