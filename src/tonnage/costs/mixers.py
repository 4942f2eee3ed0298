"""How each layer mixes tokens: attention, latent attention or a recurrent state, with its heads and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tonnage.costs.layers import Attention, Latent, Mixer, Recurrent
from tonnage.costs.patterns import Kind, window_tokens
from tonnage.costs.reading import Fields

Mixers = tuple[Mixer | None, Mixer | None]

#: Tokens that one entry stands for in the two kinds of compressed attention, as their only family has them.
_COMPRESS_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def layer_mixers(fields: Fields, kinds: tuple[Kind, ...]) -> list[Mixers]:
    """(mixer, second mixer) of every layer; what shares another layer's cache says whose."""
    reader = _Mixers(fields)
    made = [reader.of(kind, layer) for layer, kind in enumerate(kinds)]
    for layer, owner in _shared(fields, kinds).items():
        mixer = made[layer][0]
        if isinstance(mixer, Attention):
            made[layer] = (replace(mixer, kv_from=owner), made[layer][1])
    return made


def draft_mixers(fields: Fields, kinds: tuple[Kind, ...]) -> Mixers:
    """The mixers of a layer for multi-token prediction: full attention, or the window of a compressed model."""
    if Kind.COMPRESSED in kinds or Kind.HEAVY in kinds:
        return _Mixers(fields).of(Kind.WINDOW, 0)
    last_full = max((i for i, kind in enumerate(kinds) if kind is Kind.FULL), default=len(kinds) - 1)
    return _Mixers(fields).of(Kind.FULL, last_full)


class _Mixers:
    """Builds mixers, each distinct one once."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        # A null, or a flag of its own: models of a latent family that attend plainly.
        self.is_plain = fields.own.get("kv_lora_rank", 1) is None or not fields.flag("use_mla", default=True)
        self.has_latent = not self.is_plain and fields.value("kv_lora_rank") is not None
        self.is_compressed = fields.model_type == "deepseek_v4" or fields.sequence("compress_ratios") is not None
        self.has_encoder = fields.flag("is_encoder_decoder")
        self.by_layer = any(isinstance(fields.own.get(key), list | Mapping) for key in _PER_LAYER)
        self.known: dict[tuple[Kind, int], Mixers] = {}

    def of(self, kind: Kind, layer: int) -> Mixers:
        key = (kind, layer if self.by_layer else 0)
        if key not in self.known:
            self.known[key] = self._make(kind, layer)
        return self.known[key]

    def _make(self, kind: Kind, layer: int) -> Mixers:
        if kind in (Kind.DENSE, Kind.EXPERTS, Kind.NOTHING):
            return None, None
        if kind is Kind.STATE:
            return recurrent(self.fields), None
        if self.is_compressed:
            return self._compressed(kind)
        if self.has_latent:
            return self._latent(layer), None
        attention = self._attention(kind, layer)
        if attention is None:
            return None, None
        if kind is Kind.BOTH:
            return attention, recurrent(self.fields)
        return attention, self._to_encoder(attention) if self.has_encoder else None

    def _attention(self, kind: Kind, layer: int) -> Attention | None:
        fields = self.fields
        window = None
        if kind is Kind.CHUNK:
            # What a chunk has left behind is never read again: at most one chunk lives.
            window = fields.count("attention_chunk_size")
        elif kind is Kind.WINDOW:
            window = window_tokens(fields) if fields.value("sliding_window") != 0 else None
            if window is None and "sliding_window" not in fields.own:
                window = _class_window(fields)
            elif window is None and not fields.own["sliding_window"]:
                fields.note("layer_types names windows, and sliding_window is null: full attention")
        heads = self._heads(layer, is_window=window is not None)
        if heads == 0:
            return None
        kv_heads = self._kv_heads(layer, heads=heads, is_window=window is not None)
        head_dim = self._head_dim(layer, is_window=window is not None)
        values = fields.optional("swa_v_head_dim") if window is not None else 0
        if not values and not (self.is_plain and "v_head_dim" not in fields.own):
            values = fields.optional("v_head_dim")
        return Attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=values or head_dim,
            window=window,
            is_cross=kind is Kind.CROSS,
        )

    def _heads(self, layer: int, *, is_window: bool) -> int:
        block = self._block(layer)
        if block is not None and (block.get("no_op") or block.get("replace_with_linear")):
            return 0
        if is_window and self.fields.own.get("swa_num_attention_heads") is not None:
            return self.fields.count("swa_num_attention_heads")
        if self.fields.sequence("num_attention_heads") is None:
            return self.fields.count("num_attention_heads")
        return self.fields.at_layer("num_attention_heads", layer) or 0

    def _kv_heads(self, layer: int, *, heads: int, is_window: bool) -> int:
        fields = self.fields
        block = self._block(layer)
        in_group = block.get("n_heads_in_group") if block is not None else None
        if isinstance(in_group, int) and in_group > 0:
            return heads // in_group
        override = self._override("num_key_value_heads", layer)
        if override:
            return override
        if is_window and fields.own.get("swa_num_key_value_heads") is not None:
            return fields.count("swa_num_key_value_heads")
        kv_heads = shared_kv_heads(fields, layer, heads=heads)
        if is_window and fields.model_type in ("mimo_v2", "mimo_v2_flash"):
            return 2 * kv_heads  # a rule of the class, where the file does not give the number itself
        if not is_window and "num_global_key_value_heads" in fields.own and fields.flag("attention_k_eq_v"):
            return fields.optional("num_global_key_value_heads") or kv_heads
        return kv_heads

    def _head_dim(self, layer: int, *, is_window: bool) -> int:
        fields = self.fields
        override = self._override("head_dim", layer)
        if override:
            return override
        if is_window and fields.own.get("swa_head_dim") is not None:
            return fields.count("swa_head_dim")
        if not is_window and fields.model_type.startswith("gemma4"):
            if "global_head_dim" not in fields.own and "per_layer_config" not in fields.own:
                fields.note("global_head_dim is absent: 512, as the family's class has it")
            return fields.optional("global_head_dim", 0 if "per_layer_config" in fields.own else 512) or head_dim(
                fields
            )
        return head_dim(fields)

    def _override(self, key: str, layer: int) -> int | None:
        """From ``per_layer_config``, whose keys are layer numbers as text."""
        for text, part in self.fields.section("per_layer_config").items():
            if isinstance(part, Mapping) and str(text).isdigit() and int(text) == layer:
                value = part.get(key)
                return value if isinstance(value, int) else None
        return None

    def _block(self, layer: int) -> Mapping[str, object] | None:
        """The attention part of ``block_configs``, which name every layer of a searched architecture."""
        blocks = self.fields.sequence("block_configs")
        block = blocks[layer] if blocks is not None and layer < len(blocks) else None
        attention = block.get("attention") if isinstance(block, Mapping) else None
        return attention if isinstance(attention, Mapping) else None

    def _to_encoder(self, own: Attention) -> Attention:
        """Attention to the encoder: as wide as the encoder's heads where the file gives their number."""
        heads = self.fields.optional("encoder_attention_heads") or own.num_heads
        wide = heads * own.head_dim == own.num_heads * own.head_dim
        return replace(own, num_kv_heads=heads if wide else own.num_kv_heads, window=None, is_cross=True)

    def _latent(self, layer: int) -> Latent:
        fields = self.fields
        return Latent(
            num_heads=fields.count("num_attention_heads"),
            kv_lora_rank=fields.count("kv_lora_rank"),
            qk_rope_head_dim=fields.count("qk_rope_head_dim"),
            qk_nope_head_dim=fields.count("qk_nope_head_dim"),
            v_head_dim=self._latent_values(),
            q_lora_rank=self._query_rank(),
            index_head_dim=fields.optional("index_head_dim") if self._has_indexer(layer) else 0,
            num_index_heads=fields.optional("index_n_heads") if self._has_indexer(layer) else 0,
        )

    def _query_rank(self) -> int | None:
        """None where queries have no latent: published files say so with a null, which is no missing field."""
        given = self.fields.own
        if "q_lora_rank" in given and given["q_lora_rank"] is None:
            return None
        return self.fields.optional("q_lora_rank") or None

    def _latent_values(self) -> int:
        """Elements of a value head; one early family takes the width over the heads where the file is silent."""
        fields = self.fields
        if fields.model_type == "minicpm3" and fields.value("v_head_dim") is None:
            fields.note("v_head_dim is absent: hidden_size over heads, as the family's class has it")
            return fields.count("hidden_size") // fields.count("num_attention_heads")
        return fields.count("v_head_dim")

    def _has_indexer(self, layer: int) -> bool:
        """Layers marked "shared" use what the indexer of a layer before them chose."""
        types = self.fields.sequence("indexer_types")
        return types is None or layer >= len(types) or types[layer] != "shared"

    def _compressed(self, kind: Kind) -> Mixers:
        """A window of single vectors, key and value at once, and beside it the past in compressed entries."""
        fields = self.fields
        near = Attention(
            num_heads=fields.count("num_attention_heads"),
            num_kv_heads=fields.count("num_key_value_heads"),
            head_dim=fields.count("head_dim"),
            v_head_dim=0,
            window=fields.count("sliding_window"),
            qk_rope_head_dim=fields.optional("qk_rope_head_dim", 64),
        )
        if kind is Kind.WINDOW:
            return near, None
        if kind not in (Kind.COMPRESSED, Kind.HEAVY):
            raise fields.error("layer_types", f"with {kind.value!r} beside compressed attention is not known")
        word = "compressed_sparse_attention" if kind is Kind.COMPRESSED else "heavily_compressed_attention"
        ratio = fields.section("compress_rates").get(word, _COMPRESS_RATIOS[word])
        if not isinstance(ratio, int) or ratio < 2:
            raise fields.error("compress_rates", f"= {ratio!r} is not a whole number above 1")
        indexer = fields.optional("index_head_dim") if kind is Kind.COMPRESSED else 0
        return near, replace(near, window=None, compress_ratio=ratio, index_head_dim=indexer)


_PER_LAYER = (
    "num_attention_heads", "num_key_value_heads", "per_layer_config", "block_configs", "indexer_types",
)  # fmt: skip


def shared_kv_heads(fields: Fields, layer: int, *, heads: int) -> int:
    """Key-value heads of a layer. Families with a ``multi_query`` flag have one where it is set."""
    if fields.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        grouped = fields.flag("new_decoder_architecture")
        if not grouped:
            return 1 if fields.flag("multi_query", default=True) else heads
    elif fields.model_type == "gpt_bigcode" and fields.flag("multi_query", default=True):
        return 1
    kv_heads = fields.at_layer("num_key_value_heads", layer)
    if kv_heads is None:
        kv_heads = heads
        fields.note(f"num_key_value_heads is absent: {kv_heads}, as the family's class has it")
    if not kv_heads or heads % kv_heads:
        raise fields.error("num_key_value_heads", f"= {kv_heads} does not divide num_attention_heads = {heads}")
    return kv_heads


def head_dim(fields: Fields) -> int:
    """Elements of one head: as given, as the class has it, or the width over the heads."""
    if fields.value("head_dim") is not None:
        return fields.count("head_dim")
    heads, width = fields.at_layer("num_attention_heads", 0), fields.count("hidden_size")
    if fields.model_type in ("zamba", "zamba2"):
        width *= 2  # attention sees the hidden state beside the embeddings
    if not heads or width % heads:
        raise fields.error("head_dim", f"is missing and hidden_size {width} does not divide by {heads} heads")
    return width // heads


def recurrent(fields: Fields) -> Recurrent:
    """The state of one layer. Raises ``ModelConfigError`` where no known kind has all its fields."""
    if fields.value("linear_num_value_heads") is not None:
        return _gated_delta(fields)
    if fields.model_type == "kimi_linear" or fields.section("linear_attn_config"):
        return _kda(fields)
    if fields.value("conv_L_cache") is not None:
        width = fields.count("hidden_size")
        kernel = fields.count("conv_L_cache")
        return Recurrent(
            kind="short_conv", num_heads=0, head_dim=0, state_size=0, conv_channels=width, conv_kernel=kernel,
            num_groups=width,
        )  # fmt: skip
    if fields.model_type == "recurrent_gemma":
        width = fields.optional("lru_width") or fields.count("hidden_size")
        return Recurrent(
            kind="rg_lru", num_heads=width, head_dim=1, state_size=1, conv_channels=width,
            conv_kernel=fields.optional("mamba_d_conv", 4),
        )  # fmt: skip
    if fields.sequence("attn_type_list") is not None or fields.model_type == "minimax":
        heads, size = fields.count("num_attention_heads"), head_dim(fields)
        return Recurrent(kind="linear", num_heads=heads, head_dim=size, state_size=size, conv_channels=0, conv_kernel=1)
    if fields.value("mamba_d_state") is not None:
        return _mamba(fields)
    raise fields.error("layer_types", "names a recurrent layer, and no field says how large its state is")


def _gated_delta(fields: Fields) -> Recurrent:
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    return Recurrent(
        kind="gated_delta",
        num_heads=values,
        head_dim=value_dim,
        state_size=key_dim,
        conv_channels=2 * keys * key_dim + values * value_dim,
        conv_kernel=fields.count("linear_conv_kernel_dim"),
        num_groups=keys,
    )


def _kda(fields: Fields) -> Recurrent:
    """Queries, keys and values of the same heads, each with a convolution of its own."""
    part = fields.section("linear_attn_config")
    names = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    sizes = {}
    for short, name in names.items():
        value = part.get(short, fields.value(name))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise fields.error("linear_attn_config", f"has no usable {short}")
        sizes[short] = value
    heads, size = sizes["num_heads"], sizes["head_dim"]
    return Recurrent(
        kind="kda",
        num_heads=heads,
        head_dim=size,
        state_size=size,
        conv_channels=3 * heads * size,
        conv_kernel=sizes["short_conv_kernel_size"],
        num_groups=heads,
    )


def _mamba(fields: Fields) -> Recurrent:
    """The second kind has heads; the first has a state for each of its channels."""
    state, kernel = fields.count("mamba_d_state"), fields.count("mamba_d_conv")
    expanded = fields.optional("mamba_d_ssm") or fields.optional("mamba_expand", 2) * fields.count("hidden_size")
    heads = 0
    if fields.model_type not in ("zamba", "jamba", "mamba", "falcon_mamba"):
        heads = fields.optional("num_heads" if fields.model_type == "mamba2" else "mamba_n_heads")
    if not heads:
        return Recurrent(
            kind="mamba1", num_heads=expanded, head_dim=1, state_size=state, conv_channels=expanded, conv_kernel=kernel
        )
    given = fields.value("head_dim" if fields.model_type == "mamba2" else "mamba_d_head")
    size = given if isinstance(given, int) and not isinstance(given, bool) else expanded // heads
    groups = fields.optional("mamba_n_groups") or 1
    return Recurrent(
        kind="mamba2",
        num_heads=heads,
        head_dim=size,
        state_size=state,
        conv_channels=heads * size + 2 * groups * state,
        conv_kernel=kernel,
        num_groups=groups,
    )


def _class_window(fields: Fields) -> int | None:
    """For layers named as windows in a file that gives no window: the class's, or an error that names the field."""
    if not fields.flag("use_sliding_window", default=True):
        return None
    tokens = fields.count("sliding_window")
    return None if tokens >= (fields.optional("max_position_embeddings") or tokens + 1) else tokens


def _shared(fields: Fields, kinds: tuple[Kind, ...]) -> dict[int, int]:
    """{layer: the layer whose cache it reads}: the last layers of some models, or all but every nth."""
    shared = fields.optional("num_kv_shared_layers")
    first = len(kinds) - shared
    if shared and first > 0:
        last = {kind: max((i for i in range(first) if kinds[i] is kind), default=-1) for kind in set(kinds)}
        return {i: last[kinds[i]] for i in range(first, len(kinds)) if last[kinds[i]] >= 0}
    factor = fields.optional("cla_share_factor") if fields.flag("use_cla") else 0
    return {i: i - i % factor for i in range(len(kinds)) if i % factor} if factor > 1 else {}
