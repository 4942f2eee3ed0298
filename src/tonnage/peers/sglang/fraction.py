"""``mem_fraction_static``: as asked, or SGLang's own guess from the card, by release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from tonnage.costs.layers import Latent
from tonnage.errors import InvalidSetting
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.sglang import rules
from tonnage.peers.start import Rule
from tonnage.units import MiB

#: From the first to the last: several may hold for one release, where its first day is not known.
ERAS = (rules.BY_RANKS, rules.BY_CARD, rules.BY_CHUNK, rules.BY_GRAPHS)
#: MiB that a driver's tool shows beyond what an engine can have: 449 to 625 on five cards. SGLang reads the tool.
HIDDEN_MIB = 500
_GIB = 1024  # in MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """The fraction with its range over the releases that may be meant, the rule, and the shapes it was made from.

    chunk_tokens, graph_max_bs   tokens of a chunk of prompt; the largest decode batch with a graph
    """

    best: Fraction
    low: Fraction
    high: Fraction
    rule: Rule
    chunk_tokens: int
    graph_max_bs: int
    num_prefill_graphs: int
    is_asked: bool = False


def static_fraction(launch: Launch, settings: Settings) -> Static:
    """Raises ``InvalidSetting`` for a share outside 0 to 1."""
    eras = [era for era in ERAS if launch.version.may_be(since=era.since, before=era.before)]
    guesses = [_guess(launch, settings, era) for era in eras]
    best = guesses[-1]
    _note_shapes(settings, best)
    if settings.has("mem_fraction_static"):
        asked = settings.share("mem_fraction_static", Fraction(9, 10), "")
        if asked >= 1:
            raise InvalidSetting("mem_fraction_static", str(asked), "not below 1", remedy="write a share such as 0.9")
        return replace(best, best=asked, low=asked, high=asked, rule=rules.STATIC, is_asked=True)
    why = best.rule.says.removeprefix("Left out, mem_fraction_static ")
    settings.took("mem_fraction_static", None, f"{float(best.best):.3f}", why)
    shares = [guess.best for guess in guesses]
    return replace(best, low=min(shares), high=max(shares))


def card_mib(launch: Launch) -> int:
    """The card as the driver's tool shows it."""
    return launch.card.total_bytes // MiB + HIDDEN_MIB


def _guess(launch: Launch, settings: Settings, era: Rule) -> Static:
    total, tp = card_mib(launch), launch.rank.tp
    chunk, batch = _shapes(total, tp, era)
    chunk = settings.maybe("chunked_prefill_size", least=-1) or chunk
    chunk = chunk if chunk > 0 else settings.maybe("max_prefill_tokens") or 16384
    sizes = settings.sizes("cuda_graph_bs")
    batch = sizes[-1] if sizes else settings.maybe("cuda_graph_max_bs") or batch
    prefill = num_prefill_graphs(launch, settings, era, chunk)
    if era is rules.BY_RANKS:
        share = _by_ranks(launch.rank.tp)
    else:
        reserve = _by_card(launch, settings, total) if era is rules.BY_CARD else Fraction(0)
        if era in (rules.BY_CHUNK, rules.BY_GRAPHS):
            reserve = _by_chunk(launch, settings, total, chunk, batch, prefill, era)
        share = _encoder(launch, Fraction(round((total - reserve) / total * 1000), 1000))
    share = max(share, Fraction(1, 1000))
    return Static(
        best=share, low=share, high=share, rule=era, chunk_tokens=chunk, graph_max_bs=batch, num_prefill_graphs=prefill
    )


def _shapes(total: int, tp: int, era: Rule) -> tuple[int, int]:
    """(tokens of a chunk, largest graph), where they were left out."""
    many = tp >= 4
    if era in (rules.BY_RANKS, rules.BY_CARD):
        chunk = 2048 if total < 35 * _GIB else 8192 if total < 160 * _GIB else 16384
        batch = (80 if many else 8) if total < 35 * _GIB else 160 if total < 90 * _GIB else 256
        return chunk, batch
    if total < 20 * _GIB:
        return 2048, 8
    if total < 35 * _GIB:
        wide = era is rules.BY_GRAPHS
        return (4096, 160 if many else 48) if wide else (2048, 80 if many else 24)
    if total < 60 * _GIB:
        return 4096, 160 if many else 32
    if total < 160 * _GIB:
        return 8192, 512 if many else 256
    return 16384, 512


def _by_ranks(ranks: int) -> Fraction:
    steps = ((16, 79), (8, 81), (4, 85), (2, 87), (1, 88))
    return next(Fraction(percent, 100) for least, percent in steps if ranks >= least)


def _by_card(launch: Launch, settings: Settings, total: int) -> Fraction:
    ranks = launch.rank.tp * launch.rank.pp
    if total < 35 * _GIB:
        reserve = (Fraction(28, 10) + Fraction(ranks, 10)) * _GIB
    elif total < 90 * _GIB:
        reserve = (Fraction(95, 10) + Fraction(ranks, 2)) * _GIB
    elif total < 160 * _GIB:
        reserve = (12 + Fraction(ranks, 2)) * _GIB
    else:
        reserve = Fraction(32 * _GIB)
    return reserve + _drafting(settings) + (4 * _GIB if launch.rank.attention_dp else 0)


def _by_chunk(
    launch: Launch, settings: Settings, total: int, chunk: int, batch: int, prefill: int, era: Rule
) -> Fraction:
    rank = launch.rank
    reserve = 512 + Fraction(3, 2) * max(chunk, 2048) + Fraction(rank.tp * rank.pp * _GIB, 8)
    if era is rules.BY_CHUNK or not settings.switch("disable_cuda_graph"):
        reserve += 2 * batch
    if rank.attention_dp:
        reserve += batch * rank.tp * (3 + (Fraction(3, 2) if batch > 300 else 0))
    if prefill:
        reserve += 1536 if is_latent(launch) else 8 * prefill
    if total > 60 * _GIB:
        reserve = max(reserve, Fraction(10 * _GIB))
    if era is rules.BY_CHUNK:
        return reserve + _drafting(settings)
    return reserve + (2 * _GIB if settings.text("moe_a2a_backend", "") == "deepep" else 0)


def _drafting(settings: Settings) -> int:
    """MiB for a draft and its graphs, up to 0.5.22."""
    name = drafts(settings)
    return 0 if not name else 6 * _GIB if name == "STANDALONE" else 2 * _GIB


def drafts(settings: Settings) -> str:
    """The algorithm whose draft is a model; empty where there is none. Drafts of none that is named are EAGLE's."""
    name = settings.text("speculative_algorithm", "").upper()
    if not name and settings.maybe("speculative_num_draft_tokens", least=0):
        return "EAGLE"
    return "" if name in ("NONE", "NGRAM", "LOOKAHEAD") else name


def _encoder(launch: Launch, share: Fraction) -> Fraction:
    vision = launch.config.raw.get("vision_config")
    if not isinstance(vision, Mapping):
        return share
    layers, width = (vision.get(key) or usual for key, usual in (("num_hidden_layers", 24), ("hidden_size", 1024)))
    if not isinstance(layers, int) or not isinstance(width, int):
        return share * Fraction(95, 100)
    size = Fraction(layers * width**2, 24 * 1024**2)
    factor = min(max(1 - (size - 1) / 10, Fraction(8, 10)), Fraction(105, 100))
    return share * Fraction(95, 100) * factor


def is_latent(launch: Launch) -> bool:
    return any(isinstance(mixer, Latent) for layer in launch.config.layers for mixer in layer.mixers)


def is_multimodal(launch: Launch) -> bool:
    return bool(launch.config.towers) or isinstance(launch.config.raw.get("vision_config"), Mapping)


def num_prefill_graphs(launch: Launch, settings: Settings, era: Rule, chunk: int) -> int:
    """Sizes of graphs of prompts: none before they were the default, with stages, or for models that read pictures."""
    is_off = settings.switch("disable_cuda_graph") or settings.switch("disable_prefill_cuda_graph")
    is_out = launch.rank.pp > 1 or is_multimodal(launch) or has_compressed(launch)
    if era is not rules.BY_GRAPHS or is_off or is_out:
        return 0
    most = 2048 if is_latent(launch) else chunk
    if cap := settings.maybe("max_total_tokens"):
        most = min(most, cap)
    runs = (range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1280, 4097, 256))
    sizes = [size for run in runs for size in run] + list(range(4608, most + 1, 512))
    return sum(size <= most for size in sizes)


def has_compressed(launch: Launch) -> bool:
    """Whether this is DeepSeek V4, whose past is kept compressed."""
    return any(getattr(mixer, "compress_ratio", 1) > 1 for layer in launch.config.layers for mixer in layer.mixers)


def decode_graph_sizes(settings: Settings, largest: int) -> tuple[int, ...]:
    """Batch sizes with a graph: as asked, else the list that ends at the largest."""
    if settings.switch("disable_cuda_graph"):
        return ()
    if asked := settings.sizes("cuda_graph_bs"):
        return asked
    if settings.maybe("speculative_num_draft_tokens", least=0):
        runs = (range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8), range(272, largest + 1, 16))
    else:
        runs = ((1, 2, 4, 8, 12), range(16, 257, 8), range(272, 512, 16), range(512, largest + 1, 32))  # type: ignore[assignment]
    return tuple(size for run in runs for size in run if size <= largest)


def _note_shapes(settings: Settings, made: Static) -> None:
    if not settings.has("chunked_prefill_size"):
        settings.took("chunked_prefill_size", None, f"{made.chunk_tokens:,}", "by the size of the card")
    is_asked = settings.has("cuda_graph_bs") or settings.has("cuda_graph_max_bs")
    if not is_asked and not settings.switch("disable_cuda_graph"):
        settings.took("cuda_graph_max_bs", None, f"{made.graph_max_bs:,}", "by the size of the card and the ranks")
