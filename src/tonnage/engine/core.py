"""The engine once it is built: requests in, tokens out, every step a transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from tonnage.engine.interrupts import deferred_interrupts
from tonnage.engine.request import Completion, Finish, OnToken, Progress, Request
from tonnage.engine.runtime import Runtime
from tonnage.engine.sampler import Sampled
from tonnage.engine.scheduler import Scheduler
from tonnage.engine.text import Detokenizer, Message, Text
from tonnage.errors import InputError, RequestRefused, TonnageError
from tonnage.report import RunResult, StageRecord
from tonnage.step import StepPlan, Txn
from tonnage.terms import MemoryPlan

DEFAULT_MAX_TOKENS = 128
#: Time between two looks at the process's memory, which also make the heap give back what it keeps: a few milliseconds.
SETTLE_EVERY_NS = 500 * 10**6


class Engine:
    """A model inside its memory plan. Not thread-safe: one thread submits, steps and cancels.

    Use as a context manager, or call ``close``. ``plan``, ``ledger``, ``stages`` and ``text`` may be read at any time.
    """

    def __init__(self, runtime: Runtime, text: Text, stages: Sequence[StageRecord]) -> None:
        self.plan: MemoryPlan = runtime.plan
        self.ledger = runtime.site.ledger
        self.text = text
        self.stages = tuple(stages)
        self._runtime = runtime
        self._scheduler = Scheduler(
            runtime.dispatcher,
            max_num_tokens=self.plan.limits.max_num_tokens,
            block_tokens=runtime.kv.block_tokens,
            memory_managers=frozenset({runtime.kv.name}),
        )
        self._ids: set[str] = set()
        self._detokenizers: dict[str, Detokenizer] = {}
        self._done: list[Request] = []
        self._completions: list[Completion] = []
        self._counts = dict.fromkeys(Finish, 0)
        self._num_waited = self._prompt_tokens = self._generated_tokens = 0
        self._num_steps = 0
        self._serving_ns = 0
        self._settled_ns = time.monotonic_ns()

    # -- requests ------------------------------------------------------------------------------------------------

    def request(
        self,
        id: str,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        ignore_stop: bool = False,
        on_token: OnToken | None = None,
    ) -> Request:
        """A request from exactly one of a text, a conversation, or token ids; not submitted yet.

        ``max_tokens`` left out is ``DEFAULT_MAX_TOKENS``, or what max_seq_len leaves after the prompt if that is less.

        Raises ``RequestRefused`` for one that can never be served, ``InputError`` for one that makes no sense.
        """
        if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
            raise InputError(f"Request {id!r} must give exactly one of prompt, messages, token_ids")
        if messages is not None:
            ids = self.text.encode_chat(messages)
        else:
            ids = self.text.encode(prompt) if prompt is not None else list(token_ids or ())
        if max_tokens is None:
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, self.plan.limits.max_seq_len - len(ids)))
        request = Request(
            id=id,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            max_tokens=max_tokens,
            stop_ids=frozenset() if ignore_stop else self.text.stop_ids,
            on_token=on_token,
        )
        self._refuse_impossible(request)
        return request

    def submit(self, request: Request) -> None:
        """Queue it, in order of arrival. Raises ``InputError`` if a live request has the same id."""
        if request.id in self._ids:
            raise InputError(f"There is a request {request.id!r} already", remedy="give every request its own id")
        with deferred_interrupts():
            self._ids.add(request.id)
            self._prompt_tokens += request.num_prompt_tokens
            self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Stop a request; what it generated so far comes with the next ``step``. Unknown ids are fine."""
        with deferred_interrupts():
            request = self._scheduler.remove(request_id)
            if request is not None:
                request.finish = Finish.CANCELLED
                self._done.append(request)

    def _refuse_impossible(self, request: Request) -> None:
        limit = self.plan.limits.max_seq_len
        if request.max_tokens < 1:
            raise RequestRefused(request.id, f"Request {request.id!r} asks for max_tokens = {request.max_tokens}",
                                 remedy="ask for at least 1")  # fmt: skip
        if request.num_prompt_tokens == 0:
            raise RequestRefused(request.id, f"Request {request.id!r} has an empty prompt", remedy="send some text")
        vocabulary = self._runtime.vocab_size
        if not all(0 <= token < vocabulary for token in request.token_ids):
            raise RequestRefused(
                request.id, f"Request {request.id!r} holds token ids outside the vocabulary",
                need=f"ids from 0 to {vocabulary - 1}", remedy="encode the prompt with this model's tokenizer",
            )  # fmt: skip
        if request.num_prompt_tokens >= limit:
            raise RequestRefused(
                request.id,
                f"The prompt of request {request.id!r} is too long",
                need=f"{request.num_prompt_tokens + 1} tokens (prompt and one to generate)",
                have=f"max_seq_len = {limit}",
                remedy=f"shorten the prompt to {limit - 1} tokens, or start with a larger --max-seq-len",
            )
        if request.max_total_tokens > limit:
            raise RequestRefused(
                request.id,
                f"Request {request.id!r} can never fit",
                need=f"{request.num_prompt_tokens} prompt tokens + {request.max_tokens} to generate",
                have=f"max_seq_len = {limit}",
                remedy=f"ask for max_tokens of at most {limit - request.num_prompt_tokens}",
            )
        for refusal in self._runtime.dispatcher.refusals(request):
            raise RequestRefused(
                request.id,
                f"Request {request.id!r} can never fit into {refusal.manager}",
                need=f"{refusal.need} {refusal.unit}s",
                have=f"{refusal.have} {refusal.unit}s",
                remedy="shorten the prompt or max_tokens, or start with more memory",
            )

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._done or self._completions or self._scheduler.num_running or self._scheduler.num_waiting)

    def step(self) -> list[Completion]:
        """One forward over whatever is due; returns the requests that ended since the last call.

        A failure inside the forward fails the requests of that step, rolls every manager back, and the engine goes on.
        ``KeyboardInterrupt`` comes after the step; what it finished is then returned by the next call.
        """
        began = time.monotonic_ns()
        with deferred_interrupts():
            try:
                self._step()
            finally:
                self._serving_ns += time.monotonic_ns() - began
            while self._done:
                self._completions.append(self._complete(self._done.pop(0)))
        # An interrupt raised here leaves them for the next call.
        completions, self._completions = self._completions, []
        return completions

    def _step(self) -> None:
        txn = Txn()
        plan: StepPlan | None = None
        self.ledger.step(self._num_steps)
        try:
            plan = self._scheduler.schedule(txn)
            if plan is None:
                txn.rollback()
                return
            self._runtime.dispatcher.prepare(plan, txn)
            outcome = self._runtime.launch(
                plan, {i.request_id: self._scheduler.running(i.request_id) for i in plan.items}
            )
        except Exception as error:  # noqa: BLE001 - whatever a model, a kernel or a manager raises, the loop serves on
            txn.rollback()
            self._fail_step(plan, error)
            return
        except BaseException:
            txn.rollback()
            raise
        txn.commit()
        self._runtime.dispatcher.update(plan, outcome)
        self._num_steps += 1
        self._take(plan, outcome)
        if time.monotonic_ns() - self._settled_ns > SETTLE_EVERY_NS:
            self._runtime.settle("serving")
            self._settled_ns = time.monotonic_ns()

    def _take(self, plan: StepPlan, outcome: dict[str, Sampled]) -> None:
        """The step is committed: move every request on, then hand tokens out, then let the finished go.

        Callers' code runs only once all requests are consistent, so nothing it does can leave one half moved.
        """
        told = []
        for item in plan.items:
            request = self._scheduler.running(item.request_id)
            request.num_computed_tokens = item.end
            sampled = outcome.get(item.request_id)
            if sampled is not None and self._append(request, sampled):
                told.append((request, sampled.token))
        for request, token in told:
            self._tell(request, token)
        self._retire()

    def _append(self, request: Request, sampled: Sampled) -> bool:
        if not sampled.finite:
            request.finish, request.error = Finish.ERROR, "the model's logits are not finite numbers"
            return False
        request.append(sampled.token, sampled.logprob)
        self._generated_tokens += 1
        return True

    def _retire(self) -> None:
        for request in self._scheduler.finished():
            self._scheduler.remove(request.id)
            self._done.append(request)

    def _tell(self, request: Request, token: int) -> None:
        if request.on_token is None or request.finish is Finish.CANCELLED:
            return  # cancelled by another's callback in this very step
        detokenizer = self._detokenizers.setdefault(request.id, Detokenizer(self.text))
        text = detokenizer.push(token)
        if request.finish is not None:
            text += detokenizer.flush()
        try:
            request.on_token(request.id, token, text)
        except Exception as error:  # noqa: BLE001 - a caller's callback must not take the other requests down
            request.finish, request.error = Finish.ERROR, f"on_token raised {type(error).__name__}: {error}"

    def _fail_step(self, plan: StepPlan | None, error: Exception) -> None:
        """The step's requests end with the error; without a plan, the head of the queue does, or nothing would move."""
        told = str(error) if isinstance(error, TonnageError) else f"{type(error).__name__}: {error}"
        head = self._scheduler.head()
        failing = [item.request_id for item in plan.items] if plan else [head.id] if head else []
        for request_id in failing:
            request = self._scheduler.remove(request_id)
            if request is not None:
                request.finish, request.error = Finish.ERROR, f"the step failed: {told}"
                self._done.append(request)

    def _complete(self, request: Request) -> Completion:
        assert request.finish is not None
        self._ids.discard(request.id)
        self._detokenizers.pop(request.id, None)
        self._counts[request.finish] += 1
        self._num_waited += request.waited
        return Completion(
            request_id=request.id,
            text=self.text.decode(request.generated_ids),
            token_ids=tuple(request.generated_ids),
            logprobs=tuple(request.logprobs),
            num_prompt_tokens=request.num_prompt_tokens,
            finish_reason=request.finish,
            error=request.error,
            waited=request.waited,
        )

    # -- what is going on ----------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        kv = self._runtime.kv
        return Progress(
            num_finished=sum(self._counts.values()),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_used_tokens=kv.pool.num_used * kv.block_tokens,
            kv_total_tokens=kv.capacity() * kv.block_tokens,
            generated_tokens=self._generated_tokens,
        )

    def result(self) -> RunResult:
        """What has happened since start-up, with the ledger as it stands now."""
        return self._runtime.result(
            finished=self._counts[Finish.STOP] + self._counts[Finish.LENGTH],
            failed=self._counts[Finish.ERROR],
            cancelled=self._counts[Finish.CANCELLED],
            waited=self._num_waited,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            elapsed_ms=self._serving_ns // 10**6,
            stages=self.stages,
        )

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._runtime.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
