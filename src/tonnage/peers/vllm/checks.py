"""vLLM's own checks at start-up, in its order: what each needs, what there is, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tonnage.costs.layers import Experts
from tonnage.peers.start import Check, Count, Rule
from tonnage.peers.version import Version
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.adapters import EXPERTS_SPREAD, slots_of
from tonnage.peers.vllm.budget import Budget
from tonnage.peers.vllm.drafting import head_of
from tonnage.peers.vllm.pages import Pages, longest, request_blocks
from tonnage.peers.vllm.setup import Setup
from tonnage.terms import Quantity
from tonnage.units import GiB

FREE = Rule(
    name="free memory", since=(0, 8), source="vLLM 0.33.0, the worker's first look",
    says="free memory before anything is loaded must reach ceil(total x gpu_memory_utilization)",
)  # fmt: skip
LOADS = Rule(
    name="load and dry run", records=("dsv3-205",),
    says="weights and one dry run must fit the card; nothing checks it, the driver refuses",
)  # fmt: skip
BLOCKS = Rule(
    name="cache blocks", records=("vllm-13882", "vllm-23278"),
    says="something must be left for the pool: \"No available memory for the cache blocks\"",
)  # fmt: skip
LENGTH = Rule(
    name="longest request",
    records=("vllm-10517-29k", "recipes-12-a", "recipes-12-b", "vllm-25350-b", "fs-51771234912", "vllm-19407"),
    says="the pool must hold one sequence of max_model_len tokens",
    source="vLLM 0.33.0, kv_cache_utils",
)  # fmt: skip
STATES = Rule(
    name="state blocks", since=(0, 21), source="recipes#831, modelship PR#195",
    says="max_num_seqs must not exceed the blocks of a hybrid, where graphs are captured",
)  # fmt: skip

DRAFT = Rule(
    name="draft model", since=eras.DRAFT_MODELS_GONE, before=eras.DRAFT_MODELS_BACK,
    says="a whole model cannot draft in these releases",
    source="vllm/config of 0.10.0 to 0.14.1, which refuse it, and of 0.16.0; vllm#24322",
)  # fmt: skip
VOCABULARY = Rule(
    name="vocabulary of the draft", since=eras.DRAFT_MODELS_BACK,
    says="a draft and its target must have vocabularies of one size", source="vllm/config/speculative.py of 0.16.0",
)  # fmt: skip


def checks_of(setup: Setup, budgets: Sequence[Budget], pages: Pages | None, blocks: Count | None) -> Iterator[Check]:
    """In the engine's order. One that fails for sure is the last: the engine goes no further.

    ``budgets``: of this rank, and of one rank of each other stage; the poorest decides."""
    for check in _checks(setup, budgets, pages, blocks):
        yield check
        if check.passes is False:
            return


def _checks(setup: Setup, budgets: Sequence[Budget], pages: Pages | None, blocks: Count | None) -> Iterator[Check]:
    yield from _refused(setup)
    if setup.is_v1 and setup.pool_bytes is None:
        yield _free(budgets[0])
    yield _loads(max(budgets, key=lambda budget: _needed(budget).bytes))
    if setup.pool_bytes is None and setup.num_blocks is None:
        yield _pool(min(budgets, key=lambda budget: budget.available.bytes))
    if pages is None or blocks is None:
        return
    yield _length(setup, pages, blocks)
    if pages.has_states and not setup.is_eager and setup.launch.version.may_be(since=STATES.since):
        yield _states(setup, blocks)


def _refused(setup: Setup) -> Iterator[Check]:
    """What the engine refuses before it looks at any memory: nothing where all is well."""
    launch = setup.launch
    draft = None if head_of(launch) else launch.draft
    spread = launch.rank.ep > 1 and any(isinstance(layer.feed_forward, Experts) for layer in launch.config.layers)
    if slots_of(setup) is not None and spread and _lies_in(launch.version, EXPERTS_SPREAD):
        yield _no(EXPERTS_SPREAD, need="0.21 or later", have=f"adapters, and experts over {launch.rank.ep} ranks")
    if draft is not None and _lies_in(launch.version, DRAFT):
        yield _no(DRAFT, need="a release before 0.10 or from 0.15 on", have=str(launch.version))
    is_same = draft is None or draft.vocab_size == launch.config.vocab_size
    if draft is not None and not is_same and eras.is_from(launch.version, eras.DRAFT_MODELS_BACK):
        yield _no(VOCABULARY, need=f"{launch.config.vocab_size:,} tokens", have=f"{draft.vocab_size:,} of {draft.name}")


def _lies_in(version: Version, rule: Rule) -> bool:
    """Whether every release that can be meant lies in the rule's range."""
    outside = version.may_be(before=rule.since) or (rule.before is not None and version.may_be(since=rule.before))
    return not outside


def _no(rule: Rule, *, need: str, have: str) -> Check:
    return Check(name=rule.name, passes=False, need=need, have=have, says=rule.says, rule=rule)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GiB:.2f} GiB"


def _verdict(need: Quantity, have: Quantity) -> bool | None:
    """Whether ``have`` reaches ``need``; None where it depends on where in their intervals both lie."""
    if have.low >= need.high:
        return True
    if have.high < need.low:
        return False
    # Near the edge the interval decides nothing; the best guess does not either.
    return None


def _outside(budget: Budget, name: str) -> Quantity:
    return next(term.bytes for term in budget.outside if term.name == name)


def _less(whole: Quantity, part: Quantity) -> Quantity:
    return Quantity(bytes=whole.bytes - part.bytes, low=whole.low - part.high, high=whole.high - part.low,
                    source=part.source, ref=whole.ref)  # fmt: skip


def _free(budget: Budget) -> Check:
    have = _less(budget.total, _outside(budget, "context"))
    return Check(
        name=FREE.name, passes=_verdict(budget.requested, have), rule=FREE,
        need=gib(budget.requested.bytes), have=gib(have.bytes),
        says=f"free memory ({gib(have.bytes)}) against the desired {gib(budget.requested.bytes)}",
    )  # fmt: skip


def _needed(budget: Budget) -> Quantity:
    terms = [term.bytes for term in budget.deducted if term.name != "graphs"]
    return Quantity(
        bytes=sum(each.bytes for each in terms), low=sum(each.low for each in terms),
        high=sum(each.high for each in terms), source=terms[0].source, ref="weights and a dry run",
    )  # fmt: skip


def _loads(budget: Budget) -> Check:
    need = _needed(budget)
    have = _less(budget.total, _outside(budget, "context"))
    return Check(
        name=LOADS.name, passes=_verdict(need, have), need=gib(need.bytes), have=gib(have.bytes), rule=LOADS,
        says=f"weights and one dry run take {gib(need.bytes)} of {gib(have.bytes)}",
    )  # fmt: skip


def _pool(budget: Budget) -> Check:
    have = budget.available
    passes = True if have.low > 0 else False if have.high <= 0 else None
    return Check(
        name=BLOCKS.name, passes=passes, need="above 0.00 GiB", have=gib(have.bytes), rule=BLOCKS,
        says=f"{gib(budget.requested.bytes)} less what is deducted leaves {gib(have.bytes)} for the pool",
    )  # fmt: skip


def _length(setup: Setup, pages: Pages, blocks: Count) -> Check:
    null = setup.is_v1 and eras.is_from(setup.launch.version, eras.NULL_BLOCK_CHECKED)
    wanted = 1 if setup.is_auto_length else setup.max_model_len
    need = request_blocks(pages, setup, wanted) + null
    passes = True if blocks.low >= need else False if blocks.high < need else None
    fits = longest(pages, setup, blocks.best - null)
    have_bytes, need_bytes = blocks.best * pages.block_bytes, need * pages.block_bytes
    return Check(
        name=LENGTH.name, passes=passes, need=gib(need_bytes), have=gib(have_bytes), rule=LENGTH,
        says=f"one request of {wanted:,} tokens needs {gib(need_bytes)} of {gib(have_bytes)}; "
        f"the longest that fits has {fits:,} tokens",
    )  # fmt: skip


def _states(setup: Setup, blocks: Count) -> Check:
    need = setup.max_num_seqs
    passes = True if blocks.low >= need else False if blocks.high < need else None
    return Check(
        name=STATES.name, passes=passes, need=f"{need:,} blocks", have=f"{blocks.best:,} blocks", rule=STATES,
        says=f"max_num_seqs {need:,} against {blocks.best:,} blocks that can each hold one state",
    )  # fmt: skip
