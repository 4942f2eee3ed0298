"""The activation peak of the profile: the dry run of the forward, or that of the sampler, whichever is larger."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.costs.layers import Dense, Experts
from tonnage.costs.ranks import rank_shape
from tonnage.layout import DTYPE_BYTES
from tonnage.peers.start import Rule
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.facts import Facts
from tonnage.peers.vllm.setup import Setup
from tonnage.terms import Quantity, Source
from tonnage.units import ceil_div

#: Tokens that the fused kernel of experts takes at once.
EXPERT_CHUNK_TOKENS = 32_768
#: The compute capability, times ten, of the cards that the lean sampler was logged on.
_LEAN_SEEN_FROM = 90
#: How far the closed form of a forward can be off: kernels keep more or less of it.
_FORWARD_LOW, _FORWARD_HIGH = (9, 10), (5, 4)

FORWARD = "token by token 3 x hidden and, of a rank's share, 3 x the inner width"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The sampler's run in entries of its logits, and what lies beside it; the forward's, in bytes."""

    sampler_entries: int
    beside_sampler_bytes: int
    forward_bytes: int


def sampler_fact(setup: Setup) -> str:
    """The name of the coefficient: bytes for each sequence and entry of the vocabulary."""
    return "sampler lean" if eras.is_from(setup.launch.version, eras.LEAN_SAMPLER) else "sampler"


def peak_of(setup: Setup) -> Peak:
    """The two dry runs in units and bytes, before any coefficient."""
    word = DTYPE_BYTES[setup.launch.dtype or setup.launch.config.dtype]
    config, rank = setup.launch.config, setup.launch.rank
    shape = rank_shape(config, rank)
    # The first core samples on the first rank of a stage alone; the last stage has the logits.
    samples = shape.has_head and (setup.is_v1 or rank.index % rank.tp == 0)
    rows = min(setup.max_num_seqs, setup.batched_tokens)
    hidden = setup.batched_tokens * config.hidden_size * word
    workspace = _expert_bytes(setup, word)
    kept = workspace if setup.is_v1 and eras.is_from(setup.launch.version, eras.EXPERT_WORKSPACE) else 0
    lean = eras.is_from(setup.launch.version, eras.LEAN_SAMPLER)
    return Peak(
        sampler_entries=rows * config.vocab_size * samples,
        beside_sampler_bytes=kept + hidden * lean,
        forward_bytes=_forward_bytes(setup, word, workspace),
    )


def _forward_bytes(setup: Setup, word: int, workspace: int) -> int:
    """The widest layer over all tokens of a step: its input and output and the residual, gate and up, their product."""
    config, rank = setup.launch.config, setup.launch.rank
    inner = max(
        (
            ceil_div(part.intermediate_size, rank.tp)
            for number in rank_shape(config, rank).layers
            if isinstance(part := config.layers[number].feed_forward, Dense)
        ),
        default=0,
    )
    dense = 3 * inner * setup.batched_tokens * word
    return 3 * config.hidden_size * _gathered_tokens(setup) * word + max(dense, workspace)


def _gathered_tokens(setup: Setup) -> int:
    """Tokens that experts see at once: those of all ranks where each rank serves requests of its own."""
    rank = setup.launch.rank
    has_experts = any(isinstance(layer.feed_forward, Experts) for layer in setup.launch.config.layers)
    return setup.batched_tokens * (rank.tp if rank.attention_dp and has_experts else 1)


def _expert_bytes(setup: Setup, word: int) -> int:
    """Scratch of the fused experts: gate and up or the output, whichever is wider, and their product; for each token
    and each expert that it takes."""
    config, rank = setup.launch.config, setup.launch.rank
    most = 0
    for layer in {id(layer): layer for layer in config.layers}.values():
        part = layer.feed_forward
        if isinstance(part, Experts):
            inner = ceil_div(part.intermediate_size * rank.ep, rank.tp)
            rows = min(_gathered_tokens(setup), EXPERT_CHUNK_TOKENS) * part.num_experts_per_token
            most = max(most, rows * (max(2 * inner, config.hidden_size) + inner) * word)
    return most


def activation_peak(setup: Setup, facts: Facts) -> Quantity:
    """Bytes. What the forward's closed form leaves open counts where the forward wins."""
    peak = peak_of(setup)
    lean = eras.is_from(setup.launch.version, eras.LEAN_SAMPLER)
    sampler = facts[sampler_fact(setup)].of(peak.sampler_entries, ref="sampler's dry run")
    base = facts["peak base" if lean else "peak base early"].of(1, ref="beside a dry run")
    extra = facts["encoder outputs"].of(int(bool(setup.launch.config.towers) and lean), ref="encoder outputs")
    beside = peak.beside_sampler_bytes
    # The early sampler's coefficient is of the whole peak; the lean one's of what comes on top.
    best, low, high = (
        max(each + beside + over * lean, forward + over) + outputs
        for each, forward, over, outputs in (
            (sampler.bytes, peak.forward_bytes, base.bytes, extra.bytes),
            (sampler.low, peak.forward_bytes * _FORWARD_LOW[0] // _FORWARD_LOW[1], base.low, extra.low),
            (_most(setup, facts), peak.forward_bytes * _FORWARD_HIGH[0] // _FORWARD_HIGH[1], base.high, extra.high),
        )
    )
    ref = sampler.ref if sampler.bytes + beside >= peak.forward_bytes else "forward's dry run, a closed form"
    return Quantity(bytes=best, low=max(0, min(low, best)), high=high, source=Source.PREDICTED, ref=ref)


def _most(setup: Setup, facts: Facts) -> int:
    """The upper end of the sampler's run. Every record of the lean one is of a Hopper card; what one older card logged
    (fs-51771234912) leaves room for the early one."""
    name = sampler_fact(setup)
    if 0 < setup.launch.card.sm < _LEAN_SEEN_FROM:
        name = "sampler"
    return facts[name].of(peak_of(setup).sampler_entries, ref=name).high


def rule(setup: Setup, facts: Facts) -> Rule:
    """Which of the two the peak is, and since when the engine's sampler is of that kind."""
    fact = facts[sampler_fact(setup)]
    peak = peak_of(setup)
    lean = eras.is_from(setup.launch.version, eras.LEAN_SAMPLER)
    if fact.best * peak.sampler_entries + peak.beside_sampler_bytes < peak.forward_bytes:
        return Rule(name="forward peak", says=f"tokens of a step x 2 bytes x ({FORWARD})", records=("vllm-10517-29k",))
    return Rule(
        name="sampler peak",
        says=f"{float(fact.best):.1f} bytes x max_num_seqs x vocabulary, beside what the forward leaves",
        records=fact.records,
        since=eras.LEAN_SAMPLER if lean else None,
        before=None if lean else eras.LEAN_SAMPLER,
    )
