"""A long random run of an engine, judged by the oracle, by what callers find, and by what is left when it is over."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tonnage.bench import inside, rules, witness
from tonnage.bench.mix import BAD_VALUES, Ask, Mix
from tonnage.bench.oracle import Oracle
from tonnage.bench.pressure import Pressure
from tonnage.bench.rules import Act
from tonnage.bench.texts import Text
from tonnage.bench.witness import Heard, Raised, Witness
from tonnage.errors import InvalidSetting, UserError
from tonnage.sampling import SamplingParams
from tonnage.terms import How, LineKind
from tonnage.units import MiB, format_bytes

if TYPE_CHECKING:
    from tonnage.engine import Completion, Engine
    from tonnage.engine.mishaps import Mishaps
    from tonnage.engine.request import Delta, Request
    from tonnage.report import RunResult

#: What no line of the ledger explains may be this many bytes, or this share (in hundredths) of the device.
UNATTRIBUTED_BYTES, UNATTRIBUTED_HUNDREDTHS = 32 * MiB, 3
#: The queue is let run down to this many batches before more requests come.
MAX_WAITING_BATCHES = 4

#: What is checked beside the oracle and the witness, by name.
RULES = {
    "bad values": "sampling parameters out of range are refused",
    "completions": "every accepted request comes back once, no other does",
    "held": "blocks, slots, penalty rows are all back when nothing is left to do",
    "contents": "whoever reads KV blocks finds its own tokens (only a stub can tell)",
    "scratch": "slots that were taken back hold nothing; only held blocks may be in the way",
    "ledger": "counted lines are as before; what none explains is within its bar",
    "defects": "no step ran out of memory, but for faults that were made",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One rule and how often it was broken."""

    rule: str
    meaning: str
    num_broken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """What a soak saw.

    outcomes             requests by how they ended, and refused ones
    counts               entries of the log by kind
    longest_wait_steps   steps from arrival or suspension to admission
    most_overtaken       how often the oldest waiting request was passed while it was that
    told                 the first violations, in words
    cache                what the KV cache did: tokens looked for and found, blocks by what was done with them
    faults               failures that were made, by kind
    """

    verdicts: tuple[Verdict, ...]
    told: tuple[str, ...]
    outcomes: dict[str, int]
    counts: dict[str, int]
    num_tokens: int
    longest_wait_steps: int
    most_overtaken: int
    seconds: float
    result: RunResult
    cache: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not any(verdict.num_broken for verdict in self.verdicts)


class Soak:
    """Sends ``mix`` to ``engine`` until ``is_over(num_asked, seconds)`` says so, then lets everything end; once
    ``is_stopped`` it cancels what is left, and judges what there was.

    The clock decides only when to stop; what is asked when is decided by steps and ``mix.seed``, so a run of a number
    of requests repeats itself exactly where the engine does. ``mishaps``: those that were given to the engine.
    """

    def __init__(
        self,
        engine: Engine,
        mix: Mix,
        *,
        is_over: Callable[[int, float], bool],
        has_sampler: bool = True,
        mishaps: Mishaps | None = None,
        on_step: Callable[[int], None] = lambda _: None,
        is_stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._mix, self._on_step, self._clock = engine, mix, on_step, clock
        self._is_stopped = is_stopped
        self._is_over: Callable[[int, float], bool] = lambda asked, passed: is_stopped() or is_over(asked, passed)
        self._rng = random.Random(mix.seed ^ 0x50AC)
        self._limits = inside.oracle_limits(engine)
        self._oracle = Oracle(self._limits)
        self._mishaps = mishaps
        explains = mishaps.explains if mishaps is not None else lambda _: False
        self._witness = Witness(has_sampler=has_sampler, explains=explains)
        self._pressure = Pressure(engine, mix.seed, tell=self._oracle.read, on_break=self._break)
        self._open: dict[str, tuple[Ask, Heard | None]] = {}
        self._cancelled: set[str] = set()
        self._due: dict[int, list[str]] = defaultdict(list)  # cancellations by the step before which they come
        self._num_steps = self._num_asked = self._num_tokens = 0
        self._outcomes: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()
        self._told: list[str] = []
        self._at_rest = inside.held(engine)
        self._lines_at_rest = _counted_lines(engine.result())

    def run(self) -> SoakReport:
        began = self._clock()
        self._engine.observe = self._oracle.read
        if self._mishaps is not None:
            self._mishaps.on_copy = lambda: self._oracle.read(Act("fault"))
        try:
            self._try_bad_values()
            while not self._is_over(self._num_asked, self._clock() - began):
                for ask in self._mix.burst():
                    if self._is_over(self._num_asked, self._clock() - began):
                        break
                    self._submit(ask)
                self._be_quiet(self._mix.quiet_steps())
            self._be_quiet(None)
        finally:
            self._engine.observe = None
        self._oracle.close()
        result = self._engine.result()
        self._check_end(result)
        return self._report(result, self._clock() - began)

    # -- what is asked -------------------------------------------------------------------------------------------

    def _try_bad_values(self) -> None:
        for values in BAD_VALUES:
            try:
                SamplingParams(**values)
            except InvalidSetting:
                continue
            self._break("bad values", f"{values} is accepted")

    def _submit(self, ask: Ask) -> None:
        self._num_asked += 1
        if ask.is_malformed:
            self._limits.malformed.add(ask.id)
        heard = Heard() if ask.listens else None
        try:
            request = self._engine.request(
                ask.id, ask.params, token_ids=ask.token_ids, on_delta=self._listener(ask, heard) if heard else None
            )
        except UserError:
            self._outcomes["refused"] += 1
            return
        self._open[ask.id] = ask, heard
        self._oracle.read(Act("ask", ask.id, self._text(request)))
        self._engine.submit(request)
        if ask.cancel_after_steps == 0:
            self._cancel(ask.id)
        elif ask.cancel_after_steps is not None:
            self._due[self._num_steps + ask.cancel_after_steps].append(ask.id)

    def _text(self, request: Request) -> Text:
        cache = request.params.cache
        shares = self._limits.shares and cache.reuse
        return Text(
            request.token_ids,
            scope=(request.adapter_id, cache.salt) if shares else request.id,
            block_tokens=self._limits.block_tokens,
            shares=shares,
            may_match=shares and request.params.prompt_logprobs is None,
        )

    def _listener(self, ask: Ask, heard: Heard) -> Callable[[Delta], None]:
        def on_delta(delta: Delta) -> None:
            number = heard.num_deltas
            heard.take(delta)
            if number == ask.cancels_at_delta:
                self._cancel(self._rng.choice(list(self._open)) if ask.cancels_another else ask.id)
            if number == ask.raises_at_delta:
                heard.has_raised = True
                raise Raised(ask.id)

        return on_delta

    def _cancel(self, request_id: str) -> None:
        if request_id in self._open:  # one that has ended is cancelled too, which must change nothing
            self._cancelled.add(request_id)
        self._oracle.read(Act("cancel", request_id))
        self._engine.cancel(request_id)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _be_quiet(self, num_steps: int | None) -> None:
        """So many steps without new requests, or until nothing is left; longer where too many wait."""
        most = MAX_WAITING_BATCHES * self._limits.max_batch_size
        passed = 0
        while self._engine.has_work:
            if num_steps is not None and passed >= num_steps and self._engine.progress().num_waiting <= most:
                return
            self._step()
            passed += 1
        self._check_held()

    def _step(self) -> None:
        if self._is_stopped():
            for request_id in [name for name in self._open if name not in self._cancelled]:
                self._cancel(request_id)
        for request_id in self._due.pop(self._num_steps, ()):
            self._cancel(request_id)
        self._pressure.change(list(self._open))
        self._num_steps += 1
        self._oracle.read(Act("step"))
        for completion in self._engine.step():
            self._take(completion)
        self._on_step(sum(self._outcomes.values()))

    def _take(self, completion: Completion) -> None:
        ask, heard = self._open.pop(completion.request_id, (None, None))
        if ask is None:
            self._break("completions", f"{completion.request_id} comes back and was not there")
            return
        self._outcomes[str(completion.finish_reason)] += 1
        self._num_tokens += len(completion.token_ids)
        self._witness.check(ask, completion, heard, was_cancelled=ask.id in self._cancelled)
        self._cancelled.discard(ask.id)
        self._mix.heard(ask, completion.token_ids)
        if ask.cancels_when_done:
            self._oracle.read(Act("cancel", ask.id))
            self._engine.cancel(ask.id)

    # -- what is left --------------------------------------------------------------------------------------------

    def _check_held(self) -> None:
        self._pressure.ease()
        held, progress = inside.held(self._engine), self._engine.progress()
        moved = {name: (self._at_rest.get(name), count) for name, count in held.items() if self._at_rest[name] != count}
        if moved or progress.num_running or progress.num_waiting or progress.kv_used_tokens:
            self._break("held", f"with nothing left to do: {moved or progress}")
        for told in inside.lost_blocks(self._engine):
            self._break("held", f"with nothing left to do {told}")

    def _check_end(self, result: RunResult) -> None:
        for request_id in self._open:
            self._break("completions", f"{request_id} never comes back")
        for told in inside.lost_when_emptied(self._engine):
            self._break("held", f"with nothing left to do and an empty cache {told}")
        self._broken["contents"], wrong = inside.wrong_contents(self._engine)
        self._told += [f"contents: {one}" for one in wrong]
        for line, num_bytes in _counted_lines(result).items():
            if num_bytes != self._lines_at_rest.get(line, 0):
                was = format_bytes(self._lines_at_rest.get(line, 0))
                self._break("ledger", f"{line} stands at {format_bytes(num_bytes)}, at the start at {was}")
        unexplained, device = result.snapshot.unattributed, result.plan.device_bytes
        if unexplained is not None and unexplained > max(UNATTRIBUTED_BYTES, device * UNATTRIBUTED_HUNDREDTHS // 100):
            self._break("ledger", f"no line explains {format_bytes(unexplained)}")
        num_made = self._mishaps.num_out_of_memory if self._mishaps is not None else 0
        for culprit in result.retried_steps[num_made:]:
            self._break("defects", culprit)

    def _report(self, result: RunResult, seconds: float) -> SoakReport:
        all_rules = {**rules.RULES, **witness.RULES, **RULES}
        broken = self._oracle.broken + self._witness.broken + self._broken
        return SoakReport(
            verdicts=tuple(
                Verdict(rule=name, meaning=told, num_broken=broken[name]) for name, told in all_rules.items()
            ),
            told=(*self._oracle.told, *self._witness.told, *self._told),
            outcomes=dict(self._outcomes),
            counts=dict(self._oracle.counts),
            num_tokens=self._num_tokens,
            longest_wait_steps=self._oracle.longest_wait_steps,
            most_overtaken=self._oracle.most_overtaken,
            seconds=seconds,
            result=result,
            cache=inside.done(self._engine) | self._pressure.counts,
            faults=dict(self._mishaps.counts) if self._mishaps is not None else {},
        )

    def _break(self, rule: str, told: str) -> None:
        assert rule in RULES
        self._broken[rule] += 1
        if self._broken[rule] <= Oracle.MAX_TOLD:
            self._told.append(f"{rule}: {told}")


def _counted_lines(result: RunResult) -> dict[str, int]:
    """Bytes of each line that our own allocators count; a lazily made one (penalty tables) is left out."""
    lines: Counter[str] = Counter()
    for entry in result.snapshot.entries:
        if entry.how is How.COUNTED and entry.line is not LineKind.TABLES:
            lines[entry.line.value] += entry.physical_bytes
    return dict(lines)


def make_mix(engine: Engine, seed: int) -> Mix:
    """A mix for this engine's sizes."""
    limits = engine.plan.limits
    return Mix(
        seed=seed,
        vocab_size=engine.vocab_size,
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        block_tokens=engine.plan.kv.layout.groups[0].block_tokens,
    )
