"""An independent judge of an engine: it recomputes from the log alone what may and what must have happened.

It reads the engine's events and the caller's own acts in the order in which they happened, and shares no code with
scheduler or managers: what it knows of the rules stands here and in ``rules`` and ``texts``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.bench.holding import Holding, Live
from tonnage.bench.idleness import Idleness, Row, Told
from tonnage.bench.rules import RULES, Act, Limits
from tonnage.bench.texts import Text

if TYPE_CHECKING:
    from tonnage.engine.events import Event


@dataclass(slots=True, eq=False)
class _Admission:
    """Who was admitted, and whom that passed over."""

    live: Live
    passed: Live | None


class Oracle:
    """``read`` every entry, then ``close``. ``broken`` counts violations by rule; ``told`` describes the first few.

    Rows are told when their step is launched. Where steps overlap (``Limits.steps_ahead``), what they draw is looked at
    a call later: a request that ends by it has had a row more, and what is computed can be found once it has landed.
    """

    MAX_TOLD = 5

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.broken: Counter[str] = Counter()
        self.told: list[str] = []
        self.counts: Counter[str] = Counter()
        self.longest_wait_steps = 0
        self.most_overtaken = 0
        self._live: dict[str, Live] = {}
        self._step = 0
        self._rows: dict[str, Row] = {}  # of the step being read
        self._admitted: list[_Admission] = []  # who had no row yet that they must have
        self._texts: dict[str, Text] = {}  # of requests that have not arrived yet
        self._holding = Holding(limits)
        self._idleness = Idleness(limits, self._holding, self._break)
        self._was_disturbed = self._had_fault = self._had_suspension = False
        self._careful_steps = 0
        self._must_move = self._has_moved = False
        self._num_still = 0  # calls in a row that moved nothing
        self._is_asleep = False
        self._drowsy_acts = 0  # calls of ``step`` after it woke

    def read(self, entry: Event | Act) -> None:
        if entry.kind != "computed":
            self._end_step()
        self.counts[str(entry.kind)] += 1
        getattr(self, f"_on_{entry.kind}")(entry)

    def read_all(self, log: Iterable[Event | Act]) -> None:
        for entry in log:
            self.read(entry)
        self.close()

    def close(self) -> None:
        """The log is complete: whoever has not ended never will."""
        self._end_step()
        for live in self._live.values():
            self._break("endings", f"{live.id} never ends")
        self._live.clear()

    # -- requests ------------------------------------------------------------------------------------------------

    def _on_arrived(self, event: Event) -> None:
        if event.request_id in self._live:
            self._break("endings", f"{event.request_id} arrives again before it has ended")
        if not self._could_run(event):
            self._break("refusals", f"{event.request_id} is accepted and can never run")
        text = self._texts.pop(event.request_id, None)
        self._live[event.request_id] = Live(
            id=event.request_id,
            text=text or self._untold(event.request_id),
            prompt=event.num_prompt_tokens,
            most=event.max_tokens,
            priority=event.priority,
            order=self.counts["arrived"],
            known=event.num_prompt_tokens,
            since=event.step,
        )

    def _untold(self, name: str) -> Text:
        """Of a request of whose text nothing is known: it must share nothing."""
        return Text((), scope=name, block_tokens=self.limits.block_tokens, shares=False, may_match=False)

    def _on_ask(self, act: Act) -> None:
        assert act.text is not None
        self._texts[act.request_id] = act.text

    def _on_refused(self, event: Event) -> None:
        self._texts.pop(event.request_id, None)
        if self._could_run(event):
            self._break("refusals", f"{event.request_id} is refused and could run")

    def _could_run(self, event: Event) -> bool:
        prompt, most, limits = event.num_prompt_tokens, event.max_tokens, self.limits
        return (
            event.request_id not in limits.malformed
            and prompt >= 1
            and most >= 1
            and prompt + most <= limits.max_seq_len
            and self._holding.blocks(max(prompt, prompt + most - 1)) <= limits.num_blocks
            and (limits.cuts_prompts or prompt <= limits.max_num_tokens)
        )

    def _on_admitted(self, event: Event) -> None:
        live = self._in_state(event, "waiting")
        if live is None:
            return
        waiting = self._all("waiting")
        for other in waiting:
            if other.order < live.order and other.priority >= live.priority:
                self._break("order", f"{live.id} is admitted past {other.id}, which is older")
                break
        oldest = min(waiting, key=lambda other: other.order)
        passed = None if oldest is live else oldest
        if passed is not None:
            passed.passed += 1
            self.most_overtaken = max(self.most_overtaken, passed.passed)
            if passed.passed > self.limits.max_overtaken:
                self._break("starvation", f"{passed.id} is passed {passed.passed} times")
        self._admitted.append(_Admission(live, passed))
        self.longest_wait_steps = max(self.longest_wait_steps, event.step - live.since)
        self._check_reuse(live, event.num_cached_tokens)
        self._holding.enter(live, event.num_cached_tokens)
        if len(self._all("running")) > self.limits.max_batch_size:
            self._break("sequences", f"{live.id} runs beside {self.limits.max_batch_size} others")

    def _check_reuse(self, live: Live, cached: int) -> None:
        """All that is found has been computed, and at least what runs with the same beginning is found."""
        text, limits = live.text, self.limits
        if limits.steps_ahead:
            self._holding.note_told(self._all("running"))
        if cached > live.known - 1:
            self._break("reuse", f"{live.id} finds {cached} of {live.known} tokens and has none to compute")
        if cached and not (limits.shares and text.may_match):
            self._break("reuse", f"{live.id} finds {cached} tokens and must compute all itself")
        elif cached and not self._holding.was_computed(live, cached):
            self._break("reuse", f"{live.id} finds {cached} tokens that nobody has computed")
        if cached < (least := self._holding.surely_cached(live, self._all("running"))):
            self._break("reuse", f"{live.id} finds {cached} tokens where {least} of it run")

    def _on_withdrawn(self, event: Event) -> None:
        """The step was rolled back, and with it the admission."""
        live = self._in_state(event, "running")
        if live is None:
            return
        for entry in [entry for entry in self._admitted if entry.live is live]:
            self._admitted.remove(entry)
            if entry.passed is not None:
                entry.passed.passed -= 1
        self._holding.let_go(live)
        live.state, live.computed, self._was_disturbed = "waiting", 0, True

    def _on_suspended(self, event: Event) -> None:
        live = self._in_state(event, "running")
        if live is None:
            return
        if live.loads and self._had_fault:
            live.is_sure, self._was_disturbed = False, True
        elif not self._is_asleep and not self._drowsy_acts:
            if not self.limits.may_suspend:
                self._break("suspension", f"{live.id} is suspended where lives are reserved")
            if live is min(self._all("running"), key=lambda other: other.order):
                self._break("suspension", f"{live.id} is suspended and is the oldest that runs")
        self._holding.leave(live)
        self._had_suspension = True
        live.state, live.computed, live.since = "waiting", 0, event.step

    def _on_cancel(self, act: Act) -> None:
        live = self._live.get(act.request_id)
        if live is not None and live.state != "left":
            self._holding.leave(live)
            live.state, live.is_cancelled = "left", True

    def _on_left(self, event: Event) -> None:
        live = self._live.get(event.request_id)
        if live is None or live.has_left:
            self._break("endings", f"{event.request_id} leaves and is not there")
            return
        if event.finish in ("stop", "length") and live.state == "waiting":
            self._break("states", f"{live.id} finishes while it waits")
        self._holding.leave(live)
        live.state, live.has_left, self._has_moved = "left", True, True

    def _on_sleep(self, _: Act) -> None:
        """Whatever ran may be suspended, the oldest too, and computed again."""
        self._is_asleep = self._was_disturbed = True

    def _on_wake(self, _: Act) -> None:
        self._is_asleep, self._was_disturbed = False, True
        self._drowsy_acts = 1 + self.limits.steps_ahead

    def _on_pin(self, act: Act) -> None:
        self._holding.pin(self._live[act.request_id])

    def _on_unpin(self, act: Act) -> None:
        self._holding.unpin(act.request_id)

    def _on_ended(self, event: Event) -> None:
        live, name, finish = self._live.pop(event.request_id, None), event.request_id, str(event.finish)
        self._has_moved = True
        if live is None:
            self._break("endings", f"{name} ends and is not there")
            return
        if not live.has_left:
            self._break("endings", f"{name} ends and has not left")
        generated = event.num_known_tokens - live.prompt
        # A row whose logits were no numbers is computed and gives no token.
        untold = live.known - event.num_known_tokens
        if not 0 <= untold <= self.limits.steps_ahead + (finish == "error"):
            self._break("rows", f"{name} ends with {event.num_known_tokens} tokens, {live.known} by its rows")
        if finish == "length" and generated != live.most:
            self._break("endings", f"{name} ends at its length with {generated} of {live.most} tokens")
        if finish == "stop" and not 1 <= generated <= live.most:
            self._break("endings", f"{name} stops with {generated} of {live.most} tokens")
        if finish == "cancelled" and not live.is_cancelled:
            self._break("endings", f"{name} is cancelled and nobody asked for it")
        if finish not in ("stop", "length", "cancelled", "error"):
            self._break("endings", f"{name} ends without a reason ({finish})")

    # -- steps ---------------------------------------------------------------------------------------------------

    def _on_step(self, _: Act) -> None:
        self._check_admitted()
        self._idleness.step(self._live)
        self._num_still = self._num_still + 1 if self._must_move and not self._has_moved else 0
        loads = any(live.loads for live in self._live.values())
        is_small = self._careful_steps > 0 and not self.limits.cuts_prompts
        # The engine waits for a load when there is nothing else to do, and then goes on with it; where steps overlap
        # it may have nothing to launch before one has landed.
        if self._num_still > loads + self.limits.steps_ahead and not is_small:
            self._break("idleness", f"a step moves nothing while {len(self._live)} requests are there")
        self._must_move = any(live.state != "left" for live in self._live.values())
        self._has_moved = False
        self._was_disturbed = self._had_fault = self._had_suspension = False
        self._careful_steps = max(0, self._careful_steps - 1)
        self._drowsy_acts = max(0, self._drowsy_acts - 1)
        self._holding.step()
        for live in self._all("running"):
            self._holding.land(live)

    def _on_fault(self, _: Act) -> None:
        self._had_fault = self._was_disturbed = self._has_moved = True

    def _on_retried(self, _: Event) -> None:
        """The step was rolled back: suspensions stay, and the next try is a smaller one, as are some steps after it."""
        self._was_disturbed = self._has_moved = True
        self._careful_steps = self.limits.careful_steps + 1

    def _on_computed(self, event: Event) -> None:
        self._has_moved = True
        if event.step != self._step:
            self._end_step()
        self._step = event.step
        live = self._in_state(event, "running")
        if live is None:
            return
        end = event.start + event.count
        if event.request_id in self._rows:
            self._break("rows", f"{live.id} has two rows in step {event.step}")
        if event.start != live.computed or event.count < 1 or end > live.known:
            stood = f"{live.computed} of {live.known} were computed"
            self._break("rows", f"{live.id} computes tokens {event.start} to {end} where {stood}")
        # What was admitted in this step came as a prompt, however little of it was left.
        is_new = any(entry.live is live for entry in self._admitted)
        self._rows[live.id] = Row(live, event.count, live.decodes and not is_new)
        self._holding.compute(live, end)
        live.known += end == live.known  # the row reaches its last known token, so it samples the next

    def _end_step(self) -> None:
        """The rows of one step are complete, and nothing has happened since."""
        if not self._rows:
            return
        limits, running, rows = self.limits, self._all("running"), self._rows.values()
        new = {entry.live.id for entry in self._admitted}
        num_tokens, num_decodes = sum(row.count for row in rows), sum(row.is_decode for row in rows)
        prefill = num_tokens - num_decodes
        longest = max((row.count for row in rows if not row.is_decode), default=0)
        beside = limits.max_beside_decode_tokens if num_decodes else None
        if num_tokens > limits.max_num_tokens or (beside is not None and prefill > beside):
            self._break("tokens", f"step {self._step} decodes {num_decodes} and prefills {prefill} tokens")
        if limits.max_chunk_tokens is not None and longest > limits.max_chunk_tokens:
            self._break("tokens", f"step {self._step} has a chunk of {longest} tokens")
        if len(rows) > limits.max_batch_size:
            self._break("sequences", f"step {self._step} has {len(rows)} rows")
        if (held := self._holding.least(running)) > limits.num_blocks:
            self._break("blocks", f"step {self._step} holds {held} blocks of {limits.num_blocks}")
        self._check_admitted()
        if not (self._was_disturbed or self._careful_steps or self._drowsy_acts):
            room = limits.max_num_tokens - num_tokens
            prefill_room = room if beside is None else min(room, beside - prefill)
            self._idleness.check(
                Told(
                    number=self._step, rows=self._rows, running=running, waiting=self._all("waiting"), new=new,
                    room=room, prefill_room=prefill_room, had_suspension=self._had_suspension,
                )
            )  # fmt: skip
        self._was_disturbed = False
        self._rows = {}

    def _check_admitted(self) -> None:
        """Whoever was admitted in the step that is over computes, or else loads what it has found."""
        for entry in self._admitted:
            if entry.live.loads and not entry.live.computed:
                self._break("waiting", f"{entry.live.id} is admitted, finds nothing and computes nothing")
        self._admitted.clear()

    # -- bits ----------------------------------------------------------------------------------------------------

    def _in_state(self, event: Event, state: str) -> Live | None:
        live = self._live.get(event.request_id)
        if live is None or live.state != state:
            where = "is not there" if live is None else f"is {live.state}"
            self._break("states", f"{event.request_id} is {event.kind} and {where}")
            return None
        if event.kind != "computed" and event.num_known_tokens != live.known:
            told = f"{event.num_known_tokens} known tokens, {live.known} by its rows"
            self._break("rows", f"{live.id} is {event.kind} with {told}")
        return live

    def _all(self, state: str) -> list[Live]:
        return [live for live in self._live.values() if live.state == state]

    def _break(self, rule: str, told: str) -> None:
        assert rule in RULES
        self.broken[rule] += 1
        if self.broken[rule] <= self.MAX_TOLD:
            self.told.append(f"{rule}: {told}")
