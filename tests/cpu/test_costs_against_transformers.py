"""Tensor lists, family defaults and the closed form of activations against the library's own model classes."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tonnage.costs.activations import ERROR_FRACTION, forward_peak
from tonnage.costs.config import ModelConfig
from tonnage.costs.families import FAMILIES
from tonnage.costs.models import find_config
from tonnage.costs.weights import weights_layout

LLAMA_8B = Path(__file__).parents[2] / "examples/configs/llama-3.1-8b"
TINY = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1003,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
}


def library_config(model_type: str, **changes: object) -> transformers.PretrainedConfig:
    kept = {**TINY, **changes}
    if model_type == "llama":
        kept.pop("sliding_window")
    return transformers.AutoConfig.for_model(model_type, **kept)


def ours(library: transformers.PretrainedConfig) -> ModelConfig:
    return ModelConfig.from_dict(library.to_dict(), name="tiny")


def meta_model(library: transformers.PretrainedConfig, **kwargs: object) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(library, **kwargs)


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24}),
    ("mistral", {"head_dim": 16}),
    ("mistral", {"num_key_value_heads": 8}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("phi3", {}),
    ("phi3", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_every_tensor_of_the_class(model_type, changes):
    library = library_config(model_type, **changes)
    layout = weights_layout(ours(library))
    model = meta_model(library)
    assert {tensor.name: tensor.shape for tensor in layout.tensors} == shapes(model)
    assert layout.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "count"), [(ModelConfig.read(LLAMA_8B), 8_030_261_248), (find_config("smollm2"), 134_515_008)]
)
def test_real_shapes(config, count):
    library = transformers.AutoConfig.for_model(**dict(config.raw))
    model = meta_model(library)
    layout = weights_layout(config)
    assert {tensor.name: tensor.shape for tensor in layout.tensors} == shapes(model)
    assert layout.num_parameters == count


def test_names_come_in_the_order_of_the_class_where_there_are_no_biases():
    library = library_config("llama")
    assert [tensor.name for tensor in weights_layout(ours(library)).tensors] == list(shapes(meta_model(library)))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_what_a_class_assumes_where_config_json_is_silent(family):
    library = transformers.AutoConfig.for_model(family.model_type)
    assert type(meta_model(library_config(family.model_type, head_dim=16))).__name__ == family.class_name
    assert library.tie_word_embeddings == family.tie_word_embeddings
    heads = library.num_attention_heads
    assert library.num_key_value_heads == (family.num_kv_heads or heads)
    head_dim = getattr(library, "head_dim", None) or library.hidden_size // heads
    assert head_dim == (family.head_dim or library.hidden_size // heads)
    assert getattr(library, "sliding_window", None) == family.sliding_window
    assert library.dtype is None  # so an absent dtype means torch's default, float32


class Tracker(TorchDispatchMode):
    """Bytes of storages alive, each rounded up to 512 as the card's allocator does."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.seen:
            return
        size = -(-storage.nbytes() // 512) * 512
        self.seen.add(storage._cdata)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, storage._cdata, size)

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def copy_of_queries(module, query, key, value, attention_mask, **kwargs):
    """Attention left out: its output has the shape of the queries."""
    return query.transpose(1, 2).clone(), None


transformers.AttentionInterface.register("left_out", copy_of_queries)


def tracked_peak(library: transformers.PretrainedConfig, *, tokens: int, rows: int, dtype: torch.dtype) -> int:
    with FakeTensorMode():
        model = transformers.AutoModelForCausalLM.from_config(library, attn_implementation="left_out", dtype=dtype)
        ids, positions = (torch.zeros(1, tokens, dtype=torch.int64) for _ in range(2))
        keep = torch.zeros(rows, dtype=torch.int64)
        tracker = Tracker([*model.parameters(), *model.buffers(), ids, positions, keep])
        with torch.no_grad(), tracker:
            model.eval()(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep)
    return tracker.peak


WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 64, "vocab_size": 5000}
SHAPES = {
    "usual": {**WIDE, "num_key_value_heads": 4, "intermediate_size": 3584},
    "no groups, narrow mlp": {**WIDE, "num_key_value_heads": 16, "intermediate_size": 512},
    "one group, narrow mlp": {**WIDE, "num_key_value_heads": 1, "intermediate_size": 256},
    "narrow attention": {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 64},
}


NO_HEAD_DIM = ("qwen2", "phi3")  # their classes take hidden / heads
CASES = [
    (model_type, name)
    for model_type in FAMILIES
    for name, sizes in SHAPES.items()
    if model_type not in NO_HEAD_DIM or sizes["num_attention_heads"] * sizes["head_dim"] == sizes["hidden_size"]
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("model_type", "shape"), CASES)
def test_the_peak_of_a_forward(model_type, shape, dtype):
    """Within the formula's own bar, over phases: mlp, rotary, norm, head norm, and logits for many rows."""
    sizes = dict(SHAPES[shape])
    if model_type in NO_HEAD_DIM:
        del sizes["head_dim"]
    library = library_config(model_type, **sizes)
    for tokens, rows in ((1024, 64), (128, 128)):
        real = tracked_peak(library, tokens=tokens, rows=rows, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        told = forward_peak(ours(library), num_tokens=tokens, logits_rows=rows, dtype=name)
        assert abs(told.bytes - real) <= ERROR_FRACTION * real, (told, real)


@pytest.mark.parametrize(("tokens", "mib"), [(2048, 233.0), (8192, 932.0)])
def test_llama_8b(tokens, mib):
    library = transformers.AutoConfig.for_model(**dict(ModelConfig.read(LLAMA_8B).raw))
    assert tracked_peak(library, tokens=tokens, rows=256, dtype=torch.bfloat16) == int(mib * 2**20)
