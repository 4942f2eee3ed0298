"""Bytes of a token, and of a state, on one rank: what SGLang divides its pool by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from tonnage.costs.dtypes import FP8_DS_MLA, KV_DTYPES, parse_dtype
from tonnage.costs.entries import Dtypes, Entry, layer_entries
from tonnage.costs.kv import DEFAULT_STATE_DTYPE
from tonnage.costs.layers import Attention, Latent, Layer, Recurrent
from tonnage.costs.ranks import rank_shape, stage_of
from tonnage.costs.states import state_shape
from tonnage.layout import DTYPE_BYTES, KVGroupKind
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.sglang import rules
from tonnage.peers.sglang.fraction import drafts, has_compressed
from tonnage.peers.start import Rule

#: Architectures whose windows have a pool of their own, by what their class is called.
HYBRID = ("Llama4", "GptOss", "MiMoV2", "Step3p5", "Gemma4", "DeepseekV4")
#: The same by model type, where config.json names no class.
HYBRID_TYPES = ("llama4", "gpt_oss", "mimo_v2", "step3p5", "gemma4", "deepseek_v4")
#: Tokens of the window pool for each token of the other, where a family has a share of its own.
RATIOS = {"gemma4": Fraction(15, 100), "deepseek_v4": Fraction(1, 10)}
USUAL_RATIO = Fraction(8, 10)
#: DeepSeek V4: a record of 448 + 128 + 8 bytes, an indexer's key of 128 + 4, float32 states of both.
_RECORD, _INDEX, _STATE4, _STATE128, _WINDOW = 584, 132, 4 * (4 * 512 + 4 * 128), 4 * 2 * 512, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """What one rank keeps.

    token      bytes of one token of the pool that ``max_total_num_tokens`` counts, draft and windows included
    state      bytes of one recurrent state over all layers; 0: there is none
    conv       of these, those of the convolutions' inputs, and conv_input those of one such input
    window     tokens of the window that has a pool of its own, None: none has
    ratio      its tokens for each of the others
    rule       which of the rules of a token it is
    """

    token: Fraction
    state: int
    window: int | None
    ratio: Fraction
    rule: Rule
    conv: int = 0
    conv_input: int = 0

    def verify_bytes(self, rows: int, num_drafts: int) -> int:
        """A matrix for each draft token, and the inputs of a convolution that slides over all of them."""
        if not rows or not num_drafts:
            return 0
        inputs = self.conv + (num_drafts - 1) * self.conv_input
        return rows * (num_drafts * (self.state - self.conv) + inputs)


def cells(launch: Launch, settings: Settings) -> Cells:
    """Raises ``InvalidSetting`` as the layout of a cache does."""
    if has_compressed(launch):
        return _compressed(launch, settings)
    settings.seen.add("mamba_ssm_dtype")
    entries = [entry for layer in _layers(launch) for entry in layer_entries(layer, _dtypes(launch), launch.rank)]
    full = _of(entries, KVGroupKind.FULL) + _of(entries, KVGroupKind.LATENT)
    near = _of(entries, KVGroupKind.WINDOW)
    window, ratio, rule = None, Fraction(1), rules.CELLS
    if near and full and is_hybrid(launch) and not settings.switch("disable_hybrid_swa_memory"):
        ratio = swa_ratio(launch, settings)
        window, rule = launch.config.sliding_window, rules.WINDOWS
    state = sum(entry.num_bytes for entry in entries if entry.kind is KVGroupKind.STATE)
    target = full if window is not None else full + near
    token = full + ratio * near + _draft(launch, settings, target)
    conv, one = _conv(launch)
    return Cells(token=token, state=state, conv=conv, conv_input=one, window=window, ratio=ratio, rule=rule)


def is_hybrid(launch: Launch) -> bool:
    names = launch.config.architectures
    return any(name.startswith(HYBRID) for name in names) or launch.config.model_type.startswith(HYBRID_TYPES)


def swa_ratio(launch: Launch, settings: Settings) -> Fraction:
    usual = next((r for name, r in RATIOS.items() if launch.config.model_type.startswith(name)), USUAL_RATIO)
    return settings.share("swa_full_tokens_ratio", usual, "the family's default")


def kv_dtype(launch: Launch) -> str:
    """The cache's dtype as SGLang lays it out: sparse latents in 8 bits become records with scales."""
    asked = parse_dtype(launch.kv_dtype or launch.dtype or launch.config.dtype, knob="kv_cache_dtype",
                        allowed=(*KV_DTYPES, FP8_DS_MLA))  # fmt: skip
    sparse = any(isinstance(m, Latent) and m.index_head_dim for layer in launch.config.layers for m in layer.mixers)
    return FP8_DS_MLA if sparse and asked == "float8_e4m3fn" else asked


def num_kept_layers(launch: Launch) -> int:
    """Layers of this rank that keep something of every token."""
    return sum(any(isinstance(m, Attention | Latent) for m in layer.mixers) for layer in _layers(launch))


def num_state_layers(launch: Launch) -> int:
    return sum(any(isinstance(m, Recurrent) for m in layer.mixers) for layer in _layers(launch))


def _conv(launch: Launch) -> tuple[int, int]:
    """Bytes of all inputs that the convolutions keep, and of one."""
    word = DTYPE_BYTES[_dtypes(launch).conv]
    mixers = [mixer for layer in _layers(launch) for mixer in layer.mixers if isinstance(mixer, Recurrent)]
    made = [state_shape(mixer, launch.rank).conv for mixer in mixers]
    return sum(kept * width for kept, width in made) * word, sum(width for _, width in made) * word


def _layers(launch: Launch) -> Iterator[Layer]:
    return (launch.config.layers[number] for number in rank_shape(launch.config, launch.rank).layers)


def _dtypes(launch: Launch) -> Dtypes:
    state = launch.get("mamba_ssm_dtype") or launch.config.state_dtype or DEFAULT_STATE_DTYPE
    return Dtypes(
        kv=kv_dtype(launch),
        conv=launch.dtype or launch.config.dtype,
        state=parse_dtype(str(state), knob="mamba_ssm_dtype"),
    )


def _of(entries: list[Entry], kind: KVGroupKind) -> Fraction:
    return sum((Fraction(entry.num_bytes, entry.tokens) for entry in entries if entry.kind is kind), Fraction(0))


def _draft(launch: Launch, settings: Settings, target: Fraction) -> Fraction:
    """Of a draft model its own cells; of layers for multi-token prediction as much as the target's layers have."""
    if launch.draft is None and not drafts(settings):
        return Fraction(0)
    if launch.draft is not None:
        layers = launch.draft.layers
        entries = [entry for layer in layers for entry in layer_entries(layer, _dtypes(launch), launch.rank)]
        return sum((Fraction(e.num_bytes, e.tokens) for e in entries if e.tokens), Fraction(0))
    count = len(launch.config.mtp_layers) or 1
    kept = num_kept_layers(launch)
    return target * Fraction(count, kept) if kept else Fraction(0)


def _compressed(launch: Launch, settings: Settings) -> Cells:
    """DeepSeek V4, whole on every rank."""
    ratio = swa_ratio(launch, settings)
    layers = list(_layers(launch))
    last = stage_of(launch.rank) == launch.rank.pp - 1
    count = len(layers) + (len(launch.config.mtp_layers) if last else 0)
    by4, by128 = (
        sum(any(getattr(m, "compress_ratio", 1) == each for m in layer.mixers) for layer in layers) for each in (4, 128)
    )
    ring = 16 if drafts(settings) else 8
    token = ratio * count * _RECORD + Fraction(by4 * (_RECORD + _INDEX), 4) + Fraction(by128 * _RECORD, 128)
    token += ratio * Fraction(ring, _WINDOW) * by4 * _STATE4
    if launch.version.is_surely(before=(0, 5, 20)):
        token += ratio * by128 * _STATE128
    if ring > 8:  # a draft's layer is charged as one of the target's
        token = token * (count + 1) / count
    return Cells(token=token, state=0, window=launch.config.sliding_window, ratio=ratio,
                 rule=rules.COMPRESSED)  # fmt: skip
