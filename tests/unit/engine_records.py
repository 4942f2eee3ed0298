"""Every logged start of SGLang, TensorRT-LLM and llama.cpp beside what the rules give from its settings.

A rule is fed what the log says it was given (free memory before and after loading, bytes of a pool), so that each row
tests one rule and not a chain. What no log gives is said in ``note``. docs/engines.md shows these rows; a test
compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from shapes import config, raw_config, starts

from tonnage.costs.config import ModelConfig
from tonnage.hardware import generic_card
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.llamacpp.sizes import model_of
from tonnage.peers.predict import predict
from tonnage.peers.sglang import after
from tonnage.peers.sglang.cells import cells
from tonnage.peers.sglang.fraction import (
    HIDDEN_MIB,
    decode_graph_sizes,
    has_compressed,
    is_multimodal,
    static_fraction,
)
from tonnage.peers.sglang.pools import Pools, pools, shapes
from tonnage.peers.trtllm.engine_path import num_blocks
from tonnage.peers.version import Version
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import GiB, MiB

#: MiB that a driver's tool shows for a class of cards: what SGLang's table of defaults reads.
TOOL_MIB = {"4GB-class": 4096, "16GB-class": 16303, "24GB-class": 24564, "A100-40GB": 40960}
KV_DTYPES = {"auto": None, "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp8": "float8_e4m3fn"}
NAMES = {"tensorrt-llm": "trtllm", "llama.cpp": "llamacpp"}


@dataclass(frozen=True)
class Row:
    """``logged`` and ``predicted`` in bytes or a count. ``within``: the share that the test allows."""

    id: str
    engine: str
    version: str
    model: str
    what: str
    logged: float
    predicted: float
    unit: str
    within: float
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.logged - 1


def record(name: str) -> dict:
    return next(each for each in starts() if each["id"] == name)


def launch_of(row: dict, **more: object) -> Launch:
    """The launch of a record, its weights as logged where they are."""
    flags = {name: value for name, value in row["flags"].items() if name in SETTINGS}
    settings = {SETTINGS[name]: _typed(value) for name, value in flags.items()}
    total = int((row["gpu_mem_gib"] or 80) * GiB)
    if row["gpu"] in TOOL_MIB:
        total = (TOOL_MIB[row["gpu"]] - HIDDEN_MIB) * MiB
    weights = int(row["logged"].get("weights_gib", 0) * GiB)
    key = row["hf_config_key"]
    found = Launch(
        engine=NAMES.get(row["engine"], row["engine"]),
        version=Version.read(row["engine_version"]),
        config=vision_config(key) if key in VISION and row["engine"] == "sglang" else halved(config(key)),
        weights=Quantity.exact(weights, Source.MEASURED, row["id"]),
        card=generic_card(total),
        rank=Rank(tp=row["tp"], size=row["tp"]),
        kv_dtype=KV_DTYPES[row["kv_dtype"]],
        settings=settings,
    )
    return replace(found, **more)


SETTINGS = {
    "mem_fraction_static": "mem_fraction_static", "max_total_tokens": "max_total_tokens",
    "max_running_requests": "max_running_requests", "max_mamba_cache_size": "max_mamba_cache_size",
    "chunked_prefill_size": "chunked_prefill_size", "cuda_graph_max_bs": "cuda_graph_max_bs",
    "cuda_graph_bs": "cuda_graph_bs", "disable_cuda_graph": "disable_cuda_graph", "context_len": "context_length",
    "speculative": "speculative_algorithm", "speculative_num_draft_tokens": "speculative_num_draft_tokens",
    "ctx_size": "ctx_size", "n_parallel": "parallel", "kv_unified": "kv_unified",
}  # fmt: skip
#: Shapes here are text models; these published files have a vision tower, whose size no record tells.
VISION = ("qwen3.5-9b", "qwen3.6-27b")


def halved(made: ModelConfig) -> ModelConfig:
    """Left to themselves, these engines compute a model published in float32 in float16, and its cache follows."""
    return replace(made, dtype="float16") if made.dtype == "float32" else made


@cache
def vision_config(key: str) -> ModelConfig:
    return ModelConfig.from_dict({**raw_config(key), "vision_config": {}}, name=key)


def _typed(value: object) -> object:
    return Fraction(str(value)) if isinstance(value, float) else tuple(value) if isinstance(value, list) else value


def sglang_pools(row: dict) -> tuple[Launch, Pools]:
    """The pools by the record's own free memory before and after loading."""
    launch = launch_of(row)
    settings = Settings(launch)
    logged = row["logged"]
    left = logged["avail_after_weights_gib"]
    before = logged.get("avail_before_load_gib", left + logged.get("weights_gib", 0))
    made = shapes(launch, settings, has_media=is_multimodal(launch), is_compressed=has_compressed(launch))
    found = pools(
        cells(launch, settings), made, before=int(before * GiB), weights=int((before - left) * GiB),
        fraction=static_fraction(launch, settings).best,
    )  # fmt: skip
    return launch, found


def pool_gib(logged: dict) -> float:
    parts = ("kv_k_gib", "kv_v_gib", "kv_total_gib", "kv_cache_gib")
    return sum(logged.get(name, 0) for name in parts)


#: id -> (what the share was allowed to be off by, note): SGLang's starts with free memory before and after loading.
WHOLE = {
    "fs-9542409931": (0.005, "0.88 for one rank"),
    "fs-47444754202": (0.01, "2.9 GiB of 16,303 MiB"),
    "fs-46415979912": (0.01, "3,728 of 16,303 MiB"),
    "fs-52853901169": (0.01, "as asked"),
    "fs-53944457073": (0.01, "3,888 of 24,564 MiB, times 0.95: size of the tower not told"),
    "fs-65830671609": (0.01, "as asked"),
    "sg-dsv4-h20": (0.01, "as asked"),
}


def rows() -> Iterator[Row]:
    yield from _static()
    yield from _states()
    yield from _tables()
    yield from _cells()
    yield from _graphs()
    yield from _chains()
    yield from _trtllm()
    yield from _llamacpp()


def _row(row: dict, what: str, logged: float, predicted: float, unit: str, within: float, note: str = "") -> Row:
    return Row(
        id=row["id"], engine=row["engine"], version=row["engine_version"], model=row["hf_config_key"] or row["model"],
        what=what, logged=logged, predicted=float(predicted), unit=unit, within=within, note=note,
    )  # fmt: skip


def _static() -> Iterator[Row]:
    for name, (within, note) in WHOLE.items():
        row = record(name)
        logged = row["logged"]
        _, found = sglang_pools(row)
        states = logged.get("mamba_conv_gib", 0) + logged.get("mamba_ssm_gib", 0)
        yield _row(row, "pools", (pool_gib(logged) + states) * GiB, found.all_bytes, "bytes", within, note)
        yield _row(row, "tokens", logged["kv_cache_tokens"], found.tokens, "count", within)
        if "max_mamba_cache_size" in logged:
            yield _row(row, "state slots", logged["max_mamba_cache_size"], found.slots, "count", within)


def _states() -> Iterator[Row]:
    """Slots as logged, bytes by the rule."""
    for name in ("fs-69213517065", "fs-53944457073", "fs-65830671609", "fs-46415979912", "sg-fs-70920711276"):
        row = record(name)
        logged, launch = row["logged"], launch_of(row)
        kept = cells(launch, Settings(launch))
        state = kept.state
        slots = logged["max_mamba_cache_size"]
        have = (logged["mamba_conv_gib"] + logged["mamba_ssm_gib"]) * GiB
        yield _row(row, "state pool", have, (slots + 1) * state, "bytes", 0.005, f"{slots:,} slots and one")
        if "mamba_intermediate_ssm_gib" in logged:
            drafts = row["flags"]["speculative_num_draft_tokens"]
            have = (logged["mamba_intermediate_ssm_gib"] + logged["mamba_intermediate_conv_gib"]) * GiB
            yield _row(
                row, "verification states", have, kept.verify_bytes(slots + 1, drafts), "bytes", 0.005,
                f"{slots + 1} rows of {drafts}",
            )  # fmt: skip


#: Lengths that the published files give and the abbreviated shapes do not.
LENGTHS = {"lfm2-700m": 128_000, "qwen3.5-9b": 262_144}


def _tables() -> Iterator[Row]:
    """What is free once the pools are there."""
    for name in ("fs-47444754202", "fs-46415979912", "fs-55068335887", "fs-53944457073"):
        row = record(name)
        logged, launch = row["logged"], launch_of(row)
        settings = Settings(launch)
        made = shapes(launch, settings, has_media=False, is_compressed=False)
        made = replace(made, context_tokens=LENGTHS.get(row["hf_config_key"], made.context_tokens))
        kept = cells(launch, settings)
        slots = logged.get("max_mamba_cache_size", 0)
        have = replace(
            pools(kept, replace(made, max_tokens=logged["kv_cache_tokens"], slots=slots or None),
                  before=2**60, weights=0, fraction=Fraction(99, 100)),
            tokens=logged["kv_cache_tokens"],
        )  # fmt: skip
        taken = (pool_gib(logged) + logged.get("mamba_conv_gib", 0) + logged.get("mamba_ssm_gib", 0)) * GiB
        free = logged["avail_after_weights_gib"] * GiB - taken - after.request_table(have, made)
        yield _row(row, "free after the pools", logged["avail_after_pool_gib"] * GiB, free, "bytes", 0.05,
                   f"{have.max_requests:,} requests")  # fmt: skip


def _cells() -> Iterator[Row]:
    """Tokens by the bytes of the pool as logged."""
    for name in ("fs-62173106413", "fs-67160078054", "sg-fs-66428217379", "fs-69213517065", "sg-fs-70920711276",
                 "fs-55068335887"):  # fmt: skip
        row = record(name)
        launch = launch_of(row)
        launch = replace(launch, settings={**launch.settings, "speculative_algorithm": "none"})
        token = cells(launch, Settings(launch)).token
        tokens = pool_gib(row["logged"]) * GiB / token
        yield _row(row, "tokens of that pool", row["logged"]["kv_cache_tokens"], tokens, "count", 0.005)
    row = record("fs-57060678961")
    launch = replace(launch_of(row), settings={})
    yield _row(row, "bytes of a token", row["logged"]["kv_bytes_per_token"], cells(launch, Settings(launch)).token,
               "bytes", 0.005)  # fmt: skip
    row = record("sg-dsv4-h20")
    launch = launch_of(row)
    yield _row(row, "bytes of a token", row["logged"]["kv_bytes_per_token"], cells(launch, Settings(launch)).token,
               "bytes", 1e-6)  # fmt: skip


GRAPHS = ("fs-47444754202", "fs-46415979912", "fs-65830671609", "sg-fs-63199567676-a", "sg-fs-63199567676-b")


def graph_mib() -> dict[str, float]:
    """MiB for each size of a decode graph, by record."""
    found = {}
    for name in GRAPHS:
        row = record(name)
        settings = Settings(launch_of(row))
        largest = row["flags"].get("cuda_graph_max_bs") or row["flags"].get("max_running_requests") or 0
        count = row["logged"].get("cuda_graph_count") or len(decode_graph_sizes(settings, largest))
        found[name] = row["logged"]["cuda_graph_gib"] * 1024 / count
    return found


def _graphs() -> Iterator[Row]:
    each = graph_mib()
    for name, mib in each.items():
        row = record(name)
        others = sorted(value for other, value in each.items() if source(other) != source(name))
        half = len(others) // 2
        median = others[half] if len(others) % 2 else (others[half - 1] + others[half]) / 2
        count = row["logged"]["cuda_graph_gib"] * 1024 / mib
        yield _row(row, "decode graphs", row["logged"]["cuda_graph_gib"] * GiB, median * count * MiB, "bytes", 3.0,
                   f"{round(count)} sizes at the median of the other sources")  # fmt: skip


def source(name: str) -> str:
    """Records of one source share it."""
    return record(name)["source"]


def _chains() -> Iterator[Row]:
    """Whole starts, from the card and the weights alone: the two whose card, weights and pool are all logged."""
    row = record("fs-65830671609")
    start, logged = predict(launch_of(row)), row["logged"]
    have = (pool_gib(logged) + logged["mamba_conv_gib"] + logged["mamba_ssm_gib"]) * GiB
    yield _row(row, "pools, from the card", have, start.pool.bytes, "bytes", 0.01)
    yield _row(row, "tokens, from the card", logged["kv_cache_tokens"], start.tokens.best, "count", 0.01)
    row = record("trtllm-1400")
    weights = Quantity.exact(row["logged"]["engine_gpu_mib"] * MiB, Source.MEASURED, row["id"])
    shapes_of = {"max_batch_size": row["flags"]["max_batch_size"], "max_num_tokens": row["flags"]["max_num_tokens"]}
    start = predict(launch_of(row, weights=weights, settings=shapes_of))
    yield _row(row, "tokens, from the card", row["logged"]["kv_cache_tokens"], start.tokens.best, "count", 0.01)


def _trtllm() -> Iterator[Row]:
    for name in ("trtllm-doc-memory", "trt-fs-10054575706"):
        row = record(name)
        logged, launch = row["logged"], launch_of(row)
        token = int(cells(launch, Settings(launch)).token)
        block = row["flags"].get("tokens_per_block", 64)
        blocks = num_blocks(int(logged["avail_before_kv_gib"] * GiB), Fraction(9, 10), block * token)
        yield _row(row, "tokens", logged["kv_cache_tokens"], blocks * block, "count", 0.001, "0.9 of what is free")
    for name in ("trtllm-1400", "trtllm-5306", "triton-tut-150", "fs-70957398956"):
        row = record(name)
        logged, launch = row["logged"], launch_of(row)
        pool = logged.get("kv_cache_bytes") or logged["kv_cache_gib"] * GiB
        tokens = pool / cells(launch, Settings(launch)).token
        yield _row(row, "tokens of that pool", logged["kv_cache_tokens"], tokens, "count", 0.005)


def _llamacpp() -> Iterator[Row]:
    row = record("lmstudio-1862")
    launch = launch_of(row)
    model = model_of(launch, Settings(launch))
    logged = row["logged"]
    yield _row(row, "kv cache", logged["kv_cache_gib"] * GiB, model.kv_bytes(262_144), "bytes", 0.001)
    yield _row(row, "recurrent states", logged["mamba_total_gib"] * GiB, model.state * model.num_sequences, "bytes",
               0.001, "four slots")  # fmt: skip
