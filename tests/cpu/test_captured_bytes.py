"""What captures took: torch's pool is a part of what the process grew by, and counts once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tonnage.engine.cuda_site import CudaSite
from tonnage.units import MiB


@pytest.mark.parametrize(
    ("own", "grown"),
    [((500 * MiB, 600 * MiB), 100 * MiB), ((None, None), 70 * MiB), ((500 * MiB, 540 * MiB), 70 * MiB)],
)
def test_the_graph_pool_counts_once(monkeypatch, own, grown):
    reserved, owned = iter((10 * MiB, 80 * MiB)), iter(own)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: next(reserved))
    monkeypatch.setattr(CudaSite, "own_bytes", lambda _self: next(owned))
    site = object.__new__(CudaSite)
    site.driver = SimpleNamespace(device_sync=lambda: None)
    site.torch_device = None
    site._graph_driver_bytes = 0
    booked = []
    monkeypatch.setattr(CudaSite, "sampled", lambda *_: SimpleNamespace(sampled=booked.append))
    assert site.captured(lambda: None).bytes == grown
    assert booked == [grown]
