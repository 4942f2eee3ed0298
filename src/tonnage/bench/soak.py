"""A long random run of an engine, judged by the oracle, by what callers find, and by what is left when it is over."""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from tonnage.bench import adversary, inside, rules, witness
from tonnage.bench.adversary import Adversary
from tonnage.bench.books import Books
from tonnage.bench.breaches import Breaches
from tonnage.bench.failures import FailureCounts
from tonnage.bench.mix import BAD_VALUES, Mix
from tonnage.bench.moves import Ask, Cancel, Load, Move, Nap, Phase, Rest, Settle, Stage, Step, Take
from tonnage.bench.oracle import Oracle
from tonnage.bench.pressure import Pressure
from tonnage.bench.rules import Act
from tonnage.bench.texts import Text
from tonnage.bench.timing import Timing
from tonnage.bench.verdict import SoakReport, Verdict
from tonnage.bench.witness import Heard, Raised, Witness
from tonnage.errors import InvalidSetting, UserError
from tonnage.sampling import SamplingParams

if TYPE_CHECKING:
    from tonnage.engine import Completion, Engine
    from tonnage.engine.mishaps import Mishaps
    from tonnage.engine.request import Delta, Request
    from tonnage.report import RunResult

#: What is checked beside the oracle and the witness, by name.
RULES = {
    "bad values": "sampling parameters out of range are refused",
    "completions": "every accepted request comes back once, no other does",
    "held": "blocks, slots, penalty rows are all back when nothing is left to do",
    "contents": "whoever reads KV blocks finds its own tokens (only a stub can tell)",
    "scratch": "slots that were taken back hold nothing; only held blocks may be in the way",
    "ledger": "counted lines are as before; what none explains is within its bar",
    "defects": "no step ran out of memory, but for faults that were made",
    "crashes": "nothing is raised out of the engine",
}
#: Frames of an exception that are told.
NUM_FRAMES = 3


class Judge(Protocol):
    """Broken rules by name, and the first cases of each in words."""

    broken: Counter[str]
    told: list[str]


class Soak:
    """Sends a load to ``engine`` until ``is_over(num_asked, seconds)`` says so, then lets everything end; once
    ``is_stopped`` it cancels what is left, and judges what there was.

    The clock decides only when to stop; what is asked when is decided by steps and ``load.seed``, so a run of a number
    of requests repeats itself exactly where the engine does. ``mishaps``: those that were given to the engine.
    ``adversary``: whose storm the load is; without one, moves that need it are passed over. ``max_last_tokens``: in the
    end what still waits or has more tokens to go is taken back; None: all is served to its end.
    """

    def __init__(
        self,
        engine: Engine,
        load: Load,
        *,
        is_over: Callable[[int, float], bool],
        has_sampler: bool = True,
        mishaps: Mishaps | None = None,
        adversary: Adversary | None = None,
        max_last_tokens: int | None = None,
        on_step: Callable[[int], None] = lambda _: None,
        is_stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine, self._on_step, self._clock, self._sleep = engine, on_step, clock, sleep
        self._is_stopped = is_stopped
        self._is_over: Callable[[int, float], bool] = lambda asked, passed: is_stopped() or is_over(asked, passed)
        self._load, self._adversary, self._breaches = load, adversary, Breaches(RULES)
        self._max_last_tokens = max_last_tokens
        self._rng = random.Random(load.seed ^ 0x50AC)
        self._limits = inside.oracle_limits(engine)
        self._oracle = Oracle(self._limits)
        self._mishaps = mishaps
        explains = mishaps.explains if mishaps is not None else lambda _: False
        self._witness, self._failures = Witness(has_sampler=has_sampler, explains=explains), FailureCounts(explains)
        self._pressure = Pressure(engine, load.seed, tell=self._oracle.read, on_break=self._breaches.note)
        self._books = Books(engine, self._breaches.note)
        self._timing = Timing(lambda: int(clock() * 10**6), max_batch_size=self._limits.max_batch_size)
        self._open: dict[str, tuple[Ask, Request, Heard | None]] = {}
        self._cancelled: set[str] = set()
        self._due: dict[int, list[str]] = defaultdict(list)  # cancellations by the step before which they come
        self._num_steps = self._num_asked = self._num_tokens = 0
        self._outcomes: Counter[str] = Counter()

    def run(self) -> SoakReport:
        began = self._clock()
        self._engine.observe = self._oracle.read
        if self._mishaps is not None:
            self._mishaps.on_copy = lambda: self._oracle.read(Act("fault"))
        watched: AbstractContextManager[object] = self._adversary or nullcontext()
        with watched:
            try:
                self._serve(began)
            except Exception as error:  # noqa: BLE001 - what it saw until then is worth more than a traceback
                frames = traceback.format_tb(error.__traceback__)[-NUM_FRAMES:]
                self._breaches.note("crashes", f"{type(error).__name__}: {error}\n{''.join(frames)}")
            finally:
                self._engine.observe = None
        self._oracle.close()
        result = self._engine.result()
        self._check_end(result)
        return self._report(result, self._clock() - began)

    def _serve(self, began: float) -> None:
        self._try_bad_values()
        self._probe("alone")
        for move in self._load.moves(self):
            if self._is_over(self._num_asked, self._clock() - began):
                break
            self._do(move)
        self._take_back_the_rest()
        self._finish()
        self._probe("after")

    def _do(self, move: Move) -> None:
        match move:
            case Ask():
                self._num_asked += 1
                self._submit(move)
            case Step():
                if self.has_work:
                    self._step()
            case Settle():
                self._check_held()
            case Cancel(request_id=name):
                self._cancel(name)
            case Phase():
                self._turn_to(move)
            case Nap():
                self._nap(move)
            case Take(hundredths=share) if self._adversary is not None:
                self._adversary.take(share)
            case Rest(seconds=seconds):
                self._sleep(seconds)

    # -- what the load sees --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def num_running(self) -> int:
        return self._engine.progress().num_running

    @property
    def num_waiting(self) -> int:
        return self._engine.progress().num_waiting

    def stage(self, request_id: str) -> Stage:
        if request_id not in self._open:
            return None
        _, request, _ = self._open[request_id]
        if request.slot < 0:
            return "waiting"
        return "decoding" if request.num_generated_tokens else "prefilling"

    # -- what is asked -------------------------------------------------------------------------------------------

    def _try_bad_values(self) -> None:
        for values in BAD_VALUES:
            try:
                SamplingParams(**values)
            except InvalidSetting:
                continue
            self._breaches.note("bad values", f"{values} is accepted")

    def _submit(self, ask: Ask) -> None:
        if ask.is_malformed:
            self._limits.malformed.add(ask.id)
        heard = Heard() if ask.listens else None
        try:
            request = self._engine.request(
                ask.id, ask.params, token_ids=ask.token_ids, on_delta=self._listener(ask, heard) if heard else None
            )
        except UserError:
            self._outcomes["refused"] += 1
            self._timing.refused(ask)
            return
        self._open[ask.id] = ask, request, heard
        self._oracle.read(Act("ask", ask.id, self._text(request)))
        self._engine.submit(request)
        self._timing.arrived(ask, request)
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

    # -- what is done to the engine ------------------------------------------------------------------------------

    def _probe(self, moment: str) -> None:
        """All probes, one after the other, nothing beside them."""
        if self._adversary is None or self._is_stopped():
            return
        probes = self._adversary.probes
        probes.moment = moment
        was_on = self._mishaps is not None and self._mishaps.is_on
        if self._mishaps is not None:
            self._mishaps.is_on = False
        for ask in probes.asks():
            self._submit(ask)
            self._finish()
        if self._mishaps is not None:
            self._mishaps.is_on = was_on
        probes.moment = "storm"

    def _turn_to(self, phase: Phase) -> None:
        """A phase begins, or has asked for all it wants: then the books are looked at, whatever runs."""
        if phase.begins:
            self._timing.phase(phase.name).num_times += 1
        else:
            lent_bytes = 0 if self._adversary is None else self._adversary.lent_bytes
            self._books.check_lines(self._engine.result(), lent_bytes=lent_bytes)

    def _nap(self, nap: Nap) -> None:
        """Nothing is pinned while it sleeps: a pin holds what may go."""
        if self._adversary is None:
            return
        self._pressure.ease()
        self._oracle.read(Act("sleep"))
        self._adversary.naps.fall_asleep(nap.tags)
        for ask in nap.asks:
            self._do(ask)
        if nap.asks:
            self._cancel(self._rng.choice(list(self._open)))
        self._sleep(nap.seconds)
        self._oracle.read(Act("wake"))
        self._adversary.naps.wake()
        self._timing.paused()

    def _take_back_the_rest(self) -> None:
        """Where it is to end soon: all that waits, and what has long to go."""
        most = self._max_last_tokens
        for name, (_, request, _) in list(self._open.items()):
            if most is not None and (request.slot < 0 or request.max_total_tokens - len(request.token_ids) > most):
                self._cancel(name)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Steps until nothing is left."""
        while self.has_work:
            self._step()
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
        completions = self._engine.step()
        progress = self._engine.progress()
        self._timing.stepped(num_running=progress.num_running, num_waiting=progress.num_waiting)
        for completion in completions:
            self._take(completion)
        self._on_step(sum(self._outcomes.values()))

    def _take(self, completion: Completion) -> None:
        if completion.request_id not in self._open:
            self._breaches.note("completions", f"{completion.request_id} comes back and was not there")
            return
        ask, _, heard = self._open.pop(completion.request_id)
        self._outcomes[str(completion.finish_reason)] += 1
        self._num_tokens += len(completion.token_ids)
        self._timing.ended(ask, completion)
        self._witness.check(ask, completion, heard, was_cancelled=ask.id in self._cancelled)
        if completion.finish_reason == "error":
            self._failures.note(ask, completion, heard)
        self._cancelled.discard(ask.id)
        self._load.heard(ask, completion.token_ids)
        if self._adversary is not None:
            self._adversary.probes.take(ask, completion)
        if ask.cancels_when_done:
            self._oracle.read(Act("cancel", ask.id))
            self._engine.cancel(ask.id)

    # -- what is left --------------------------------------------------------------------------------------------

    def _check_held(self) -> None:
        self._pressure.ease()
        self._books.check_held()

    def _check_end(self, result: RunResult) -> None:
        for request_id in self._open:
            self._breaches.note("completions", f"{request_id} never comes back")
        self._books.check_emptied()
        self._breaches.broken["contents"], wrong = inside.wrong_contents(self._engine)
        self._breaches.told += [f"contents: {one}" for one in wrong]
        self._books.check_lines(result)
        num_made = self._mishaps.num_out_of_memory if self._mishaps is not None else 0
        for culprit in result.retried_steps[num_made:]:
            self._breaches.note("defects", culprit)

    def _report(self, result: RunResult, seconds: float) -> SoakReport:
        adversities, judges = None, list[Judge]([self._oracle, self._witness, self._breaches])
        all_rules = {**rules.RULES, **witness.RULES, **RULES}
        if self._adversary is not None:
            adversities = self._adversary.figures()
            judges.append(self._adversary.breaches)
            all_rules |= adversary.RULES
        broken: Counter[str] = sum((judge.broken for judge in judges), Counter())
        return SoakReport(
            verdicts=tuple(
                Verdict(rule=name, meaning=told, num_broken=broken[name]) for name, told in all_rules.items()
            ),
            told=tuple(told for judge in judges for told in judge.told),
            outcomes=dict(self._outcomes),
            counts=dict(self._oracle.counts),
            num_tokens=self._num_tokens,
            longest_wait_steps=self._oracle.longest_wait_steps,
            most_overtaken=self._oracle.most_overtaken,
            seconds=seconds,
            result=result,
            cache=inside.done(self._engine) | self._pressure.counts,
            faults=dict(self._mishaps.counts) if self._mishaps is not None else {},
            failures=self._failures.all(
                num_refused=self._outcomes["refused"], num_refused_wrongly=self._oracle.broken["refusals"]
            ),
            phases=tuple(self._timing.phases.values()),
            load=self._timing.load,
            adversities=adversities,
        )


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
