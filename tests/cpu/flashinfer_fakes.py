"""Stand-ins for FlashInfer's compiled modules on a CPU: they take the same arguments and attend densely in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from tonnage.attention import flashinfer
from tonnage.terms import Chip

H200 = Chip(name="H200", sm=90, num_sms=132, total_bytes=150 * 10**9)


class FakeModule:
    """``plan`` leaves what it was asked for where a real one leaves arrays, and ``paged_run`` reads it there, so that a
    plan which is not the step's own is noticed."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.planned: list[dict] = []
        self.masks: list[int] = []
        self.layout_shift = 0

    def plan(self, floats, ints, pinned, query_indptr, page_indptr, lengths, num_tokens, num_rows, *rest):
        num_heads, kv_heads, page, is_captured, dim, v_dim, causal, window_left, *others = rest
        assert len(others) == (3 if self.family == "fa2" else 0)
        assert {part.dtype for part in (floats, ints, pinned)} == {torch.uint8}
        assert pinned.numel() == ints.numel()
        assert {part.dtype for part in (query_indptr, page_indptr, lengths)} == {torch.int32}
        assert query_indptr.numel() == page_indptr.numel() == lengths.numel() + 1 == num_rows + 1
        assert dim == v_dim
        asked = {
            "page_indptr": page_indptr.tolist(), "num_tokens": num_tokens, "is_captured": is_captured,
            "causal": causal, "window_left": window_left, "heads": (num_heads, kv_heads, dim, page),
            "may_split": not others[1] if others else None,
        }  # fmt: skip
        self.planned.append(asked)
        stamp = page_indptr.numpy().view(np.uint8)[: pinned.numel()]
        pinned.numpy()[: stamp.size] = stamp
        ints.copy_(pinned)
        return [num_tokens, num_heads, int(is_captured), self.layout_shift]

    def paged_run(self, floats, ints, info, query, keys, values, *rest):
        query_indptr, page_indptr, pages, last_page_tokens, out, lse, mask, layout, window_left, _, *options = rest
        assert lse is None
        assert layout == 0
        assert out.is_contiguous()
        stamp = page_indptr.numpy().view(np.uint8)[: ints.numel()]
        assert (ints.numpy()[: stamp.size] == stamp).all(), "the plan is of another step"
        self.masks.append(mask)
        if self.family == "fa2":
            softcap, scaling = options[8:10]
            assert options[:8] == [None] * 8
        else:
            softcap, scaling, value_scale, _ = options[4:]
            assert options[:4] == [None] * 4
            assert value_scale == 1.0
        for row, last in enumerate(last_page_tokens.tolist()):
            here = slice(int(query_indptr[row]), int(query_indptr[row + 1]))
            used = pages[int(page_indptr[row]) : int(page_indptr[row + 1])].long()
            length = max(0, (used.numel() - 1) * keys.shape[1]) + (last if used.numel() else 0)
            if here.start == here.stop:
                continue
            k, v = (part[used].flatten(0, 1)[:length].double() for part in (keys, values))
            if window_left >= 0:  # a real one does not read what no query sees
                k, v = (part[max(0, length - (here.stop - here.start) - window_left) :] for part in (k, v))
            out[here] = attend(query[here].double(), k, v, mask, window_left, softcap, scaling).to(out.dtype)


def attend(query, keys, values, mask, window_left, softcap, scaling):
    """[T, Hq, D] queries that are the last ones of a row of ``keys`` [K, Hkv, D]."""
    repeat = query.shape[1] // keys.shape[1]
    scores = torch.einsum("thd,khd->htk", query, keys.repeat_interleave(repeat, 1)) * scaling
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    position = keys.shape[0] - query.shape[0] + torch.arange(query.shape[0])[:, None]
    at = torch.arange(keys.shape[0])[None]
    hidden = torch.zeros(position.shape[0], at.shape[1], dtype=torch.bool)
    if mask == 1:
        hidden |= at > position
    if window_left >= 0:
        hidden |= at < position - window_left
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("htk,khd->thd", scores.softmax(-1), values.repeat_interleave(repeat, 1))


def append(slots, pages, key, value):
    """What the Triton kernel does: ``slots`` count tokens from ``pages``, the first keys of a layer."""
    whole = pages.untyped_storage()
    flat = torch.empty(0, dtype=pages.dtype).set_(whole).view(-1, *pages.shape[1:])
    first = pages.storage_offset() // (pages.shape[1] * pages.shape[2])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            flat[first + slot] = key[0, :, token]
            flat[first + slot + pages.shape[0]] = value[0, :, token]


def install(monkeypatch, *, built=("fa2", "fa3"), chip=H200) -> dict[str, FakeModule]:
    """FlashInfer on the CPU, with the modules of ``built``. Returns them by the name of their files."""
    modules: dict[str, FakeModule] = {}

    def find(family, variant):
        return Path(variant.file_name(family)) if family in built else None

    def load(path):
        return modules.setdefault(path.name, FakeModule(path.name[:3]))

    monkeypatch.setattr(flashinfer, "_require_runnable", lambda pool, variant: chip)
    monkeypatch.setattr(flashinfer, "refuse_missing_modules", lambda variant: None)
    monkeypatch.setattr(flashinfer, "find_module", find)
    monkeypatch.setattr(flashinfer, "load_module", load)
    monkeypatch.setattr(flashinfer, "append", append)
    monkeypatch.setattr(flashinfer.FlashInferInputs, "compact", compact)
    return modules


def compact(inputs, num_rows):
    """What the Triton kernel does, in numpy, into the same memory."""
    static, lists = inputs.inputs, inputs._lists
    queries = pages = 0
    for row in range(num_rows):
        length = int(static.lengths[row])
        count = -(-length // inputs._block_tokens)
        for table, into in zip(static.tables, lists.pages, strict=True):
            into[pages : pages + count] = table[row, :count]
        queries, pages = queries + (length > 0), pages + count
        lists.query_indptr[row + 1], lists.page_indptr[row + 1] = queries, pages
        lists.last_page_tokens[row] = length - max(count - 1, 0) * inputs._block_tokens
    return flashinfer.DeviceLists(
        query_indptr=lists.query_indptr[: num_rows + 1],
        page_indptr=lists.page_indptr[: num_rows + 1],
        pages=lists.pages,
        last_page_tokens=lists.last_page_tokens[:num_rows],
    )
