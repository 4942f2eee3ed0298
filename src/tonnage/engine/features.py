"""What a model asks beyond causal softmax over grouped heads that see the whole text, and who has it.

The attention function that the engine registers in transformers takes whatever a class passes to it; what neither
engine nor backend acts upon would be ignored without a word, and the text would be wrong. So every such thing is read
from the config, before a byte is loaded, and refused by name where it is not served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from tonnage.attention import BACKENDS
from tonnage.attention.base import FEATURES
from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Latent, Mixer, Recurrent
from tonnage.costs.traits import inner_raw, soft_cap, traits_of
from tonnage.errors import UnsupportedModel

#: In words, those of ``attention.base.FEATURES`` first: they are a backend's; the others are of no backend here.
WORDS: Mapping[str, str] = {
    "window": "sliding-window attention",
    "softcap": "a soft-cap on attention scores",
    "sinks": "attention sinks",
    "chunks": "attention inside chunks",
    "alibi": "position biases on attention scores (ALiBi)",
    "bidirectional": "attention to later tokens",
    "latent": "latent attention (MLA)",
    "sparse": "sparse attention by an indexer",
    "compressed": "attention over compressed entries",
    "cross": "attention to an encoder",
    "shared": "layers that read the cache of another layer",
    "state": "recurrent states",
    "values": "value heads of another size than key heads",
    "mixed": "layers whose heads differ",
    "encoder": "an encoder beside the text model",
    "packed weights": "weights in a packed format",
}

#: Of a backend's features, those that the engine passes on to it (``attend``).
PASSED_ON: Set[str] = frozenset(("window", "softcap", "sinks"))

_ENCODERS = ("vision_config", "audio_config", "speech_config")


def needed_features(config: ModelConfig) -> dict[str, str]:
    """Key of ``WORDS`` -> what config.json says of it, for everything that the model needs."""
    found = {**dict(_of_scores(config)), **dict(_of_parts(config))}
    for key, said in _of_layers(config):
        found.setdefault(key, said)
    return found


def backends_by_need(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Key of ``FEATURES`` that the model needs -> the backends that have it."""
    return {key: FEATURES[key] for key in needed_features(config) if key in FEATURES}


def refuse_missing(
    config: ModelConfig,
    *,
    attention: str,
    passed_on: Set[str] = PASSED_ON,
    table: Mapping[str, tuple[str, ...]] = FEATURES,
) -> None:
    """Raise ``UnsupportedModel`` for what the model needs and the backend ``attention``, or the engine, lacks.

    A feature that other backends of the engine have is refused with their names; one that would not reach them, or
    that none has, without.
    """
    for key, said in needed_features(config).items():
        backends = tuple(name for name in table.get(key, ()) if name in BACKENDS)
        if key in passed_on and attention in backends:
            continue
        name = f"{config.name}: " if config.name else ""
        if key in passed_on and backends:
            raise UnsupportedModel(
                f"{name}the attention backend {attention!r} has no {_bare(key)}, which this model needs",
                knob="attention",
                value=attention,
                need=f"a backend with it: {' or '.join(backends)}",
                have=said,
                remedy=f"run with attention {' or '.join(backends)}",
            )
        raise UnsupportedModel(
            f"{name}this model needs {WORDS[key]}, which the engine does not run yet",
            knob="MODEL",
            value=config.name,
            have=said,
            remedy="choose a model without it to run; `tonnage plan` prices this one too, with no engine",
        )


def _bare(key: str) -> str:
    return WORDS[key].removeprefix("a ")


def _of_scores(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """What is done to the scores of a layer, and to which tokens they go."""
    raw, traits = inner_raw(config), traits_of(config)[0]
    if (cap := soft_cap(config)) is not None:
        yield "softcap", f"attn_logit_softcapping = {cap}"
    if traits.sinks or traits.window_sinks:
        yield "sinks", f"one learned sink a head in the class of {config.model_type}"
    nested = raw.get("attn_config")
    biased = raw.get("alibi") or (isinstance(nested, Mapping) and nested.get("alibi"))
    if biased or config.model_type == "bloom" or raw.get("position_embedding_type") == "alibi":
        yield "alibi", f"position biases in {config.model_type}"
    for key, telling in (("use_bidirectional_attention", True), ("is_causal", False)):
        if raw.get(key) is telling or (telling and raw.get(key) == "all"):
            yield "bidirectional", f"{key} = {raw[key]}"


def _of_parts(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """What is beside the decoder, and how its weights are kept."""
    told = [key for key in _ENCODERS if config.raw.get(key)]
    if config.raw.get("is_encoder_decoder"):
        told.append("is_encoder_decoder")
    if told or config.towers:
        yield "encoder", f"{', '.join(told) or 'towers'} in config.json"
    if config.quantisation is not None:
        yield "packed weights", f"weights packed as {config.quantisation.format} ({config.quantisation.method})"


def _of_layers(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """What layers keep and read, each told with how many layers do."""
    chunk = inner_raw(config).get("attention_chunk_size")
    counts: dict[tuple[str, str], int] = {}
    for layer in config.layers:
        if not layer.mixers:
            counts["mixed", "no attention"] = counts.get(("mixed", "no attention"), 0) + 1
        for mixer in layer.mixers:
            for feature in _of_mixer(mixer, chunk=chunk):
                counts[feature] = counts.get(feature, 0) + 1
    for (key, said), count in counts.items():
        yield key, f"{said} in {count} of {config.num_layers} layers"
    kinds = {tuple(_without_window(mixer) for mixer in layer.mixers) for layer in config.layers}
    if len(kinds) > 1:
        yield "mixed", f"{len(kinds)} kinds of layers"


def _without_window(mixer: Mixer) -> Mixer:
    """Layers that differ in what they see alone have groups of their own; heads of all must be alike."""
    return replace(mixer, window=None) if isinstance(mixer, Attention) else mixer


def _of_mixer(mixer: Mixer, *, chunk: object) -> Iterator[tuple[str, str]]:
    if isinstance(mixer, Recurrent):
        yield "state", f"a {mixer.kind} state"
    elif isinstance(mixer, Latent):
        yield "latent", f"a latent of {mixer.kv_lora_rank} elements"
    elif isinstance(mixer, Attention):
        yield from _of_attention(mixer, chunk=chunk)


def _of_attention(mixer: Attention, *, chunk: object) -> Iterator[tuple[str, str]]:
    if mixer.window is not None and chunk == mixer.window:
        yield "chunks", f"attention_chunk_size = {chunk}"
    elif mixer.window is not None:
        yield "window", f"a window of {mixer.window} tokens"
    if mixer.is_cross:
        yield "cross", "cross attention"
    if mixer.kv_from is not None:
        yield "shared", f"the cache of layer {mixer.kv_from}"
    if mixer.index_head_dim:
        yield "sparse", f"an indexer of {mixer.index_head_dim} elements"
    if mixer.compress_ratio != 1:
        yield "compressed", f"one entry for {mixer.compress_ratio} tokens"
    if mixer.v_head_dim != mixer.head_dim:
        yield "values", f"keys of {mixer.head_dim} elements and values of {mixer.v_head_dim}"
