"""Packed projections: where their weights lie, that their product is right, and that nothing of it is kept."""

from __future__ import annotations

import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import MODELS, library_model, save

from tonnage.costs.config import ModelConfig
from tonnage.costs.models import find_config
from tonnage.costs.weights import TensorSpec, WeightsLayout, weights_layout
from tonnage.engine.family import FAMILIES, Pack
from tonnage.engine.packing import Columns, Packed, packed_order
from tonnage.engine.weights import class_layout, load_shards, place_parameters
from tonnage.layout import DTYPE_BYTES
from tonnage.units import round_up

#: Packed modules of a layer: attention and feed-forward part; the shared expert is one too.
PACKED = {"llama": 2, "mixtral": 1, "qwen2_moe": 2, "qwen3_moe": 1, "phi": 1, "phi3": 0, "gemma3": 2}
QKV = Pack(modules=("attention",), parts=("q", "k", "v"))
IDS = torch.tensor([[5, 17, 200, 33, 8, 8, 91]])


def placed(model, model_type: str):
    """The model's parameters moved into an arena, in packed order, and packed; with the layout and the views."""
    family = FAMILIES[model_type]
    layout = packed_order(class_layout(model), family.packs)
    arena = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    views = place_parameters(model, layout, arena, family)
    for name, value in values.items():
        views[name].copy_(value)
    return layout, views


# -- where the weights lie ----------------------------------------------------------------------------------------


@st.composite
def layouts(draw):
    """Modules with q, k and v, weights and perhaps biases, of any sizes, between other tensors, in any order."""
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    columns = draw(st.integers(1, 40))
    named = [("embed.weight", (draw(st.integers(1, 50)), columns))]
    for i in range(draw(st.integers(1, 3))):
        rows = {part: draw(st.integers(1, 40)) for part in QKV.parts[: draw(st.sampled_from([2, 3, 3]))]}
        tensors = [(f"{i}.attention.{part}.weight", (size, columns)) for part, size in rows.items()]
        if draw(st.booleans()):
            tensors += [(f"{i}.attention.{part}.bias", (size,)) for part, size in rows.items()]
        tensors.append((f"{i}.norm.weight", (columns,)))
        named += draw(st.permutations(tensors))
    made, offset = [], 0
    for name, shape in named:
        tensor = TensorSpec(name=name, shape=shape, dtype=dtype, offset_bytes=offset)
        made.append(tensor)
        offset = round_up(offset + tensor.num_bytes, 64)
    return WeightsLayout(tensors=tuple(made), tied=(), total_bytes=offset, alignment_bytes=64)


@given(layouts())
def test_packs_have_no_gaps_and_everything_else_stays_aligned(layout):
    packed = packed_order(layout, [QKV])
    assert packed.total_bytes == layout.total_bytes
    assert packed_order(packed, [QKV]) == packed
    by_name = {tensor.name: tensor for tensor in packed.tensors}
    assert {(t.name, t.shape, t.dtype) for t in packed.tensors} == {(t.name, t.shape, t.dtype) for t in layout.tensors}
    for before, after in pairwise(packed.tensors):
        assert before.offset_bytes + before.num_bytes <= after.offset_bytes
    assert packed.tensors[-1].offset_bytes + packed.tensors[-1].num_bytes <= packed.total_bytes
    followers = set()
    for name, first in by_name.items():
        stem, _, kind = name.rpartition(".")
        run = [by_name.get(f"{stem[:-1]}{part}.{kind}") for part in QKV.parts] if stem.endswith(".q") else []
        if run and None not in run:
            assert all(a.offset_bytes + a.num_bytes == b.offset_bytes for a, b in pairwise(run))
            followers.update(tensor.name for tensor in run[1:])
        assert first.offset_bytes % DTYPE_BYTES[first.dtype] == 0
    assert all(t.offset_bytes % 64 == 0 for t in packed.tensors if t.name not in followers)


def test_the_planner_s_own_order_is_packed_already():
    layout = weights_layout(find_config("smollm2"))
    assert packed_order(layout, FAMILIES["llama"].packs) == layout


# -- what comes out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_computes_what_its_class_does(name):
    """Also says that nothing but the packed projections reads the input of a packed module of the class."""
    model = library_model(name)
    before = model(IDS, use_cache=False).logits
    count = sum(parameter.numel() for parameter in model.parameters())
    placed(model, MODELS[name][0])
    # As the executor asks for logits: a family whose class does more to them has that in its head from now on.
    after = model.get_output_embeddings()(model.base_model(IDS, use_cache=False).last_hidden_state)
    assert torch.allclose(after, before, atol=2e-4 * float(before.abs().max()))
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    modules = [module for module in model.modules() if isinstance(module, Packed)]
    if name in PACKED:
        assert len(modules) == PACKED[name] * model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama, biases", "qwen2_moe"])
def test_views_by_name_are_the_packed_matrix(name, tmp_path):
    """What loads, or restores after a sleep, writes the tensors of the files; the product sees it."""
    model = library_model(name)
    save(model, tmp_path)
    before = model(IDS, use_cache=False).logits
    _, views = placed(model, MODELS[name][0])
    for view in views.values():
        view.zero_()
    packs = [module for module in model.modules() if isinstance(module, Packed)]
    assert all(not module.weight.any() and (module.bias is None or not module.bias.any()) for module in packs)
    load_shards(tmp_path, views, experts=FAMILIES[MODELS[name][0]].experts)
    assert torch.allclose(model(IDS, use_cache=False).logits, before, atol=1e-3)


def test_nothing_of_a_product_is_kept():
    model = library_model("llama")
    placed(model, "llama")
    products = []
    for module in model.modules():
        if isinstance(module, Columns):
            module.register_forward_hook(lambda _, args, __: products.append(weakref.ref(args[0])))
    first = model(IDS, use_cache=False).logits
    assert len(products) == 5 * model.config.num_hidden_layers
    assert all(product() is None for product in products)
    model(IDS.flip(1), use_cache=False)
    assert torch.equal(model(IDS, use_cache=False).logits, first)


@pytest.mark.parametrize("may_generalise_integers", [False, True])
def test_compiled_layers_know_the_columns(may_generalise_integers):
    """Layers of one shape share their graphs, and no width in them is a symbol, whatever torch.compile does with
    integers that modules hold."""
    graphs = []

    def record(module, _inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    model = library_model("llama", num_hidden_layers=4)
    expected = {length: model(IDS[:, :length], use_cache=False).logits for length in (7, 5)}
    placed(model, "llama")
    for layer in model.model.layers:
        layer.mlp.compile(backend=record, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=may_generalise_integers):
        for length, logits in expected.items():
            assert torch.allclose(model(IDS[:, :length], use_cache=False).logits, logits, atol=1e-3)
    assert len(graphs) == 1
    (graph,) = graphs
    widths = [node.meta["example_value"].shape[-1] for node in graph.graph.nodes if node.op == "call_function"]
    assert widths
    assert all(type(width) is int for width in widths)


def test_a_config_read_by_the_planner_and_by_the_engine_lists_the_same_tensors():
    model = library_model("qwen2")
    config = ModelConfig.from_dict(model.config.to_dict())
    ours, theirs = (
        packed_order(layout, FAMILIES["qwen2"].packs)
        for layout in (weights_layout(config, dtype="float32"), class_layout(model))
    )
    assert {tensor.name: tensor.shape for tensor in ours.tensors} == {t.name: t.shape for t in theirs.tensors}
    assert ours.total_bytes == theirs.total_bytes
