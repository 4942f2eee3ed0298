"""When vLLM changed its ways, as far as memory goes. Releases are (major, minor[, patch])."""

from __future__ import annotations

from tonnage.peers.version import Version

#: The second engine core is the default from here on, and the only one from ``ONLY_V1`` on.
V1_DEFAULT, ONLY_V1 = (0, 8), (0, 11)
#: The sampler's dry run became three times smaller.
LEAN_SAMPLER = (0, 17)
#: What is not torch's grew on one card.
MORE_NON_TORCH = (0, 18)
#: Graphs are deducted before the pool, and to make up for it the default share of the card went from 0.90 to 0.92.
GRAPHS_DEDUCTED, UTILISATION_092 = (0, 21), (0, 21)
#: The log's tokens are concurrency times length, no more blocks over groups.
TOKENS_BY_LENGTH = (0, 21)
#: Prefixes of hybrids are cached unless that is switched off.
HYBRID_PREFIXES = (0, 21)
#: Layers with windows are charged by their windows (before, by the whole length).
WINDOW_GROUPS = (0, 9, 2)
#: Groups of nearly as many layers are filled up to the larger one: up to a quarter more, later up to a half.
PADDED_GROUPS, MORE_PADDED_GROUPS = (0, 11), (0, 23)
#: Process groups are made before the first look at free memory (vllm#25359): most of them lies outside the budget.
COLLECTIVES_FIRST = (0, 11)
#: Scratch of the experts is kept, and so lies beside the sampler's dry run.
EXPERT_WORKSPACE = (0, 13)
#: The profile knew of memory that torch does not hand out, and the first context was no longer charged.
NON_TORCH_COUNTED = (0, 6, 4)
#: The block that is never handed out counts in the check of the longest request.
NULL_BLOCK_CHECKED = (0, 33)

#: Adapters, from here on: of every linear layer, the router too; of experts (before 0.21 not where they are spread over
#: ranks), both factors split where that is asked for from 0.12 on. They lost tokens of their own; Qwen3 and Qwen3.5
#: adapt their vocabularies.
ADAPTERS = (0, 3)
ALL_LINEAR_ADAPTED, EXPERTS_ADAPTED, EXPERTS_SHARDED, EXPERTS_ADAPTED_SPREAD = (0, 8), (0, 11, 1), (0, 12), (0, 21)
NO_EXTRA_TOKENS, QWEN3_VOCABULARY_ADAPTED, QWEN35_VOCABULARY_ADAPTED = (0, 12), (0, 16), (0, 29)
#: Graphs are captured with and without adapters.
GRAPHS_WITH_ADAPTERS = (0, 11, 1)
#: Ranks that hold the same tokens may divide them (vllm#23734): of latents, then of replicated heads (vllm#24864), then
#: beside states.
SHARED_TOKENS, SHARED_TOKENS_OF_HEADS, SHARED_TOKENS_BESIDE_STATES = (0, 10, 2), (0, 11, 1), (0, 26)
SHARED_TOKENS_IN_8_BITS = (0, 25)
#: A whole model as a draft was given up with the first core, and came back in the second (vllm#24322).
DRAFT_MODELS_GONE, DRAFT_MODELS_BACK = (0, 10), (0, 15)


def is_from(version: Version, since: tuple[int, ...]) -> bool:
    """Whether the newest release that can be meant is ``since`` or later; what is not known counts as the newest."""
    return version.may_be(since=since)


def is_split(version: Version, since: tuple[int, ...]) -> bool:
    """Whether the releases that can be meant lie on both sides of ``since``."""
    return version.may_be(since=since) and version.may_be(before=since)
