"""What every reserve is given, and how it speaks: inputs, claims, and the row that describes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tonnage.config import DEFAULT_BLOCK_TOKENS, Limits
from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention
from tonnage.costs.ranks import RankShape, rank_shape
from tonnage.layout import KVLayout
from tonnage.terms import Claim, Lifetime, Rank, ReferenceSide, Scratch

#: Reserves whose bytes a measurement, or the closed form in its place, already holds. They are listed and cost nothing.
COUNTED = frozenset({"graphs", "sampler", "fragmentation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A declaration of the attention backend, with what the plan says about it.

    label         tells kinds of layers apart where a model has several, else empty
    is_context    it grows with the cached past that a step attends to
    in_reference  the reference's backend declares it too
    """

    scratch: Scratch
    label: str = ""
    is_context: bool = False
    in_reference: bool = True

    @property
    def name(self) -> str:
        return f"{self.scratch.backend}: {self.scratch.name}" + (f" ({self.label})" if self.label else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveInputs:
    """Everything a reserve may depend on; bytes of one rank.

    dtype            of weights and compute
    device_kind      "cuda" or "host"
    scratch          what ``backend`` declares for the kinds of layers of this rank; ``reads`` what it does with pages
    algorithm        how sparse attention picks tokens, "none" where it reads them all
    layout           of the cache; None: one group of pages of ``block_tokens`` tokens
    beam_width       sequences that one request may branch into
    num_host_blocks  blocks of the host tier
    profiled_output_bytes  what the encoder's output took in the probes that were run
    counted          reserves that the plan's measured or predicted quantities hold already
    """

    config: ModelConfig
    limits: Limits
    rank: Rank
    dtype: str
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    device_kind: str = "cuda"
    backend: str = "sdpa"
    reads: str = ""
    scratch: tuple[Declared, ...] = ()
    algorithm: str = "none"
    layout: KVLayout | None = None
    beam_width: int = 1
    num_host_blocks: int = 0
    profiled_output_bytes: int = 0
    counted: frozenset[str] = COUNTED

    @property
    def held(self) -> RankShape:
        """Layers and heads of this rank."""
        return rank_shape(self.config, self.rank)

    @property
    def on_host(self) -> bool:
        return self.device_kind == "host"

    @property
    def has_encoder(self) -> bool:
        """A tower beside the text model, or an encoder whose output its layers attend to."""
        mixers = (mixer for layer in self.config.layers for mixer in layer.mixers)
        return bool(self.config.towers) or any(isinstance(mixer, Attention) and mixer.is_cross for mixer in mixers)

    @property
    def num_extra_seats(self) -> int:
        """Seats beyond the running sequences: with a step in flight, one that ended keeps its seat while the next
        sequence sits down, so all of them may be there twice. Pipeline stages take turns and have none."""
        return self.limits.max_batch_size if self.limits.lookahead_steps and self.rank.pp == 1 else 0

    @property
    def num_seats(self) -> int:
        return self.limits.max_batch_size + self.num_extra_seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """A row of ``RESERVES``: when it applies, how much it is, and how the reference policy charges it (None: not)."""

    name: str
    trigger: str
    formula: str
    lifetime: Lifetime
    reference_side: ReferenceSide | None
    claims: Callable[[ReserveInputs], tuple[Claim, ...]]


def only_if(claim: Claim, condition: object, because: str) -> Claim:
    """The claim, charged nothing ``because`` of something unless the condition holds."""
    return claim if condition else replace(claim, applies=False, because=because)
