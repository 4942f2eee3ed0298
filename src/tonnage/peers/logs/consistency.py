"""A log against itself: sums that its engine has made of its own figures, made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from tonnage.peers.commands.command import Command
from tonnage.peers.commands.values import settings_of
from tonnage.peers.logs.log import Figure, Log, Unit
from tonnage.peers.logs.rows import Row, row_of
from tonnage.peers.version import Version
from tonnage.units import GiB

#: The release from which vLLM takes its estimate of graphs off the pool.
_GRAPHS_BUDGETED = (0, 21)
_MILLION = 10**6


def consistency(log: Log, flags: Mapping[str, object]) -> tuple[Row, ...]:
    """Every sum that has all its figures. ``flags``: settings of the start, as the log or the user tells."""
    checks = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[log.engine]
    return tuple(checks(log.figure, log, flags))


Get = Callable[[str], Figure | None]


def _vllm(get: Get, log: Log, flags: Mapping[str, object]) -> Iterator[Row]:
    total, share, requested = get("total_gpu_memory"), get("utilization"), get("requested")
    if total and share and requested:
        found = total.value * share.value // _MILLION
        slack = total.rounding + total.value * max(share.rounding, 5000 if share.rounding else 0) // _MILLION
        yield row_of(requested, found, name="requested", how="total x utilisation", slack=slack)
    yield from _vllm_pool(get, log)
    tokens, length, times = get("kv_cache_tokens"), get("max_model_len"), get("max_concurrency")
    if tokens and length and times and length.value:
        found = tokens.value * 1000 // length.value
        yield row_of(times, found, name="concurrency", how="tokens / max_model_len (not for windows and states)")
    yield from _times_blocks(get, "kv_cache_tokens", flags.get("block_size", 16))


def _vllm_pool(get: Get, log: Log) -> Iterator[Row]:
    requested, pool, peak = get("requested"), get("kv_cache"), get("activation_peak")
    if not (requested and pool and peak):
        return
    consumed = [get("consumed")] if get("consumed") else [get("weights"), get("non_torch")]
    if any(each is None for each in consumed):
        return
    parts = [each for each in (*consumed, peak) if each is not None]
    told = "requested - consumed - peak" if len(parts) == 2 else "requested - weights - non-torch - peak"
    estimate = get("cuda_graph_estimated")
    version = Version.read(log.version or "")
    if estimate and version.is_surely(since=_GRAPHS_BUDGETED):
        # From then on the printed peak is with the estimate in some releases, and without it in others.
        with_it = requested.value - sum(each.value for each in (*parts, estimate))
        if abs(pool.value - with_it) < abs(pool.value - (with_it + estimate.value)):
            parts, told = [*parts, estimate], f"{told} - estimated graphs"
    found = requested.value - sum(each.value for each in parts)
    slack = requested.rounding + sum(each.rounding for each in parts)
    yield row_of(pool, found, name="kv cache", how=told, slack=slack)


def _times_blocks(get: Get, name: str, block: object) -> Iterator[Row]:
    blocks, tokens = get("num_gpu_blocks"), get(name)
    if blocks and tokens and isinstance(block, int):
        yield row_of(tokens, blocks.value * block, name="tokens", how=f"blocks x {block} tokens")


def _sglang(get: Get, log: Log, flags: Mapping[str, object]) -> Iterator[Row]:
    del log
    before, after, weights = get("avail_before_load"), get("avail_after_weights"), get("weights")
    if before and after and weights:
        slack = before.rounding + after.rounding
        yield row_of(weights, before.value - after.value, name="weights", how="free before - after load", slack=slack)
    keys, values = get("kv_k"), get("kv_v")
    pool, fraction = get("kv_cache"), flags.get("mem_fraction_static")
    size = keys.value + values.value if keys and values else pool.value if pool else None
    states = sum(each.value for each in (get("mamba_conv"), get("mamba_ssm")) if each)
    if before and after and size is not None and isinstance(fraction, Fraction):
        kept = before.value * (1 - fraction)
        figure = keys or pool
        assert figure is not None
        found = int(after.value - kept) - states
        slack = before.rounding + after.rounding + 2 * figure.rounding + GiB // 10
        yield Row(
            name="kv cache", said=size, found=found, low=found - slack, high=found + slack, unit=Unit.BYTES,
            how="free after load - free before x (1 - mem_fraction_static)" + (" - states" if states else ""),
            line=figure.line,
        )  # fmt: skip
    pool_end = get("avail_after_pool")
    if after and pool_end and size is not None:
        slack = 2 * after.rounding + pool_end.rounding + GiB // 2
        yield row_of(
            pool_end,
            after.value - size - states,
            name="free after pool",
            how="free after load - pools",
            slack=slack,
        )


def _trtllm(get: Get, log: Log, flags: Mapping[str, object]) -> Iterator[Row]:
    del log
    total, peak, have = get("total_gpu_memory"), get("peak"), get("kv_cache_available")
    share, temporary, rate = get("utilization"), get("kv_temporary"), get("kv_bytes_per_token")
    if total and peak and have and share:
        free = total.value - peak.value + (temporary.value if temporary else 0)
        rounding = total.rounding + peak.rounding + (temporary.rounding if temporary else 0)
        yield row_of(
            have, free * share.value // _MILLION, name="kv cache", slack=rounding,
            how="(total - peak + temporary cache) x fraction",
        )  # fmt: skip
    estimated, tokens = get("kv_tokens_estimated"), get("kv_cache_tokens")
    if have and rate and rate.value and (estimated or tokens):
        figure = estimated or tokens
        assert figure is not None
        slack = have.rounding // rate.value + 64
        yield row_of(figure, have.value // rate.value, name="tokens", how="cache / bytes per token", slack=slack)
    yield from _times_blocks(get, "kv_cache_tokens", _value(get("tokens_per_block")) or flags.get("tokens_per_block"))


def _value(figure: Figure | None) -> int | None:
    return None if figure is None else figure.value


def settings_in_log(log: Log) -> dict[str, object]:
    """The settings that the log prints, parsed as those of a command."""
    return settings_of(Command(engine=log.engine, flags=log.flags))[0]
