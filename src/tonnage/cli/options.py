"""Options that several verbs share, declared once, and what becomes of their text: settings that know their flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias, TypeVar

import typer

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.units import parse_bytes, parse_count, parse_fraction

T = TypeVar("T")
Text: TypeAlias = str | None


def _option(flag: str, metavar: str, told: str) -> typer.models.OptionInfo:
    # Everything is text here, so that one parser (tonnage.units) tells every mistake in the same words.
    return typer.Option(flag, metavar=metavar, help=told, show_default=False)


def argument(metavar: str) -> typer.models.ArgumentInfo:
    """A positional argument; the verb's docstring explains it (under click 8.5, typer's own row loses its help)."""
    return typer.Argument(metavar=metavar, hidden=True)


Model = Annotated[str, argument("MODEL")]
Device = Annotated[Text, _option("--device", "NAME", "A card by name (H100), or host with --memory.")]
Memory = Annotated[Text, _option("--memory", "SIZE", "Size of the device, such as 80GiB.")]
Dtype = Annotated[Text, _option("--dtype", "NAME", "Dtype of the weights (default: the model's own).")]

MaxSeqLen = Annotated[
    Text, _option("--max-seq-len", "N", "Tokens of one sequence, prompt and output (default: the model's length).")
]
MaxBatchSize = Annotated[
    Text, _option("--max-batch-size", "N", "Sequences running at once (default 256; 32 on the host).")
]
MaxNumTokens = Annotated[
    Text, _option("--max-num-tokens", "N", "Tokens computed in one step (default 8192; 512 on the host).")
]

TotalBytes = Annotated[Text, _option("--total-bytes", "SIZE", "Cap on everything the engine takes.")]
KeepFreeBytes = Annotated[Text, _option("--keep-free-bytes", "SIZE", "Memory to leave alone (default 256MiB).")]
KVFraction = Annotated[
    Text, _option("--kv-fraction", "SHARE", "Share of what the fixed lines leave, for the KV cache (default 1).")
]
KVBytes = Annotated[Text, _option("--kv-bytes", "SIZE", "Cap on the KV cache.")]
KVTokens = Annotated[Text, _option("--kv-tokens", "N", "Cap on the KV cache, in tokens.")]
KVDtype = Annotated[Text, _option("--kv-dtype", "NAME", "Dtype of the KV cache (default: that of the weights).")]
BlockTokens = Annotated[Text, _option("--block-tokens", "N", "Tokens in one KV block (default 16).")]

AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Write over files that exist.")]


def setting(text: Text, flag: str, parse: Callable[..., T], **how: object) -> Setting[T]:
    """The setting that ``flag`` gave; not set where it was absent. Raises ``InvalidSetting`` naming the flag."""
    return Setting() if text is None else Setting.flag(parse(text, knob=flag, **how), text, flag)


def read_knobs(
    *,
    total_bytes: Text,
    keep_free_bytes: Text,
    kv_fraction: Text,
    kv_bytes: Text,
    kv_tokens: Text,
    kv_dtype: Text,
    block_tokens: Text,
) -> Knobs:
    """Raises ``InvalidSetting`` for the first text that cannot be read. Only ``keep_free_bytes`` may be 0."""
    from tonnage.costs.dtypes import parse_dtype

    return Knobs(
        total_bytes=setting(total_bytes, "--total-bytes", parse_bytes),
        keep_free_bytes=setting(keep_free_bytes, "--keep-free-bytes", parse_bytes, allow_zero=True),
        kv_fraction=setting(kv_fraction, "--kv-fraction", parse_fraction),
        kv_bytes=setting(kv_bytes, "--kv-bytes", parse_bytes),
        kv_tokens=setting(kv_tokens, "--kv-tokens", parse_count),
        kv_dtype=setting(kv_dtype, "--kv-dtype", parse_dtype),
        block_tokens=setting(block_tokens, "--block-tokens", parse_count),
    )


def read_limits(*, max_seq_len: Text, max_batch_size: Text, max_num_tokens: Text) -> LimitKnobs:
    """Raises ``InvalidSetting`` for the first text that is not a whole number of at least 1."""
    return LimitKnobs(
        max_seq_len=setting(max_seq_len, "--max-seq-len", parse_count),
        max_batch_size=setting(max_batch_size, "--max-batch-size", parse_count),
        max_num_tokens=setting(max_num_tokens, "--max-num-tokens", parse_count),
    )


def read_bytes(text: Text, flag: str) -> int | None:
    """Bytes, or None where the flag was not given. Raises ``InvalidSetting``."""
    return None if text is None else parse_bytes(text, knob=flag)


def read_dtype(text: Text) -> str | None:
    """The one name of a weight dtype. Raises ``InvalidSetting``."""
    from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype

    return None if text is None else parse_dtype(text, knob="--dtype", allowed=WEIGHT_DTYPES)
