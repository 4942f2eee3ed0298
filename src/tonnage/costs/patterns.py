"""Which layer does what: a kind for every layer, from the dozen ways in which config.json files say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from tonnage.costs.reading import LARGEST_LAYERS, Fields


class Kind(StrEnum):
    FULL = "full"  # attention over every past token
    WINDOW = "window"  # attention over the last tokens
    CHUNK = "chunk"  # attention inside chunks of a fixed size
    STATE = "state"  # a recurrent state
    BOTH = "both"  # attention and a state in one layer
    CROSS = "cross"  # attention to an encoder alone
    DENSE = "dense"  # no mixer, a dense feed-forward part
    EXPERTS = "experts"  # no mixer, experts
    NOTHING = "nothing"  # neither
    COMPRESSED = "compressed"  # a window, and the past in entries of few tokens with a sparse indexer
    HEAVY = "heavy"  # a window, and the past in entries of many tokens


#: Entries of ``layer_types`` and its older names.
_WORDS: dict[str, Kind] = {
    "full_attention": Kind.FULL, "attention": Kind.FULL, "global": Kind.FULL, "global_attention": Kind.FULL,
    "deepseek_sparse_attention": Kind.FULL, "sliding_attention": Kind.WINDOW, "local": Kind.WINDOW,
    "local_attention": Kind.WINDOW, "sliding_window": Kind.WINDOW, "chunked_attention": Kind.CHUNK,
    "linear_attention": Kind.STATE, "mamba": Kind.STATE, "mamba2": Kind.STATE, "recurrent": Kind.STATE,
    "conv": Kind.STATE, "short_conv": Kind.STATE, "hybrid": Kind.BOTH, "mlp": Kind.DENSE, "moe": Kind.EXPERTS,
    "compressed_sparse_attention": Kind.COMPRESSED, "heavily_compressed_attention": Kind.HEAVY,
}  # fmt: skip
#: Letters of ``hybrid_override_pattern``.
_LETTERS = {"M": Kind.STATE, "*": Kind.FULL, "-": Kind.DENSE, "E": Kind.EXPERTS}

#: Families that alternate without saying so: every nth layer is full attention, counted from the end of each group.
_FULL_EVERY = {
    "gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "gemma3n": 5, "gemma4_text": 6, "gemma4": 6,
    "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4, "afmoe": 4,
    "mimo_v2_flash": 6,
}  # fmt: skip
_LINEAR_BUT_EVERY = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid")
#: Every layer keeps a state unless a list names those that attend.
_ONLY_STATES = ("mamba", "mamba2", "falcon_mamba", "bamba", "granitemoehybrid")
#: Families whose layers follow no rule: their files must name each.
_MUST_NAME = ("zamba2", "nemotron_h")


def num_layers(fields: Fields) -> int:
    """Layers of the text model. Where a pattern names each layer, the pattern is the longer word."""
    pattern = fields.own.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return len(_letters(fields, pattern))
    if fields.model_type == "nemotron_h" and (types := fields.sequence("layer_types")):
        return len(types)
    count = fields.count("num_hidden_layers", most=LARGEST_LAYERS)
    # Each layer of this family attends twice, and keeps a cache for both.
    return count * 2 if fields.model_type == "longcat_flash" and "num_hidden_layers" not in fields.outer else count


def layer_kinds(fields: Fields, count: int) -> tuple[Kind, ...]:
    """One kind a layer. Raises ``ModelConfigError`` naming the field whose words are not known or too few."""
    for rule in _RULES:
        kinds = rule(fields, count)
        if kinds is not None and len(kinds) < count:
            raise fields.error("num_hidden_layers", f"= {count}, and only {len(kinds)} layers are described")
        if kinds is not None:
            return tuple(kinds[:count])
    return (Kind.FULL,) * count


def window_tokens(fields: Fields) -> int | None:
    """The sliding window in force, None where every layer that could have one sees every position.

    ``use_sliding_window: false`` switches it off, and is what Qwen's classes assume; a window at least as long as
    the model's positions hides nothing.
    """
    given = "sliding_window" in fields.own
    window = fields.own["sliding_window"] if given else fields.value("sliding_window")
    default = not fields.model_type.startswith("qwen")
    if window is None or window == 0 or not fields.flag("use_sliding_window", default=default):
        return None
    tokens = fields.count("sliding_window")
    positions = fields.optional("max_position_embeddings")
    return None if positions and tokens >= positions else tokens


def _by_types(fields: Fields, count: int) -> Sequence[Kind] | None:
    types = fields.sequence("layer_types")
    if types is None:
        return None
    if len(types) < count:
        raise fields.error("layer_types", f"has {len(types)} entries for {count} layers")
    unknown = [word for word in types if str(word) not in _WORDS]
    if unknown:
        raise fields.error("layer_types", f"with {unknown[0]!r} is not known")
    return [_WORDS[str(word)] for word in types]


def _by_compression(fields: Fields, count: int) -> Sequence[Kind] | None:
    """Entries of one layer stand for so many tokens each: 0 for none, few with an indexer, many without."""
    ratios = fields.sequence("compress_ratios")
    if ratios is None:
        if fields.model_type != "deepseek_v4":
            return None
        fields.note("layer_types is absent: heavily compressed and compressed attention in turn")
        return [Kind.COMPRESSED if i % 2 and i >= 2 else Kind.HEAVY for i in range(count)]
    if len(ratios) < count:
        raise fields.error("compress_ratios", f"has {len(ratios)} entries for {count} layers")
    words = {0: Kind.WINDOW, 4: Kind.COMPRESSED, 128: Kind.HEAVY}
    unknown = [ratio for ratio in ratios if not isinstance(ratio, int) or ratio not in words]
    if unknown:
        raise fields.error("compress_ratios", f"with {unknown[0]!r} is not known")
    return [words[ratio] for ratio in ratios]  # type: ignore[index]


def _by_letters(fields: Fields, _count: int) -> Sequence[Kind] | None:
    pattern = fields.own.get("hybrid_override_pattern")
    return _letters(fields, pattern) if isinstance(pattern, str) and pattern else None


def _letters(fields: Fields, pattern: str) -> list[Kind]:
    unknown = set(pattern) - set(_LETTERS) - {"|"}
    if unknown:
        raise fields.error("hybrid_override_pattern", f"with {sorted(unknown)[0]!r} is not known")
    return [_LETTERS[letter] for letter in pattern if letter != "|"]


def _by_flags(fields: Fields, count: int) -> Sequence[Kind] | None:
    """Lists of zeros and ones, each with a meaning of its own."""
    for key, zero, one in (
        ("hybrid_layer_pattern", Kind.FULL, Kind.WINDOW),
        ("attn_type_list", Kind.STATE, Kind.FULL),
    ):
        flags = fields.sequence(key)
        if flags is not None:
            if len(flags) < count:
                raise fields.error(key, f"has {len(flags)} entries for {count} layers")
            return [one if flag else zero for flag in flags]
    return None


def _by_numbers(fields: Fields, count: int) -> Sequence[Kind] | None:
    """Lists of the layers that attend; the rest keep a state."""
    linear = fields.section("linear_attn_config")
    full = linear.get("full_attn_layers")
    if isinstance(full, list):
        return [Kind.FULL if i + 1 in full else Kind.STATE for i in range(count)]  # numbered from 1 in the file
    for key, kind in (
        ("full_attn_idxs", Kind.FULL),
        ("attn_layer_indices", Kind.FULL),
        ("hybrid_layer_ids", Kind.BOTH),
    ):
        if fields.sequence(key) is not None:
            layers = fields.whole_numbers(key)
            return [kind if i in layers else Kind.STATE for i in range(count)]
    blocks = fields.sequence("block_types")
    if blocks is not None:  # a pattern that repeats; its attention sees a window
        kinds = [_WORDS.get(str(word)) for word in blocks]
        return [Kind.STATE if kinds[i % len(kinds)] is Kind.STATE else _windowed(fields) for i in range(count)]
    return None


def _by_period(fields: Fields, count: int) -> Sequence[Kind] | None:
    period = fields.optional("attn_layer_period")
    if period:
        offset = fields.optional("attn_layer_offset")
        attends = Kind.BOTH if fields.model_type == "zamba" else Kind.FULL
        return [attends if i % period == offset else Kind.STATE for i in range(count)]
    interval = fields.optional("full_attention_interval")
    if not interval and fields.model_type in _LINEAR_BUT_EVERY:
        interval = 4
        fields.note("full_attention_interval is absent: 4, as the family's class has it")
    if interval:
        return [Kind.STATE if (i + 1) % interval else Kind.FULL for i in range(count)]
    if fields.model_type == "kimi_linear":
        fields.note("linear_attn_config is absent: every fourth layer attends, as the family's class has it")
        return [Kind.FULL if i and i % 4 == 0 else Kind.STATE for i in range(count)]
    if fields.model_type == "minimax":
        fields.note("layer_types is absent: every second layer keeps a state, as the family's class has it")
        return [Kind.STATE if i % 2 else Kind.FULL for i in range(count)]
    return None


def _by_family(fields: Fields, count: int) -> Sequence[Kind] | None:
    if fields.model_type in _MUST_NAME:
        raise fields.error("layers_block_type", "is missing")
    if fields.model_type in _ONLY_STATES:
        return [Kind.STATE] * count
    if fields.model_type == "falcon_h1":
        return [Kind.BOTH] * count
    cross = fields.whole_numbers("cross_attention_layers")
    if cross:
        return [Kind.CROSS if i in cross else Kind.FULL for i in range(count)]
    if fields.value("attention_chunk_size") is not None:
        interval = fields.optional("no_rope_layer_interval", 4)
        flags = fields.sequence("no_rope_layers") or [(i + 1) % interval for i in range(count)]
        return [Kind.CHUNK if flag else Kind.FULL for flag in flags]
    return _by_repeats(fields)


def _by_repeats(fields: Fields) -> Sequence[Kind] | None:
    """Words and how often they repeat: ``[[["global", "local"], 12]]``."""
    types = fields.sequence("attention_types")
    kinds: list[Kind] = []
    for part in types or ():
        words, times = part if isinstance(part, list) and len(part) == 2 else (None, None)
        repeated = [_WORDS.get(str(word)) for word in words] if isinstance(words, list) else [None]
        if None in repeated or not isinstance(times, int) or not 0 < times <= LARGEST_LAYERS:
            raise fields.error("attention_types", f"with {str(part)[:40]!r} is not known")
        kinds += [kind for kind in repeated if kind is not None] * times
    return kinds or None


def _by_window(fields: Fields, count: int) -> Sequence[Kind] | None:
    """A window in every layer, in most, or from some layer on."""
    if window_tokens(fields) is None:
        return None
    every = _full_every(fields)
    if every is not None:
        kinds = [Kind.WINDOW if (i + 1) % every else Kind.FULL for i in range(count)]
        if fields.model_type.startswith("gemma4"):
            kinds[-1] = Kind.FULL
        elif fields.model_type == "mimo_v2_flash":
            kinds[0] = Kind.FULL
        return kinds
    first = fields.value("max_window_layers")
    if isinstance(first, int) and not isinstance(first, bool):
        return [Kind.WINDOW if i >= first else Kind.FULL for i in range(count)]
    return [Kind.WINDOW] * count


def _full_every(fields: Fields) -> int | None:
    """n where every nth layer is full attention, None where all are alike."""
    for key in ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"):
        pattern = fields.value(key)
        if isinstance(pattern, str) and pattern:
            return len(pattern)  # "LLLG"
        if isinstance(pattern, int) and pattern > 0:
            return pattern
    text = fields.own.get("sliding_pattern")
    if isinstance(text, str):  # "5:1", windows to full layers
        windows, _, full = text.partition(":")
        if not (windows.isdecimal() and full.isdecimal() and int(full)):
            raise fields.error("sliding_pattern", f"= {text!r} is no ratio of windows to full layers")
        return (int(windows) + int(full)) // int(full)
    every = _FULL_EVERY.get(fields.model_type)
    if every is not None:
        fields.note(f"layer_types is absent: one layer in {every} is full attention, as the family's class has it")
    return every


def _windowed(fields: Fields) -> Kind:
    return Kind.FULL if window_tokens(fields) is None else Kind.WINDOW


_RULES: tuple[Callable[[Fields, int], Sequence[Kind] | None], ...] = (
    _by_types, _by_compression, _by_letters, _by_flags, _by_numbers, _by_period, _by_family, _by_window,
)  # fmt: skip
