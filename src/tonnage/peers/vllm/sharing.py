"""Ranks that hold the same tokens and divide them instead: decode context parallelism.

Token i of a sequence lies on rank i modulo the ranks of its group, so a block of a rank stands for as many times the
tokens of the sequence. The group lies inside that of tensor parallelism and makes no ranks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.costs.layers import Attention, Latent
from tonnage.costs.ranks import attention_ranks
from tonnage.errors import InvalidSetting
from tonnage.peers.launch import Launch
from tonnage.peers.start import Rule
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.kept import Keeps, Kept
from tonnage.peers.vllm.setup import Setup, count

NAME = "decode_context_parallel_size"
RULE = Rule(
    name="shared tokens", since=eras.SHARED_TOKENS,
    says="ranks that would hold the same tokens divide them: a block of each stands for block_size x ranks tokens",
    source="vllm#23734, vllm#24864; vllm/v1/kv_cache_interface.py and core/kv_cache_utils.py of 0.10.2 to 0.33.0",
)  # fmt: skip


def token_ranks(setup: Setup) -> int:
    """Ranks that divide the tokens of a sequence, 1 where none do.

    Raises ``InvalidSetting`` for what the engine refuses: ranks that it does not divide, heads that are not replicated.
    """
    launch = setup.launch
    ranks = count(launch, NAME) or 1
    if ranks == 1:
        return 1
    if not eras.is_from(launch.version, eras.SHARED_TOKENS) or not setup.is_v1:
        raise InvalidSetting(
            NAME,
            ranks,
            f"vLLM {launch.version} divides no tokens: 0.10.2 is the first that does",
            remedy="leave it out",
        )
    tp = attention_ranks(launch.rank)
    if tp % ranks:
        raise InvalidSetting(
            NAME, ranks, f"it does not divide the {tp} tensor-parallel ranks", remedy="choose one that does"
        )
    for mixer in {mixer for layer in launch.config.layers for mixer in layer.mixers}:
        if isinstance(mixer, Attention):
            _check_heads(launch, mixer, ranks=ranks, tp=tp)
        elif isinstance(mixer, Latent):
            _check_latent(launch, mixer, ranks=ranks)
        elif not eras.is_from(launch.version, eras.SHARED_TOKENS_BESIDE_STATES):
            raise InvalidSetting(
                NAME, ranks, f"vLLM {launch.version} divides no tokens beside states: 0.26 is the first that does",
                remedy="leave it out",
            )  # fmt: skip
    return ranks


def _check_latent(launch: Launch, mixer: Latent, *, ranks: int) -> None:
    """In 8 bits they are not divided before 0.25; of those with a sparse indexer it was not read."""
    asked = str(launch.kv_dtype or launch.get("kv_cache_dtype") or "")
    is_narrow = asked.startswith(("fp8", "float8")) and not mixer.index_head_dim
    if is_narrow and not eras.is_from(launch.version, eras.SHARED_TOKENS_IN_8_BITS):
        raise InvalidSetting(
            NAME, ranks, f"vLLM {launch.version} divides no tokens of latents in 8 bits: 0.25 is the first that does",
            remedy="leave one of the two out",
        )  # fmt: skip


def _check_heads(launch: Launch, mixer: Attention, *, ranks: int, tp: int) -> None:
    """Only replicas of one head can divide its tokens."""
    if not eras.is_from(launch.version, eras.SHARED_TOKENS_OF_HEADS):
        raise InvalidSetting(
            NAME, ranks, f"vLLM {launch.version} divides tokens of latents alone: 0.11.1 is the first for heads",
            remedy="leave it out",
        )  # fmt: skip
    most = max(1, tp // mixer.num_kv_heads)
    if ranks > most:
        times = "once" if most == 1 else f"{most} times"
        raise InvalidSetting(
            NAME, ranks, f"{mixer.num_kv_heads} KV heads on {tp} ranks are each held {times}, and no more ranks can "
            "divide the tokens of one",
            remedy=f"write at most {most}" if most > 1 else "leave it out, or use more tensor-parallel ranks",
        )  # fmt: skip
    if mixer.num_heads // mixer.num_kv_heads % ranks:
        raise InvalidSetting(
            NAME, ranks, f"it does not divide the {mixer.num_heads // mixer.num_kv_heads} query heads of a KV head",
            remedy="choose one that does",
        )  # fmt: skip


def check_kinds(setup: Setup, kept: Sequence[Kept]) -> None:
    """Raises ``InvalidSetting`` where layers with windows keep less than all: their tokens are not divided."""
    if any(each.keeps in (Keeps.WINDOW, Keeps.CHUNK) for each in kept):
        raise InvalidSetting(
            NAME, token_ranks(setup), "tokens of layers with windows are not divided",
            remedy="leave it out, or write disable_hybrid_kv_cache_manager beside it",
        )  # fmt: skip
