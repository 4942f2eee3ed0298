"""What a model's layers ask of attention arrives at the backend, run as they are and compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from small_models import library_model

from tonnage.engine.attend import ATTENTION_NAME, attending, register_attention
from tonnage.engine.compiled import compile_layers

register_attention()


class Recorder:
    """A backend that notes what it is asked for, and gives queries back."""

    def __init__(self):
        self.asked = []

    def forward(self, step, layer, query, key, value, **features):
        self.asked.append((layer, features.pop("scaling"), features))
        return query.transpose(1, 2).clone()


def run(model, num_tokens):
    recorder = Recorder()
    ids = torch.arange(num_tokens)[None]
    with torch.inference_mode(), attending(recorder, None):
        model.base_model(input_ids=ids, position_ids=ids, use_cache=False)
    assert [layer for layer, _, _ in recorder.asked] == list(range(model.config.num_hidden_layers))
    return [features for _, _, features in recorder.asked]


def model_of(name):
    model = library_model(name)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


PLAIN = {"window": None, "softcap": None, "sinks": None}
#: What each layer of these asks for.
ASKED = {
    "llama": [{}] * 2,
    "mistral, a window": [{"window": 20}] * 2,
    "qwen2, windows in its last layers": [{}, {}, {}, {"window": 18}],
    "gemma2": [{"window": 20, "softcap": 3.0}, {"softcap": 3.0}] * 2,
    "gemma3": [*[{"window": 20}] * 5, {}, {"window": 20}],
    "phi3, a window": [{"window": 20}] * 2,
}


@pytest.mark.parametrize("name", ASKED)
def test_each_layer_asks_for_what_it_needs(name):
    assert run(model_of(name), 5) == [PLAIN | asked for asked in ASKED[name]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_compiled_layers_ask_alike_and_there_is_a_code_for_each_kind_of_them(name):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = model_of(name)
    compile_layers(model, backend=counter)
    for num_tokens in (5, 9, 1, 7, 1, 64):
        assert run(model, num_tokens) == [PLAIN | asked for asked in ASKED[name]]
    # A code for each kind of layer, one for the norm behind them, and one for rotary embeddings of a fixed kind.
    num_codes = {"llama": 3, "gemma2": 4, "gemma3": 3}[name]
    assert counter.frame_count == 2 * num_codes, "any number of tokens, and one"
    torch._dynamo.reset()


def test_sinks_go_the_same_way():
    recorder, sinks = Recorder(), torch.randn(4)
    attention = torch.nn.Module()
    attention.layer_idx = 1
    from transformers import AttentionInterface

    function = AttentionInterface()[ATTENTION_NAME]
    heads = torch.randn(1, 4, 3, 8)
    for layer in (attention, SimpleNamespace(layer_idx=torch.tensor(1))):
        with attending(recorder, None):
            out, _ = function(layer, heads, heads, heads, None, scaling=0.5, s_aux=sinks, sliding_window=7, dropout=0.0)
        torch.testing.assert_close(out, heads.transpose(1, 2))
    for layer, scaling, features in recorder.asked:
        assert (layer, scaling, features["window"], features["softcap"]) == (1, 0.5, 7, None)
        assert features["sinks"] is sinks
