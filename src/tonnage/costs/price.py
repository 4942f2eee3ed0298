"""What the weights of any model take on one rank, component by component, from config.json or from the files.

Preferred in this order: the headers of the files, which name every tensor; the total that their index states;
arithmetic on config.json. Where layers are equal they are priced once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from tonnage.costs.checkpoint import Checkpoint
from tonnage.costs.compressed import Compressed, hyper_head
from tonnage.costs.config import ModelConfig
from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype
from tonnage.costs.extras import expert_hidden, layer_extras, model_extras, settled
from tonnage.costs.layers import Attention, Layer
from tonnage.costs.parameters import Build, layer_tensors
from tonnage.costs.quantised import NOTHING, Packing, Span
from tonnage.costs.ranks import RankShape, rank_shape
from tonnage.costs.reading import is_known
from tonnage.costs.sharding import stored_spans
from tonnage.costs.tensors import Component, Cut, Tensor, vector
from tonnage.costs.towers import tower_tensors
from tonnage.costs.traits import Traits, inner_raw, traits_of
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Quantity, Rank, Source

#: An unknown family's small tensors (biases, norms, gates) are below this share of its matrices.
UNKNOWN_FRACTION = Fraction(2, 100)
#: Families whose layers share weights, or have parts that config.json does not tell, and how far that can be off.
ROUGH = (
    "biogpt", "jetmoe", "led", "longcat_flash", "phi4_multimodal", "qwen2_5_omni_text", "recurrent_gemma", "whisper",
    "zamba", "zamba2",
)  # fmt: skip
ROUGH_FRACTION = Fraction(50, 100)
#: A family never met, read as a Llama: two matrices where three are taken change a usual model by a quarter.
UNMET_FRACTION = Fraction(25, 100)
#: What a tower of an unknown class can be off by; and what encoders may add whose sizes are not read at all.
UNKNOWN_TOWER_FRACTION, UNREAD_TOWER_FRACTION = Fraction(25, 100), Fraction(15, 100)
ENCODERS = ("vision_config", "audio_config", "speech_config", "encoder_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPart:
    """One component on this rank. ``num_parameters`` counts elements, however they are packed."""

    component: Component
    num_parameters: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPrice:
    """The weights of one rank: ``parts`` sum to ``quantity.bytes``, whose bar is where a format leaves freedom."""

    parts: tuple[PricedPart, ...]
    num_parameters: int
    quantity: Quantity

    def bytes_of(self, component: Component) -> int:
        return sum(part.bytes for part in self.parts if part.component == component)


def weights_price(
    config: ModelConfig,
    *,
    dtype: str | None = None,
    rank: Rank | None = None,
    checkpoint: Checkpoint | None = None,
    with_mtp: bool = False,
) -> WeightsPrice:
    """Weights of one rank. ``dtype`` of what is not packed, by default the model's own.

    ``with_mtp`` loads the layers for multi-token prediction, which lie on the last pipeline stage; their embeddings
    and their vocabulary projection are the model's. Raises ``InvalidSetting`` for an unknown dtype or a split that
    does not divide.
    """
    element = parse_dtype(dtype or config.dtype, knob="dtype", allowed=WEIGHT_DTYPES)
    place, word = rank or Rank(), DTYPE_BYTES[element]
    found = _arithmetic(config, word, place, with_mtp=with_mtp)
    if checkpoint is None:
        return found
    if checkpoint.tensors:
        spans = stored_spans(checkpoint.tensors, config, word=word, rank=place, with_mtp=with_mtp)
        return _counted(found, spans, checkpoint, is_split=place.tp * place.pp * place.ep > 1)
    whole = _arithmetic(config, word, Rank(), with_mtp=True)
    factor = Fraction(checkpoint.total_bytes, whole.quantity.bytes)
    is_whole = found.num_parameters == whole.num_parameters
    return _scaled(found, factor, checkpoint.ref, is_whole=is_whole)


def _arithmetic(config: ModelConfig, word: int, rank: Rank, *, with_mtp: bool) -> WeightsPrice:
    packing = Packing.of(config)
    spans: dict[Component, Span] = {}
    counts: Counter[Component] = Counter()
    for tensor, count, prefix in _tensors(config, rank, with_mtp=with_mtp, packing=packing):
        span = _span(tensor, packing, prefix, word).times(count)
        spans[tensor.component] = spans.get(tensor.component, NOTHING) + span
        counts[tensor.component] += tensor.num_elements * count if tensor.counts else 0
    total = sum(spans.values(), NOTHING)
    known = traits_of(config)[1] and tower_tensors(config)[1] and not _unread_towers(config)
    low, high = _bar(config, total, spans.get(Component.TOWERS, NOTHING), rank)
    quantity = Quantity(
        bytes=total.bytes,
        low=low,
        high=high,
        source=Source.DERIVED if known else Source.PREDICTED,
        ref=f"costs.price: {'every tensor' if known else 'matrices, of a class not known in detail'}, from config.json"
        + (f", packed as {config.quantisation.format}" if config.quantisation else ""),
    )
    return _price({part: span.bytes for part, span in spans.items()}, counts, quantity)


def _bar(config: ModelConfig, total: Span, towers: Span, rank: Rank) -> tuple[int, int]:
    """The least and the most: what the format leaves open, and what is not known of the class or of its towers."""
    low, high = Fraction(total.low), Fraction(total.high)
    if not traits_of(config)[1]:
        share = _unknown_share(config.model_type)
        low, high = low - total.low * share, high + total.high * share
    if not tower_tensors(config)[1]:
        low, high = low - towers.low * UNKNOWN_TOWER_FRACTION, high + towers.high * UNKNOWN_TOWER_FRACTION
    high += total.high * _unread_towers(config)
    if config.towers and rank.tp > 1:  # some engines cut towers too
        low -= towers.low - towers.low // rank.tp
    return int(low), int(high)


def _unknown_share(model_type: str) -> Fraction:
    """How far the arithmetic can be off for a family without a row of traits."""
    if model_type in ROUGH:
        return ROUGH_FRACTION
    return UNKNOWN_FRACTION if is_known(model_type) else UNMET_FRACTION


def _unread_towers(config: ModelConfig) -> Fraction:
    """The share of the weights that encoders may add which config.json names but whose sizes are not read."""
    named = sum(isinstance(config.raw.get(key), Mapping) for key in ENCODERS)
    return UNREAD_TOWER_FRACTION if named > len(config.towers) else Fraction(0)


def _price(sizes: Mapping[Component, int], counts: Mapping[Component, int], quantity: Quantity) -> WeightsPrice:
    parts = tuple(
        PricedPart(component=part, num_parameters=counts.get(part, 0), bytes=sizes.get(part, 0))
        for part in Component
        if sizes.get(part) or counts.get(part)
    )
    return WeightsPrice(parts=parts, num_parameters=sum(counts.values()), quantity=quantity)


def _span(tensor: Tensor, packing: Packing | None, prefix: str, word: int) -> Span:
    """Bytes of all ``tensor.count`` of them: packed where the checkpoint packs, else wide."""
    is_table = tensor.component is Component.EMBEDDINGS
    can_pack = tensor.can_pack or (packing is not None and packing.packs_embeddings and is_table)
    if packing is not None and can_pack and _is_packed(tensor, packing, prefix):
        return packing.of_part(tensor.component).span(tensor.rows, tensor.columns).times(tensor.count)
    wide = tensor.num_elements * (DTYPE_BYTES["float32"] if tensor.is_buffer else word)
    if tensor.component is Component.TOWERS and packing is not None and tensor.can_pack:
        return Span(bytes=wide, low=packing.span(tensor.rows, tensor.columns).low, high=wide)
    return Span.exact(wide)


def _is_packed(tensor: Tensor, packing: Packing, prefix: str) -> bool:
    if tensor.component is Component.TOWERS:
        return packing.packs_towers and not packing.keeps(tensor.module)
    if tensor.component is Component.HEAD and not packing.packs_head:
        return False
    if packing.packs_experts_only and tensor.component is not Component.EXPERTS:
        return False
    return not packing.keeps(prefix + tensor.module)


def _tensors(
    config: ModelConfig, rank: Rank, *, with_mtp: bool, packing: Packing | None
) -> Iterator[tuple[Tensor, int, str]]:
    """(tensor, how often, the name its module starts with) of everything on one rank."""
    shape, cut = rank_shape(config, rank), Cut.of(rank)
    traits, _known = traits_of(config)
    compressed = Compressed.of(config)
    build = Build(
        hidden=config.hidden_size, traits=traits, cut=cut, expert_hidden=expert_hidden(config), compressed=compressed
    )
    for tensor in _ends(config, shape, cut, traits):
        yield tensor, 1, "model."
    for layer, numbers in _layers(config, shape, packing):
        for tensor in (*layer_tensors(layer, build), *layer_extras(config, layer)):
            yield tensor, len(numbers), f"model.layers.{numbers[0]}."
    if compressed is not None and shape.has_head:
        yield hyper_head(compressed), 1, "model."
    if shape.has_embeddings:
        for tensor in tower_tensors(config)[0]:
            yield tensor, 1, ""
    if with_mtp and shape.has_head:
        for number, layer in enumerate(config.mtp_layers, config.num_layers):
            for tensor in _mtp(layer, build):
                yield replace(tensor, component=Component.MTP), 1, f"model.layers.{number}."


def _layers(config: ModelConfig, shape: RankShape, packing: Packing | None) -> Iterator[tuple[Layer, list[int]]]:
    """Layers of this stage with their numbers: equal ones together, where the same of their modules stay wide."""
    named = packing.named() if packing is not None else {}
    apart = packing is not None and packing.tells_layers_apart
    same: dict[tuple[Layer, frozenset[str] | int | None], list[int]] = {}
    for number in shape.layers:
        key = number if apart else named.get(number)
        same.setdefault((_without_source(config.layers[number]), key), []).append(number)
    yield from ((settled(config, layer), numbers) for (layer, _key), numbers in same.items())


def _without_source(layer: Layer) -> Layer:
    """Which layer's cache is read makes no difference to the weights, only whether one is."""
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or mixer.kv_from is None:
        return layer
    return replace(layer, mixer=replace(mixer, kv_from=0))


def _ends(config: ModelConfig, shape: RankShape, cut: Cut, traits: Traits) -> Iterator[Tensor]:
    """Embeddings on the first stage, final norm and vocabulary projection on the last; tied ones count once a rank."""
    hidden, rows = config.hidden_size, shape.vocab_size
    if shape.has_embeddings:
        yield vector(Component.EMBEDDINGS, "embed_tokens", rows + traits.vocabulary_extra, count=hidden)
        if traits.num_positions:
            key, extra = traits.num_positions
            found = inner_raw(config).get(key)
            positions = found if isinstance(found, int) else config.max_position_embeddings
            yield vector(Component.EMBEDDINGS, "embed_positions", positions + extra, count=hidden)
        if traits.embedding_norm:
            yield vector(Component.NORMS, "embed_norm", hidden * 2)
        yield from model_extras(config, cut)
    if shape.has_head:
        if traits.final_norm:
            yield vector(Component.NORMS, "norm", hidden * (2 if traits.norm_bias else 1))
        if not (config.tie_word_embeddings and shape.has_embeddings):
            yield Tensor(component=Component.HEAD, module="lm_head", rows=rows, columns=hidden, can_pack=True)
        if traits.head_bias:
            yield vector(Component.HEAD, "lm_head", rows)


def _mtp(layer: Layer, build: Build) -> Iterator[Tensor]:
    """One layer for multi-token prediction: it reads the hidden vector and the next token's embedding, both normed,
    through one projection that no checkpoint packs, and ends with a norm of its own."""
    hidden = build.hidden
    yield vector(Component.MTP, "eh_proj", hidden, count=2 * hidden)
    yield vector(Component.MTP, "norms", 3 * hidden)
    yield from layer_tensors(layer, build)


def _counted(
    found: WeightsPrice, spans: Mapping[Component, Span], checkpoint: Checkpoint, *, is_split: bool
) -> WeightsPrice:
    total = sum(spans.values(), NOTHING)
    quantity = Quantity(
        bytes=total.bytes,
        low=total.low,
        high=total.high,
        source=Source.DERIVED if is_split else Source.COUNTED,
        ref=f"costs.price: {checkpoint.ref}" + (", split by the name of each tensor" if is_split else ""),
    )
    counts = {part.component: part.num_parameters for part in found.parts}
    return _price({part: span.bytes for part, span in spans.items()}, counts, quantity)


def _scaled(found: WeightsPrice, factor: Fraction, ref: str, *, is_whole: bool) -> WeightsPrice:
    """The arithmetic, scaled so that the whole model comes to what the index states."""
    sizes = {part.component: part.bytes * factor // 1 for part in found.parts}
    total = found.quantity.bytes * factor // 1
    largest = max(sizes, key=lambda part: sizes[part])
    sizes[largest] += total - sum(sizes.values())
    quantity = Quantity(
        bytes=total,
        low=min(total, found.quantity.low),
        high=max(total, found.quantity.high),
        source=Source.COUNTED if is_whole else Source.DERIVED,
        ref=f"costs.price: {ref}, divided as config.json says",
    )
    return _price(sizes, {part.component: part.num_parameters for part in found.parts}, quantity)
