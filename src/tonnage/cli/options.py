"""Options that several verbs share, declared once, and what becomes of their text: settings that know their flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import typer

from tonnage.config import Knobs, LimitKnobs, Setting, parse_admission
from tonnage.errors import InvalidSetting
from tonnage.units import parse_bytes, parse_count, parse_fraction

T = TypeVar("T")
Text: TypeAlias = str | None


def option(flag: str, metavar: str, told: str) -> typer.models.OptionInfo:
    """An option of text: one parser (tonnage.units, tonnage.sampling) tells every mistake in the same words."""
    return typer.Option(flag, metavar=metavar, help=told, show_default=False)


def argument(metavar: str) -> typer.models.ArgumentInfo:
    """A positional argument; the verb's docstring explains it (under click 8.5, typer's own row loses its help)."""
    return typer.Argument(metavar=metavar, hidden=True)


Model = Annotated[str, argument("MODEL")]
PlannedModel = Annotated[
    str, typer.Argument(metavar="MODEL", hidden=True, is_eager=True, callback=lambda asked: _list_shapes(asked))
]
Device = Annotated[
    Text,
    typer.Option(
        "--device",
        "--gpu",
        metavar="NAME",
        help="A card by name (H100; tonnage devices --catalogue lists them), or host with --memory.",
        show_default=False,
    ),
]
Memory = Annotated[Text, option("--memory", "SIZE", "Size of the device, such as 80GiB.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Write over files that exist.")]


def _list_shapes(model: str) -> str:
    """``help`` in place of MODEL prints every built-in shape and ends, unless a folder has that name."""
    if model.strip().lower() == "help" and not Path(model).exists():
        from tonnage.costs.shapes import help_text

        print(help_text(), end="")
        raise typer.Exit
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What decides how large the KV cache is: limits, caps and dtypes."""

    max_seq_len: Annotated[
        Text, option("--max-seq-len", "N", "Tokens of one sequence, prompt and output (default: the model's length).")
    ] = None
    max_batch_size: Annotated[
        Text, option("--max-batch-size", "N", "Sequences running at once (default 256; 32 on the host).")
    ] = None
    max_num_tokens: Annotated[
        Text, option("--max-num-tokens", "N", "Tokens computed in one step (default 8192; 512 on the host).")
    ] = None
    total_bytes: Annotated[Text, option("--total-bytes", "SIZE", "Cap on everything the engine takes.")] = None
    keep_free_bytes: Annotated[Text, option("--keep-free-bytes", "SIZE", "Memory to leave alone (default 256MiB).")] = (
        None
    )
    kv_fraction: Annotated[
        Text, option("--kv-fraction", "SHARE", "Share of what the fixed lines leave, for the KV cache (default 1).")
    ] = None
    kv_bytes: Annotated[Text, option("--kv-bytes", "SIZE", "Cap on the KV cache.")] = None
    kv_tokens: Annotated[Text, option("--kv-tokens", "N", "Cap on the KV cache, in tokens.")] = None
    kv_dtype: Annotated[Text, option("--kv-dtype", "NAME", "Dtype of the KV cache (default: that of the weights).")] = (
        None
    )
    block_tokens: Annotated[Text, option("--block-tokens", "N", "Tokens in one KV block (default 16).")] = None
    graphs: Annotated[
        Text,
        option(
            "--graphs",
            "SIZES",
            "Batch sizes with a CUDA graph: none, default, x2, +64, +8, 1,2,4,8, or a file of tonnage buckets.",
        ),
    ] = None
    host_kv_bytes: Annotated[
        Text, option("--host-kv-bytes", "SIZE", "Host memory for evicted blocks, beside the device (default none).")
    ] = None
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Use blocks again for texts that begin alike (default yes).",
            show_default=False,
        ),
    ] = None
    dtype: Annotated[Text, option("--dtype", "NAME", "Dtype of the weights (default: the model's own).")] = None

    def knobs(self, *, admission: Setting[str] = Setting()) -> Knobs:
        """Raises ``InvalidSetting`` for the first text that cannot be read. Only ``keep_free_bytes`` may be 0."""
        from tonnage.costs.dtypes import parse_dtype
        from tonnage.planner.graphs import read_graphs

        return Knobs(
            total_bytes=setting(self.total_bytes, "--total-bytes", parse_bytes),
            keep_free_bytes=setting(self.keep_free_bytes, "--keep-free-bytes", parse_bytes, allow_zero=True),
            kv_fraction=setting(self.kv_fraction, "--kv-fraction", parse_fraction),
            kv_bytes=setting(self.kv_bytes, "--kv-bytes", parse_bytes),
            kv_tokens=setting(self.kv_tokens, "--kv-tokens", parse_count),
            kv_dtype=setting(self.kv_dtype, "--kv-dtype", parse_dtype),
            block_tokens=setting(self.block_tokens, "--block-tokens", parse_count),
            graphs=setting(self.graphs, "--graphs", read_graphs),
            host_kv_bytes=setting(self.host_kv_bytes, "--host-kv-bytes", parse_bytes),
            admission=admission,
        )

    def limits(self) -> LimitKnobs:
        """Raises ``InvalidSetting`` for the first text that is not a whole number of at least 1."""
        return LimitKnobs(
            max_seq_len=setting(self.max_seq_len, "--max-seq-len", parse_count),
            max_batch_size=setting(self.max_batch_size, "--max-batch-size", parse_count),
            max_num_tokens=setting(self.max_num_tokens, "--max-num-tokens", parse_count),
            prefix_caching=self._prefix_caching(),
        )

    def _prefix_caching(self) -> Setting[bool]:
        if self.prefix_caching is None:
            return Setting()
        flag = "--prefix-caching" if self.prefix_caching else "--no-prefix-caching"
        return Setting.flag(self.prefix_caching, "yes" if self.prefix_caching else "no", flag)

    def weights_dtype(self) -> str | None:
        """The one name of a weight dtype. Raises ``InvalidSetting``."""
        from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype

        if self.dtype is None:
            return None
        try:
            return parse_dtype(self.dtype, knob="--dtype", allowed=WEIGHT_DTYPES)
        except InvalidSetting as fault:
            stored = f"{fault.remedy}; weights that are stored in fewer bits are planned from their own config.json"
            raise InvalidSetting("--dtype", self.dtype, "not a dtype of plain weights", remedy=stored) from None


def _list_peer_knobs(asked: list[str] | None) -> list[str] | None:
    """``--like help`` prints every knob that is understood and ends, whatever else was typed."""
    if asked and any(text.strip().lower() == "help" for text in asked):
        from tonnage.peers import help_text
        from tonnage.peers.own_settings import own_help

        print(help_text() + own_help(), end="")
        raise typer.Exit
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeOptions:
    """Knobs of other engines, in their own words."""

    like: Annotated[
        list[str] | None,
        typer.Option(
            "--like",
            metavar="ENGINE:KNOB=VALUE",
            help="A knob of vllm, sglang or trtllm; may be repeated, and --like help lists all.",
            show_default=False,
            is_eager=True,
            callback=_list_peer_knobs,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Where the engine runs, and how it schedules."""

    device: Annotated[Text, option("--device", "NAME", "cpu (default), cuda, or cuda:1.")] = None
    attention: Annotated[
        Text, option("--attention", "NAME", "auto (default), sdpa, triton, flashinfer, or paired (both).")
    ] = None
    admission: Annotated[
        Text,
        option("--admission", "POLICY", "optimistic (default): expected lengths, suspends; reserve_all: whole lives."),
    ] = None
    chunk_tokens: Annotated[
        Text,
        option("--chunk-tokens", "N", "Most prompt tokens in a step (default: few in one that also decodes), or none."),
    ] = None

    plan_file: Annotated[
        Text,
        option("--plan-file", "FILE", "Keep what the start measures; a later one that fits it runs no probes."),
    ] = None
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="Launch a step before the one before it has been looked at (default: on a card).",
            show_default=False,
        ),
    ] = None

    def admission_setting(self) -> Setting[str]:
        """Raises ``InvalidSetting`` for a policy that there is not."""
        return setting(self.admission, "--admission", parse_admission)

    def keywords(self) -> dict[str, Any]:
        """What ``EngineOptions`` is given beside its knobs. Raises ``InvalidSetting``."""
        named = {"device": self.device, "attention": self.attention}
        given: dict[str, Any] = {name: text.strip().lower() for name, text in named.items() if text is not None}
        if self.chunk_tokens is not None:
            uncut = self.chunk_tokens.strip().lower() == "none"
            given["chunk_tokens"] = "none" if uncut else parse_count(self.chunk_tokens, knob="--chunk-tokens")
        if self.plan_file is not None:
            given["plan_file"] = self.plan_file
        if self.overlap is not None:
            given["overlap"] = self.overlap
        return given


def engine_settings(model: str, memory: Text, pool: PoolOptions, serving: ServingOptions) -> dict[str, Any]:
    """The keywords of ``EngineOptions``. Raises ``InvalidSetting`` for the first text that cannot be read."""
    return {
        "model": model,
        "memory_bytes": read_bytes(memory, "--memory"),
        "knobs": pool.knobs(admission=serving.admission_setting()),
        "limit_knobs": pool.limits(),
        "dtype": pool.weights_dtype(),
        **serving.keywords(),
    }


def setting(text: Text, flag: str, parse: Callable[..., T], **how: object) -> Setting[T]:
    """The setting that ``flag`` gave; not set where it was absent. Raises ``InvalidSetting`` naming the flag."""
    return Setting() if text is None else Setting.flag(parse(text, knob=flag, **how), text, flag)


def read_bytes(text: Text, flag: str) -> int | None:
    """Bytes, or None where the flag was not given. Raises ``InvalidSetting``."""
    return None if text is None else parse_bytes(text, knob=flag)


def read_count(text: Text, flag: str, default: int, *, allow_zero: bool = False) -> int:
    """A whole number, ``default`` where the flag was not given. Raises ``InvalidSetting``."""
    return default if text is None else parse_count(text, knob=flag, allow_zero=allow_zero)
