"""What each layer of a rank keeps of the past, as vLLM stores it: bytes of a token, or of a whole sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

from tonnage.costs.dtypes import FP8_DS_MLA, KV_DTYPES, STATE_DTYPES, parse_dtype
from tonnage.costs.entries import Dtypes, layer_entries
from tonnage.costs.layers import Attention, Latent, Layer, Mixer, Recurrent
from tonnage.costs.ranks import rank_shape
from tonnage.layout import KVGroupKind
from tonnage.peers.launch import Launch
from tonnage.peers.vllm.setup import Setup

#: Words of ``--kv-cache-dtype`` that mean the model's own.
AUTO_DTYPES = (None, "auto")
#: Recurrent matrices, where neither the flag nor config.json says.
DEFAULT_STATE_DTYPE = "float32"


class Keeps(StrEnum):
    ALL = "all"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Layers that keep the same. ``num_bytes`` of one layer: of a token, or of a sequence for a state."""

    keeps: Keeps
    num_bytes: int
    window: int | None
    num_layers: int


def kept_layers(setup: Setup) -> tuple[Kept, ...] | None:
    """By kind, in the order of the model; None for a cache that is compressed along the text, or an encoder's, whose
    pages are not known here."""
    launch = setup.launch
    dtypes = _dtypes(launch)
    shape = rank_shape(launch.config, launch.rank)
    layers = [launch.config.layers[number] for number in shape.layers]
    if shape.has_head and launch.draft is not None:
        layers += launch.draft.layers
    elif shape.has_head and setup.num_drafts:
        layers += launch.config.mtp_layers[:1]
    found: Counter[tuple[Keeps, int, int | None]] = Counter()
    for layer in layers:
        for entry in layer_entries(_stored(layer, setup), dtypes, launch.rank):
            if entry.tokens > 1 or entry.kind is KVGroupKind.CROSS:
                return None
            found[_keeps(entry.kind, launch), entry.num_bytes, entry.window] += 1
    return tuple(
        Kept(keeps=keeps, num_bytes=num_bytes, window=window, num_layers=num_layers)
        for (keeps, num_bytes, window), num_layers in found.items()
    )


def _keeps(kind: KVGroupKind, launch: Launch) -> Keeps:
    if kind is KVGroupKind.STATE:
        return Keeps.STATE
    if kind is KVGroupKind.WINDOW:
        return Keeps.CHUNK if launch.config.model_type.startswith("llama4") else Keeps.WINDOW
    return Keeps.ALL


def _dtypes(launch: Launch) -> Dtypes:
    own = launch.dtype or launch.config.dtype
    wanted = launch.kv_dtype if launch.kv_dtype not in AUTO_DTYPES else launch.get("kv_cache_dtype")
    asked = own if wanted in AUTO_DTYPES else str(wanted)
    kv = parse_dtype(asked, knob="kv_cache_dtype", allowed=(*KV_DTYPES, FP8_DS_MLA))
    if kv == "float8_e4m3fn" and any(isinstance(mixer, Latent) and mixer.index_head_dim for mixer in _mixers(launch)):
        kv = FP8_DS_MLA  # what the sparse kernels read
    state = launch.get("mamba_ssm_cache_dtype")
    known = state if state not in AUTO_DTYPES else launch.config.state_dtype or DEFAULT_STATE_DTYPE
    return Dtypes(
        kv=kv,
        conv=parse_dtype(own, knob="dtype"),
        state=parse_dtype(str(known), knob="mamba_ssm_cache_dtype", allowed=STATE_DTYPES),
    )


def _mixers(launch: Launch) -> list[Mixer]:
    return [mixer for layer in launch.config.layers for mixer in layer.mixers]


def _stored(layer: Layer, setup: Setup) -> Layer:
    """As this engine stores it: values apart from keys where both are one vector, and a convolution's inputs for the
    drafts too."""
    return replace(
        layer,
        mixer=layer.mixer and _as_stored(layer.mixer, setup),
        beside=layer.beside and _as_stored(layer.beside, setup),
    )


def _as_stored(mixer: Mixer, setup: Setup) -> Mixer:
    if isinstance(mixer, Attention) and not mixer.v_head_dim and not mixer.qk_rope_head_dim:
        return replace(mixer, v_head_dim=mixer.head_dim)
    if isinstance(mixer, Recurrent) and setup.num_drafts and mixer.conv_channels:
        return replace(mixer, conv_kernel=mixer.conv_kernel + setup.num_drafts)
    return mixer
