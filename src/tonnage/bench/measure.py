"""Runs a workload on an engine and notes when each token came. All times in microseconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tonnage.bench.workloads import QUIET_STEPS, Job, Workload
from tonnage.caching import CacheParams
from tonnage.errors import InputError, RequestRefused
from tonnage.sampling import SamplingParams

if TYPE_CHECKING:
    from tonnage.engine import Completion, Engine, Request

GREEDY = SamplingParams(ignore_eos=True)


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request as it was served; times from the start of the run.

    gaps_us           times between its tokens; those during which another prompt was computed for an interrupting
                      request are in ``interrupted_gaps_us`` instead
    is_interrupting   one of the prompts that come between, not of the workload's own requests
    """

    id: str
    num_input_tokens: int
    num_output_tokens: int
    arrival_us: int
    is_interrupting: bool = False
    first_token_us: int | None = None
    last_token_us: int = 0
    gaps_us: list[int] = field(default_factory=list)
    interrupted_gaps_us: list[int] = field(default_factory=list)
    end_us: int = 0
    num_suspended: int = 0
    waited: bool = False
    finish: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a run gave, raw: ``samples`` in order of arrival. ``elapsed_us`` ends with the last of its requests."""

    workload: Workload
    samples: tuple[Sample, ...]
    elapsed_us: int
    num_suspensions: int

    @property
    def requests(self) -> list[Sample]:
        """The workload's own, without the prompts that came between."""
        return [sample for sample in self.samples if not sample.is_interrupting]

    @property
    def num_failed(self) -> int:
        return sum(sample.error is not None for sample in self.samples)


def measure(
    engine: Engine,
    workload: Workload,
    *,
    params: SamplingParams = GREEDY,
    num_warmup: int = 0,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], None] = time.sleep,
    on_step: Callable[[int], None] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Measurement:
    """Serve ``workload`` and time it; ``params`` but for max_tokens and seed are every request's.

    The first ``num_warmup`` jobs are served once before, untimed. ``on_step`` hears how many requests have ended.
    Once ``is_stopped``, what is left is cancelled, and the measurement holds what there is.
    Raises ``InputError``, before anything runs, where the engine can never serve one of the jobs.
    """
    run = _Run(engine, workload, params, clock_ns, sleep, on_step, is_stopped)
    run.warm_up(num_warmup)
    return run.measured()


@dataclass(slots=True, eq=False)
class _Live:
    """A request on its way: its tokens, known ones and new ones, are counted after every step, so that nothing calls
    back from inside one."""

    tokens: list[int]
    sample: Sample
    num_seen: int


class _Run:
    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        params: SamplingParams,
        clock_ns: Callable[[], int],
        sleep: Callable[[float], None],
        on_step: Callable[[int], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._engine, self._workload, self._params = engine, workload, params
        self._clock_ns, self._sleep, self._on_step, self._is_stopped = clock_ns, sleep, on_step, is_stopped
        self._live: dict[str, _Live] = {}
        self._samples: list[Sample] = []
        self._num_own_left = len(workload.jobs)
        self._interruptions = enumerate(workload.interruptions(engine.vocab_size))
        self._quiet_steps = 0
        # Made before the clock starts: drawing and checking prompts is not serving them.
        self._requests = [self._request(number) for number in range(len(workload.jobs))]
        self._began_ns = 0

    def warm_up(self, num_jobs: int) -> None:
        for number in range(min(num_jobs, len(self._workload.jobs))):
            request = self._request(number, name="warm-up")
            # The same prompts come again when the clock runs, and must not be found in the cache.
            request.params = replace(request.params, cache=CacheParams(reuse=False))
            self._engine.submit(request)
        while self._engine.has_work and not self._is_stopped():
            self._engine.step()

    def measured(self) -> Measurement:
        suspended = self._engine.progress().num_suspensions
        self._began_ns = self._clock_ns()
        due = deque(zip((job.arrival_us for job in self._workload.jobs), self._requests, strict=True))
        while (due or self._num_own_left) and not self._is_stopped():
            while due and due[0][0] <= self._now_us():
                arrival, request = due.popleft()
                self._submit(request, arrival)
            self._interrupt()
            if self._engine.has_work:
                self._step()
            elif due:
                self._sleep(max(0, due[0][0] - self._now_us()) / 10**6)
        elapsed = self._now_us()
        self._cancel_rest()
        return Measurement(
            workload=self._workload,
            samples=tuple(self._samples),
            elapsed_us=elapsed,
            num_suspensions=self._engine.progress().num_suspensions - suspended,
        )

    def _now_us(self) -> int:
        return (self._clock_ns() - self._began_ns) // 1000

    # -- what arrives --------------------------------------------------------------------------------------------

    def _request(self, number: int, *, name: str = "job") -> Request:
        job = self._workload.jobs[number]
        self._check_length(job)
        params = replace(self._params, max_tokens=job.num_output_tokens, seed=self._workload.seed + number)
        prompt = self._workload.prompt(number, self._engine.vocab_size)
        return self._checked(f"{name}-{number}", params, prompt)

    def _check_length(self, job: Job) -> None:
        """Before a prompt is made that no engine takes."""
        most = self._engine.plan.limits.max_seq_len
        if job.num_input_tokens + job.num_output_tokens > most:
            raise InputError(
                f"The engine can never serve workload {self._workload.name!r}: a request has {job.num_input_tokens:,} "
                f"prompt tokens and may generate {job.num_output_tokens:,}",
                need=f"a max_seq_len of {job.num_input_tokens + job.num_output_tokens:,}",
                have=f"max_seq_len = {most:,}",
                remedy="shrink the workload's lengths with --scale; or raise max_seq_len",
            )

    def _checked(self, name: str, params: SamplingParams, prompt: list[int]) -> Request:
        try:
            return self._engine.request(name, params, token_ids=prompt)
        except RequestRefused as refused:
            raise InputError(
                f"The engine can never serve workload {self._workload.name!r}: {refused.what}",
                need=refused.need, have=refused.have,
                remedy=f"shrink the workload's lengths with --scale; or {refused.remedy}",
            ) from None  # fmt: skip

    def _submit(self, request: Request, arrival_us: int, *, is_interrupting: bool = False) -> None:
        sample = Sample(
            id=request.id,
            num_input_tokens=request.num_prompt_tokens,
            num_output_tokens=request.max_tokens,
            arrival_us=arrival_us,
            is_interrupting=is_interrupting,
        )
        self._samples.append(sample)
        self._live[request.id] = _Live(request.token_ids, sample, len(request.token_ids))
        self._engine.submit(request)

    def _interrupt(self) -> None:
        """The next prompt between, if it is time: the decodes had some steps to themselves."""
        if self._workload.shape.interrupting is None or self._quiet_steps < QUIET_STEPS:
            return
        number, prompt = next(self._interruptions)
        params = replace(self._params, max_tokens=1, seed=number)
        self._submit(self._checked(f"between-{number}", params, prompt), self._now_us(), is_interrupting=True)
        self._quiet_steps = 0

    # -- what comes ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        samples = [live.sample for live in self._live.values()] if self._workload.shape.interrupting else []
        is_interrupted = any(sample.is_interrupting for sample in samples)
        is_quiet = all(sample.first_token_us is not None for sample in samples)
        completions = self._engine.step()
        now = self._now_us()
        for live in self._live.values():
            if len(live.tokens) != live.num_seen:
                self._note(live, now, is_interrupted=is_interrupted)
        for completion in completions:
            self._end(completion, now)
        self._quiet_steps += is_quiet
        self._on_step(len(self._workload.jobs) - self._num_own_left)

    @staticmethod
    def _note(live: _Live, now: int, *, is_interrupted: bool) -> None:
        """Tokens that came in this step; of several at once, all but the first came no time after it."""
        num_new, live.num_seen = len(live.tokens) - live.num_seen, len(live.tokens)
        sample = live.sample
        gaps = sample.interrupted_gaps_us if is_interrupted else sample.gaps_us
        if sample.first_token_us is None:
            sample.first_token_us = now
        else:
            gaps.append(now - sample.last_token_us)
        gaps += [0] * (num_new - 1)
        sample.last_token_us = now

    def _end(self, completion: Completion, now: int) -> None:
        sample = self._live.pop(completion.request_id).sample
        sample.end_us, sample.finish, sample.error = now, str(completion.finish_reason), completion.error
        sample.num_suspended, sample.waited = completion.num_suspended, completion.waited
        sample.num_output_tokens = len(completion.token_ids)
        self._num_own_left -= not sample.is_interrupting

    def _cancel_rest(self) -> None:
        """An interrupting prompt that nobody is left to be interrupted by; all, where the run was stopped. What is
        still computed of those that have ended is waited for: the next run finds an idle engine."""
        for request_id in self._live:
            self._engine.cancel(request_id)
        while self._engine.has_work:
            for completion in self._engine.step():
                self._end(completion, self._now_us())
