"""A ``RunResult`` as canonical JSON, schema ``tonnage.run/1``, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.ledger import AuditRow
from tonnage.report import codec
from tonnage.report.checks import check_numbers, numbers_in
from tonnage.report.plan_json import plan_document, plan_from
from tonnage.report.run import RunResult, StageRecord, WatchRecord
from tonnage.terms import RUN_SCHEMA, MemoryPlan, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requests:
    finished: int
    failed: int
    cancelled: int = 0
    waited: int
    suspensions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    prompt: int
    cached: int = 0
    generated: int
    per_second: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostTier:
    """KV blocks that went to host memory, and that came back."""

    offloaded_blocks: int = 0
    loaded_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """The file's top level, without its plan (which has a reader of its own)."""

    schema: str = RUN_SCHEMA
    requests: _Requests
    tokens: _Tokens
    elapsed_ms: int
    ledger: Snapshot
    audit: tuple[AuditRow, ...] = ()
    stages: tuple[StageRecord, ...] = ()
    retried_steps: tuple[str, ...] = ()
    peak_own_bytes: int | None = None
    host_tier: _HostTier = field(default_factory=_HostTier)
    watch: WatchRecord | None = None
    plan_file: str = ""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run as it was read; ``extra`` holds, by path, the keys that this release does not know."""

    result: RunResult
    extra: Mapping[codec.Path, object] = field(default_factory=dict)

    def text(self) -> str:
        """The file again, unknown keys included."""
        return codec.dumps(codec.overlay(run_document(self.result), dict(self.extra)))


def run_text(result: RunResult) -> str:
    """Canonical JSON text of a run."""
    return codec.dumps(run_document(result))


def run_document(result: RunResult) -> dict[str, Any]:
    """The run as plain JSON values."""
    counts = _Requests(
        finished=result.finished,
        failed=result.failed,
        cancelled=result.cancelled,
        waited=result.waited,
        suspensions=result.suspensions,
    )
    tokens = _Tokens(
        prompt=result.prompt_tokens,
        cached=result.cached_prompt_tokens,
        generated=result.generated_tokens,
        per_second=result.tokens_per_second,
    )
    top = _Document(
        requests=counts,
        tokens=tokens,
        elapsed_ms=result.elapsed_ms,
        ledger=result.snapshot,
        audit=result.audit,
        stages=result.stages,
        retried_steps=result.retried_steps,
        peak_own_bytes=result.peak_own_bytes,
        host_tier=_HostTier(offloaded_blocks=result.offloaded_blocks, loaded_blocks=result.loaded_blocks),
        watch=result.watch,
        plan_file=result.plan_file,
    )
    return {**codec.to_json(top), "plan": plan_document(result.plan)}


def parse_run(text: str, *, file: str) -> RunFile:
    """Raises ``InputError`` for text that is not JSON, a schema this release does not read, or a wrong value."""
    return run_from(codec.loads(text, file=file), file=file)


def run_from(document: Mapping[str, Any], *, file: str) -> RunFile:
    """A run from JSON values. Raises ``InputError``."""
    codec.check_schema(document, expected=RUN_SCHEMA, file=file)
    reader = codec.Reader(file)
    top = reader.read(_Document, {key: value for key, value in document.items() if key != "plan"})
    check_numbers([(("elapsed_ms",), top.elapsed_ms)], reader, ())
    for name, counts in (("requests", top.requests), ("tokens", top.tokens), ("host_tier", top.host_tier)):
        check_numbers(numbers_in(counts, (name,)), reader, ())
    inner = document.get("plan")
    if not isinstance(inner, dict):
        reader.fail(("plan",), "is missing" if inner is None else "expected an object")
    plan_file = plan_from(inner, file=file, at=("plan",))
    unknown = reader.unknown | {("plan", *path): value for path, value in plan_file.extra.items()}
    return RunFile(_result(top, plan_file.plan), unknown)


def _result(top: _Document, plan: MemoryPlan) -> RunResult:
    return RunResult(
        finished=top.requests.finished,
        failed=top.requests.failed,
        cancelled=top.requests.cancelled,
        waited=top.requests.waited,
        suspensions=top.requests.suspensions,
        retried_steps=top.retried_steps,
        prompt_tokens=top.tokens.prompt,
        cached_prompt_tokens=top.tokens.cached,
        offloaded_blocks=top.host_tier.offloaded_blocks,
        loaded_blocks=top.host_tier.loaded_blocks,
        generated_tokens=top.tokens.generated,
        elapsed_ms=top.elapsed_ms,
        snapshot=top.ledger,
        plan=plan,
        stages=top.stages,
        peak_own_bytes=top.peak_own_bytes,
        audit=top.audit,
        watch=top.watch,
        plan_file=top.plan_file,
    )
