"""What the planner says of a card, checked on the card: its size, the first context, and a forward's peak."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tonnage.costs.activations import forward_peak
from tonnage.costs.config import ModelConfig
from tonnage.costs.context import context_bytes, library_bytes
from tonnage.errors import InvalidSetting
from tonnage.hardware import find_card

pytestmark = pytest.mark.gpu

LLAMA_8B = ModelConfig.read("examples/configs/llama-3.1-8b")


@pytest.fixture
def card():
    import torch

    try:
        return find_card(torch.cuda.get_device_name())
    except InvalidSetting as error:
        pytest.skip(f"this card is not in the catalogue: {error}")


def test_the_catalogue_knows_the_size_the_driver_reports(card):
    import torch

    total = torch.cuda.mem_get_info()[1]
    print(f"\n{card.name}: driver {total:,}, catalogue {card.total.low:,} to {card.total.high:,}")
    assert card.total.low <= total <= card.total.high


CONTEXT = """
import torch
from cuda.bindings import driver
driver.cuInit(0)
device = driver.cuDeviceGet(0)[1]
import pynvml
from tonnage.device.cuda_devices import cuda_devices
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(cuda_devices().devices[0].uuid)  # NVML counts the hidden ones too
used = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
before = used()
driver.cuDevicePrimaryCtxRetain(device)
after_context = used()
a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
(a @ a).sum().item()
print(after_context - before, used() - after_context)
"""


def test_context_and_first_matmul_lie_within_their_bars(card):
    """In a process of its own: a context is made once."""
    done = subprocess.run([sys.executable, "-c", CONTEXT], capture_output=True, text=True, check=True)
    context, libraries = map(int, done.stdout.split())
    planned = [context_bytes("cuda", known=card.context), library_bytes("cuda", known=card.libraries)]
    for name, seen, bar in zip(("context", "libraries"), (context, libraries), planned, strict=True):
        print(f"\n{name}: seen {seen:,}, planned {bar.bytes:,} ({bar.low:,} to {bar.high:,})")
        assert bar.low <= seen <= bar.high, name


@pytest.mark.parametrize("num_tokens", [2048, 8192])
def test_the_closed_form_of_a_forward_is_its_peak_on_the_card(num_tokens):
    """Four layers of the Llama-3.1-8B shape: the peak does not depend on the number of layers."""
    import torch
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    def stub(_module, query, *_, **__):
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("stub", stub)
    raw = {**LLAMA_8B.raw, "num_hidden_layers": 4}
    with torch.device("cuda"):
        config = LlamaConfig(**raw, attn_implementation="stub")
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="cuda")
    rows = torch.arange(256, device="cuda")
    arguments = {"position_ids": torch.arange(num_tokens, device="cuda")[None], "use_cache": False}
    with torch.inference_mode():
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(input_ids=ids, logits_to_keep=rows, **arguments)
    seen = torch.cuda.max_memory_allocated() - before
    planned = forward_peak(LLAMA_8B, num_tokens=num_tokens, logits_rows=256).bytes
    print(f"\n{num_tokens} tokens: seen {seen:,}, closed form {planned:,} ({seen / planned:.4f})")
    assert abs(seen - planned) <= 0.02 * planned
