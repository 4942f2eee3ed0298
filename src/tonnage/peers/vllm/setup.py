"""What a launch comes to: every setting resolved as that release would, with those that were left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from tonnage.errors import InvalidSetting
from tonnage.peers.launch import Launch
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.defaults import Default, batched_tokens, core, max_num_seqs, utilisation
from tonnage.units import GiB, MiB, exact

T = TypeVar("T", int, Fraction)

#: How the length may be asked for that the pool holds.
AUTO = ("auto", -1, "-1")
DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A launch with nothing left open.

    core            "V0" or "V1"
    is_auto_length  the longest sequence is what the pool holds; ``max_model_len`` is then the model's own
    caches_states   prefixes are cached, and so one more state of each sequence is kept
    pool_bytes      the pool where it was asked for in bytes; num_blocks: where in blocks
    num_drafts      tokens that are drafted ahead
    offloaded_bytes  weights that stay in host memory
    defaults        settings that were left out: (name, value, why)
    """

    launch: Launch
    core: str
    utilisation: Fraction
    max_num_seqs: int
    batched_tokens: int
    block_tokens: int
    max_model_len: int
    is_auto_length: bool
    is_eager: bool
    caches_states: bool
    deducts_graphs: bool
    pool_bytes: int | None
    num_blocks: int | None
    num_drafts: int
    offloaded_bytes: int
    defaults: tuple[Default, ...]

    @property
    def is_v1(self) -> bool:
        return self.core == "V1"


def resolve(launch: Launch) -> Setup:
    """Every setting. Raises ``InvalidSetting`` for one that the engine would not read."""
    found: list[Default] = []
    engine = _choice(launch, "engine_core", ("V0", "V1")) or core(launch)
    asked = launch.get("max_model_len")
    is_auto = asked in AUTO
    length = None if is_auto else count(launch, "max_model_len")
    if length is None:
        length = launch.config.max_position_embeddings
        if not is_auto:
            found.append(("max_model_len", str(length), "as config.json has it"))
    share = _share(launch)
    if share is None:
        share = _noted(found, "gpu_memory_utilization", utilisation(launch.version))
    chunked = switch(launch, "enable_chunked_prefill")
    batched = count(launch, "max_num_batched_tokens")
    if batched is None:
        default = batched_tokens(launch, core=engine, max_model_len=length, chunked=chunked)
        batched = _noted(found, "max_num_batched_tokens", default)
    seqs = count(launch, "max_num_seqs")
    if seqs is None:
        seqs = _noted(found, "max_num_seqs", max_num_seqs(launch, core=engine, num_tokens=batched))
    eager = bool(switch(launch, "enforce_eager"))
    return Setup(
        launch=launch,
        core=engine,
        utilisation=share,
        max_num_seqs=seqs,
        batched_tokens=batched,
        block_tokens=count(launch, "block_size") or DEFAULT_BLOCK_TOKENS,
        max_model_len=length,
        is_auto_length=is_auto,
        is_eager=eager,
        caches_states=_caches_states(launch),
        deducts_graphs=not eager and _deducts_graphs(launch),
        pool_bytes=count(launch, "kv_cache_memory_bytes"),
        num_blocks=count(launch, "num_gpu_blocks_override"),
        num_drafts=_drafts(launch),
        offloaded_bytes=_offloaded(launch),
        defaults=tuple(found),
    )


def _noted(found: list[Default], name: str, default: tuple[T, str]) -> T:
    value, why = default
    found.append((name, str(float(value)) if isinstance(value, Fraction) else str(value), why))
    return value


def _caches_states(launch: Launch) -> bool:
    asked = switch(launch, "enable_prefix_caching")
    return eras.is_from(launch.version, eras.HYBRID_PREFIXES) if asked is None else asked


def _deducts_graphs(launch: Launch) -> bool:
    asked = switch(launch, "cudagraph_mem_estimate_enabled")
    return eras.is_from(launch.version, eras.GRAPHS_DEDUCTED) if asked is None else asked


def count(launch: Launch, name: str, *, allow_zero: bool = False) -> int | None:
    """A whole number above zero, or None where it was not asked for."""
    value = launch.get(name)
    if value is None:
        return None
    try:
        number = int(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        number = -1
    if isinstance(value, bool) or number < (0 if allow_zero else 1):
        raise InvalidSetting(name, value, "not a whole number above zero", remedy="write one such as 256")
    return number


def switch(launch: Launch, name: str) -> bool | None:
    value = launch.get(name)
    if value is None or isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "false": False, "0": False}
    if str(value).lower() not in words:
        raise InvalidSetting(name, value, "neither true nor false", remedy="write true or false")
    return words[str(value).lower()]


def _share(launch: Launch) -> Fraction | None:
    value = launch.get("gpu_memory_utilization")
    if value is None:
        return None
    try:
        share = exact(str(value))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise InvalidSetting(
            "gpu_memory_utilization", value, "not above 0 and at most 1", remedy="write a share such as 0.9"
        )
    return share


def _drafts(launch: Launch) -> int:
    """By itself, or inside ``speculative_config``."""
    config = launch.get("speculative_config")
    inner = config.get("num_speculative_tokens") if isinstance(config, Mapping) else None
    if inner is not None:
        launch = replace(launch, settings={"num_speculative_tokens": inner})
    return count(launch, "num_speculative_tokens", allow_zero=True) or 0


def _offloaded(launch: Launch) -> int:
    """``cpu_offload_gb`` is GiB in the engine's flag, and bytes where somebody has parsed it."""
    value = launch.get("cpu_offload_gb")
    if value is None:
        return 0
    try:
        amount = exact(str(value))
    except (ValueError, ZeroDivisionError):
        amount = Fraction(-1)
    if amount < 0:
        raise InvalidSetting("cpu_offload_gb", value, "not a size", remedy="write GiB, such as 4")
    return int(amount if amount >= MiB else amount * GiB)


def _choice(launch: Launch, name: str, words: tuple[str, ...]) -> str | None:
    value = launch.get(name)
    if value is None:
        return None
    if value not in words:
        raise InvalidSetting(name, value, "not known", remedy=f"use one of {', '.join(words)}")
    return str(value)
