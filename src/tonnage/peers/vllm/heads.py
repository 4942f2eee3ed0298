"""Heads that draft (EAGLE): a layer or two that read the target's hidden states and share its tables.

``Launch.weights`` has a draft whole, with embeddings and a head of its own; here is by how much that is wrong. Read in
vllm/model_executor/models/llama_eagle.py and llama_eagle3.py and vllm/v1/spec_decode/eagle.py of 0.8.5 to 0.33.0.
"""

from __future__ import annotations

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention
from tonnage.costs.ranks import attention_ranks, rank_kv_heads, rank_shape
from tonnage.layout import DTYPE_BYTES
from tonnage.peers.launch import Launch
from tonnage.peers.vllm.drafting import HEADS_READ, head_of
from tonnage.peers.vllm.resident import is_logged
from tonnage.peers.vllm.setup import Setup
from tonnage.units import ceil_div


def correction(setup: Setup) -> tuple[int, int, int] | None:
    """(best, low, high) bytes that a rank's weights have more, or less, than with the draft whole; None where the draft
    is no head, or is not in the weights. The upper end has tables of its own where the target's fit."""
    launch, draft = setup.launch, setup.launch.draft
    method = head_of(launch)
    has_it = rank_shape(launch.config, launch.rank).has_head and not is_logged(launch.weights)
    if draft is None or not method or not has_it or not setup.is_v1:
        return None
    tp, target = launch.rank.tp, launch.config
    table = ceil_div(draft.vocab_size, tp) * draft.hidden_size
    is_shared = launch.rank.pp == 1 and (draft.vocab_size, draft.hidden_size) == (target.vocab_size, target.hidden_size)
    words = ceil_div(_words(draft), tp) * draft.hidden_size if method == "eagle3" else 0
    has_targets_head = (_words(draft), draft.hidden_size) == (target.vocab_size, target.hidden_size)
    shared = (table if is_shared else 0) + (words if has_targets_head else 0)
    own = table + words - shared + _wider(launch, draft, method)
    priced = table * (1 if draft.tie_word_embeddings else 2)
    best = (own - priced) * DTYPE_BYTES[draft.dtype]
    return best, best, best + shared * DTYPE_BYTES[draft.dtype]


def _words(draft: ModelConfig) -> int:
    """Words that it may draft: fewer than its target's where its file says so."""
    words = draft.raw.get("draft_vocab_size")
    return words if isinstance(words, int) and not isinstance(words, bool) and words > 0 else draft.vocab_size


def _wider(launch: Launch, draft: ModelConfig, method: str) -> int:
    """Elements of the projection from what it reads, whole on every rank, and of what its first layer reads more."""
    reads = launch.config.hidden_size if method == "eagle3" else draft.hidden_size
    found = HEADS_READ[method] * reads * draft.hidden_size
    if method == "eagle3":
        for mixer in draft.layers[0].mixers if draft.layers else ():
            if isinstance(mixer, Attention):
                heads = mixer.num_heads // attention_ranks(launch.rank)
                kv_heads = rank_kv_heads(mixer.num_kv_heads, launch.rank)
                found += (heads + 2 * kv_heads) * mixer.head_dim * draft.hidden_size
    return found
