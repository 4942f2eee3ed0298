"""TensorRT-LLM's start by the reference policy, fed as any plan is: what ``peers.predict`` dispatches to.

The derivation is in ``budget.reference``, its result as a start in ``peers.trtllm.from_plan``; what it needs beside
them (claims, predicted peaks, limits) is made in this room.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.config import Knobs
from tonnage.errors import DoesNotFit
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.outside import outside
from tonnage.peers.start import Start
from tonnage.peers.trtllm import engine_path, from_plan, rules
from tonnage.peers.trtllm.knobs import graphs_knob, limit_knobs, reference_knobs
from tonnage.planner.question import Question, answer


def predict(launch: Launch) -> Start:
    """The start of one rank. A release before 1.0 loads an engine; where it may be either, the newer way is told.

    Raises ``InvalidSetting`` for a setting that TensorRT-LLM, or its plan here, would not take.
    """
    if launch.version.is_surely(before=rules.PYTORCH):
        return engine_path.predict(launch)
    settings = Settings(launch)
    question = question_of(launch, settings)
    try:
        plan = answer(question)
    except DoesNotFit as error:
        return from_plan.refused(launch, error, settings, outside=outside(launch), remedy=_remedy(launch))
    return from_plan.start_of(launch, plan, settings)


#: Sequences and tokens of a step that are tried where the defaults, or what was asked, leave no pool.
_SMALLER = ((256, 8192), (64, 2048), (16, 512))


def _remedy(launch: Launch) -> str:
    """The largest step that was tried and leaves a pool; else that no step does."""
    for rows, tokens in _SMALLER:
        tried = replace(launch, settings={**launch.settings, "max_batch_size": rows, "max_num_tokens": tokens})
        try:
            answer(question_of(tried, Settings(tried)))
        except DoesNotFit:
            continue
        return f"--max_batch_size {rows} --max_num_tokens {tokens}"
    return "more tensor-parallel ranks, weights of fewer bits, or a larger card"


def question_of(launch: Launch, settings: Settings) -> Question:
    """The question that the launch asks of the reference policy."""
    reference = reference_knobs(launch, settings)
    limits = limit_knobs(launch, settings)
    graphs = graphs_knob(settings, max_batch_size=limits.max_batch_size.or_else(1))
    return Question(
        config=launch.config,
        card=launch.card,
        knobs=Knobs(graphs=graphs),
        limit_knobs=limits,
        rank=launch.rank,
        dtype=launch.dtype or launch.config.dtype,
        backend="trtllm",
        page_bytes=launch.card.page_bytes,
        weights=launch.weights,
        reference=reference,
        draft=launch.draft,
    )
