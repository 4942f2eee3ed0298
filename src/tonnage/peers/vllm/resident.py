"""What lies beside the weights once they are loaded, and is not in the checkpoint.

Only for weights that were predicted or read from a checkpoint: what a log tells has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from tonnage.costs.layers import Attention, Latent
from tonnage.costs.ranks import attention_ranks, rank_shape
from tonnage.costs.towers import tower_tensors
from tonnage.layout import DTYPE_BYTES
from tonnage.peers.start import Rule
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.matrices import element_bytes, expert_elements, fused_elements
from tonnage.peers.vllm.setup import Setup
from tonnage.terms import Quantity, Source
from tonnage.units import MiB, round_up

#: Torch's allocator: requests from here on get a segment of their own, in whole pages, and what is left of it is
#: split off only where it is more than the least remainder.
_OWN_SEGMENT_BYTES, _PAGE_BYTES, _LEAST_REMAINDER_BYTES = 10 * MiB, 2 * MiB, MiB
#: Kernels of mxfp4 fill the width of the model and the width of an expert on a rank up to multiples of these: the
#: Marlin kernel, and the Triton kernel that Hopper has from 0.11 on.
_MXFP4_HIDDEN, _MXFP4_INNER, _MXFP4_INNER_TRITON = 256, 128, 64
_TRITON_SINCE, _HOPPER = (0, 11), 90
_MXFP4_BYTES = Fraction(17, 32)

RULE = Rule(
    name="beside the weights",
    says="tables of rotary positions (positions x rotated elements x 2 bytes), the latent projections that are kept "
    "transposed, what the allocator rounds each fused matrix up to, and what kernels of mxfp4 fill up",
    records=(
        "fs-4922787267", "vllm-13061", "fs-60430572081", "vllm-10517-29k", "vllm-23278", "llmd-emp-gpt-oss-120b-tp1",
        "llmd-meta-llama-llama-4-scout-h100-80gb-tp4pp1dp1-8192", "llmd-microsoft-phi-4-h100-80gb-tp1pp1dp1-8192",
        "llmd-fp8dyn-redhatai-qwen2-5-h100-80gb-tp1pp1dp1-8192",
    ),
    source="torch's caching allocator; vLLM's rotary embeddings",
)  # fmt: skip


def beside_weights(setup: Setup) -> Quantity:
    """Bytes. The lower end is without the allocator's rounding, the upper with twice of it; kernels of mxfp4 have
    filled up 0.95 to 2.2 of what is taken here."""
    launch = setup.launch
    if is_logged(launch.weights):
        return Quantity.exact(0, launch.weights.source, "in the weights that were logged")
    rounding = sum(_rounding(num_bytes) for num_bytes in _matrices(setup))
    fixed = rotary_bytes(setup) + _absorbed_bytes(setup)
    padding = _padding_bytes(setup)
    return Quantity(
        bytes=fixed + rounding + padding,
        low=fixed + padding * 3 // 4,
        high=fixed + 2 * rounding + padding * 5 // 2,
        source=Source.PREDICTED,
        ref="peers.vllm.resident",
    )


def _matrices(setup: Setup) -> Iterable[int]:
    launch = setup.launch
    word = element_bytes(launch.config, launch.dtype)
    for number in rank_shape(launch.config, launch.rank).layers:
        for elements in fused_elements(launch.config, launch.config.layers[number], launch.rank):
            yield int(elements * word)


def _rounding(num_bytes: int) -> int:
    """What the allocator counts as allocated beyond what was asked for."""
    if num_bytes < _OWN_SEGMENT_BYTES:
        return 0
    rest = round_up(num_bytes, _PAGE_BYTES) - num_bytes
    return rest if rest <= _LEAST_REMAINDER_BYTES else 0


def rotary_bytes(setup: Setup) -> int:
    """Cosines and sines of every position, in the model's dtype: one table, or one for windows and one for the rest."""
    config = setup.launch.config
    if config.model_type in ("opt", "gpt2", "bloom"):
        return 0
    sizes: set[tuple[int, bool]] = set()
    for layer in {id(layer): layer for layer in config.layers}.values():
        for mixer in layer.mixers:
            if isinstance(mixer, Latent):
                sizes.add((mixer.qk_rope_head_dim, False))
            elif isinstance(mixer, Attention) and not mixer.is_cross:
                local = config.model_type.startswith(("gemma3", "gemma4")) and mixer.window is not None
                sizes.add((mixer.head_dim, local))
    share = config.raw.get("partial_rotary_factor")
    factor = Fraction(str(share)) if isinstance(share, int | float) else Fraction(1)
    word = DTYPE_BYTES[setup.launch.dtype or config.dtype]
    return sum(int(config.max_position_embeddings * size * factor) * word for size, _ in sizes)


def _absorbed_bytes(setup: Setup) -> int:
    """Latent attention keeps the projections from and to the latent vector a second time, in the model's dtype."""
    launch = setup.launch
    total = 0
    for number in rank_shape(launch.config, launch.rank).layers:
        for mixer in launch.config.layers[number].mixers:
            if isinstance(mixer, Latent):
                heads = mixer.num_heads // attention_ranks(launch.rank)
                total += heads * mixer.kv_lora_rank * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    return total * DTYPE_BYTES[launch.dtype or launch.config.dtype]


def is_logged(weights: Quantity) -> bool:
    """Whether a log told them: then all that lies beside them is in them."""
    return weights.source in (Source.MEASURED, Source.COUNTED)


def towers_cut(setup: Setup) -> int:
    """Bytes by which the price of a rank's weights is too large: encoders are cut over the ranks too, and priced whole
    on each."""
    launch = setup.launch
    is_whole = launch.config.towers and launch.rank.tp > 1 and launch.config.quantisation is None
    if not is_whole or is_logged(launch.weights):
        return 0
    if not rank_shape(launch.config, launch.rank).has_embeddings:
        return 0
    elements = sum(tensor.num_elements for tensor in tower_tensors(launch.config)[0])
    whole = elements * DTYPE_BYTES[launch.dtype or launch.config.dtype]
    return whole - whole // launch.rank.tp


def _padding_bytes(setup: Setup) -> int:
    launch = setup.launch
    packing = launch.config.quantisation
    if packing is None or packing.format != "mxfp4":
        return 0
    has_triton = launch.card.sm == _HOPPER and eras.is_from(launch.version, _TRITON_SINCE)
    inner = _MXFP4_INNER_TRITON if has_triton else _MXFP4_INNER
    total = 0
    for number in rank_shape(launch.config, launch.rank).layers:
        layer = launch.config.layers[number]
        filled = expert_elements(launch.config, layer, launch.rank, hidden_step=_MXFP4_HIDDEN, inner_step=inner)
        total += filled - expert_elements(launch.config, layer, launch.rank, hidden_step=1, inner_step=1)
    return int(total * _MXFP4_BYTES)
