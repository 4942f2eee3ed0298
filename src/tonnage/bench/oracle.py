"""An independent judge of an engine: it recomputes from the log alone what may and what must have happened.

It reads the engine's events and the caller's own acts in the order in which they happened, and shares no code with
scheduler or managers: what it knows of the rules stands here. ``RULES`` names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tonnage.engine.events import Event

RULES = {
    "refusals": "refused are those that could never fit or make no sense, no others",
    "states": "who waits is admitted, who runs is computed or suspended",
    "rows": "a row goes on exactly where its request stood, once a step",
    "tokens": "no step computes more tokens, or longer chunks, than its limits",
    "sequences": "no more requests run at once than the limit",
    "blocks": "running requests never hold more KV blocks than the pool has",
    "order": "nobody is admitted past an older one of no lower priority",
    "starvation": "the oldest that waits is passed a bounded number of times",
    "suspension": "the oldest that runs is never suspended; nobody is under reserve_all",
    "idleness": "no step leaves out whom it had tokens, sequences and blocks for",
    "endings": "who was accepted ends once, at its length or with a reason",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the engine. None: no bound of its own. ``malformed``: ids of requests that make no sense.

    max_chunk_tokens          of one row of prefill
    max_beside_decode_tokens  of all prefill in a step that also decodes
    cuts_prompts              False: a prompt is computed in one step
    """

    num_blocks: int
    block_tokens: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_chunk_tokens: int | None = None
    max_beside_decode_tokens: int | None = None
    cuts_prompts: bool = True
    max_overtaken: int
    may_suspend: bool = True
    malformed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Act:
    """What the caller did, right before it did it: ``step``, or ``cancel`` of a request."""

    kind: Literal["step", "cancel"]
    request_id: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class _Live:
    """A request between arrival and end. ``state`` "left": cancelled, holds nothing, its end is still to be told."""

    id: str
    prompt: int
    most: int
    priority: int
    order: int
    known: int
    since: int
    computed: int = 0
    passed: int = 0
    state: Literal["waiting", "running", "left"] = "waiting"

    @property
    def decodes(self) -> bool:
        return self.computed > 0 and self.known - self.computed == 1

    @property
    def written(self) -> int:
        """Tokens that need KV entries in its whole life: the last one is sampled and never fed back."""
        return max(self.prompt, self.prompt + self.most - 1)


class Oracle:
    """``read`` every entry, then ``close``. ``broken`` counts violations by rule; ``told`` describes the first few."""

    MAX_TOLD = 5

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.broken: Counter[str] = Counter()
        self.told: list[str] = []
        self.counts: Counter[str] = Counter()
        self.longest_wait_steps = 0
        self.most_overtaken = 0
        self._live: dict[str, _Live] = {}
        self._step = 0
        self._rows: dict[str, tuple[_Live, int, bool]] = {}  # of the step being read: whose, tokens, is it a decode
        self._admitted: list[tuple[_Live, _Live | None]] = []  # since the last step: who, and whom that passed over
        self._was_retried = False
        self._must_move = self._has_moved = False

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
        self._live[event.request_id] = _Live(
            id=event.request_id, prompt=event.num_prompt_tokens, most=event.max_tokens, priority=event.priority,
            order=self.counts["arrived"], known=event.num_prompt_tokens, since=event.step,
        )  # fmt: skip

    def _on_refused(self, event: Event) -> None:
        if self._could_run(event):
            self._break("refusals", f"{event.request_id} is refused and could run")

    def _could_run(self, event: Event) -> bool:
        prompt, most, limits = event.num_prompt_tokens, event.max_tokens, self.limits
        return (
            event.request_id not in limits.malformed
            and prompt >= 1
            and most >= 1
            and prompt + most <= limits.max_seq_len
            and self._blocks(max(prompt, prompt + most - 1)) <= limits.num_blocks
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
        self._admitted.append((live, passed))
        self.longest_wait_steps = max(self.longest_wait_steps, event.step - live.since)
        live.state, live.computed = "running", 0
        if len(self._all("running")) > self.limits.max_batch_size:
            self._break("sequences", f"{live.id} runs beside {self.limits.max_batch_size} others")

    def _on_suspended(self, event: Event) -> None:
        live = self._in_state(event, "running")
        if live is None:
            return
        if not self.limits.may_suspend:
            self._break("suspension", f"{live.id} is suspended where lives are reserved")
        if live is min(self._all("running"), key=lambda other: other.order):
            self._break("suspension", f"{live.id} is suspended and is the oldest that runs")
        live.state, live.computed, live.since = "waiting", 0, event.step

    def _on_cancel(self, act: Act) -> None:
        if act.request_id in self._live:
            self._live[act.request_id].state = "left"

    def _on_ended(self, event: Event) -> None:
        live, name, finish = self._live.pop(event.request_id, None), event.request_id, str(event.finish)
        self._has_moved = True
        if live is None:
            self._break("endings", f"{name} ends and is not there")
            return
        generated = event.num_known_tokens - live.prompt
        # A row whose logits were no numbers is computed and gives no token.
        if event.num_known_tokens != live.known and (finish, event.num_known_tokens) != ("error", live.known - 1):
            self._break("rows", f"{name} ends with {event.num_known_tokens} tokens, {live.known} by its rows")
        if finish in ("stop", "length") and live.state == "waiting":
            self._break("states", f"{name} finishes while it waits")
        if finish == "length" and generated != live.most:
            self._break("endings", f"{name} ends at its length with {generated} of {live.most} tokens")
        if finish == "stop" and not 1 <= generated <= live.most:
            self._break("endings", f"{name} stops with {generated} of {live.most} tokens")
        if finish == "cancelled" and live.state != "left":
            self._break("endings", f"{name} is cancelled and nobody asked for it")
        if finish not in ("stop", "length", "cancelled", "error"):
            self._break("endings", f"{name} ends without a reason ({finish})")

    # -- steps ---------------------------------------------------------------------------------------------------

    def _on_step(self, _: Act) -> None:
        if self._must_move and not self._has_moved:
            self._break("idleness", f"a step moves nothing while {len(self._live)} requests are there")
        self._must_move = any(live.state != "left" for live in self._live.values())
        self._has_moved = False
        self._admitted.clear()

    def _on_retried(self, _: Event) -> None:
        """The step was rolled back: admissions are undone, suspensions stay, and the next try is a smaller one."""
        for live, passed in self._admitted:
            live.state = "waiting"
            if passed is not None:
                passed.passed -= 1
        self._admitted.clear()
        self._was_retried = self._has_moved = True

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
        self._rows[live.id] = (live, event.count, live.decodes)
        live.computed = end
        live.known += end == live.known  # the row reaches its last known token, so it samples the next

    def _end_step(self) -> None:
        """The rows of one step are complete, and nothing has happened since."""
        if not self._rows:
            return
        limits, running, rows = self.limits, self._all("running"), self._rows.values()
        num_tokens = sum(count for _, count, _ in rows)
        num_decodes = sum(is_decode for _, _, is_decode in rows)
        prefill = num_tokens - num_decodes
        longest = max((count for _, count, is_decode in rows if not is_decode), default=0)
        beside = limits.max_beside_decode_tokens if num_decodes else None
        if num_tokens > limits.max_num_tokens or (beside is not None and prefill > beside):
            self._break("tokens", f"step {self._step} decodes {num_decodes} and prefills {prefill} tokens")
        if limits.max_chunk_tokens is not None and longest > limits.max_chunk_tokens:
            self._break("tokens", f"step {self._step} has a chunk of {longest} tokens")
        if len(rows) > limits.max_batch_size:
            self._break("sequences", f"step {self._step} has {len(rows)} rows")
        if (held := sum(self._blocks(live.computed) for live in running)) > limits.num_blocks:
            self._break("blocks", f"step {self._step} holds {held} blocks of {limits.num_blocks}")
        if not self._was_retried:
            room = limits.max_num_tokens - num_tokens
            self._check_idle(running, room, room if beside is None else min(room, beside - prefill))
        self._was_retried = False
        self._admitted.clear()
        self._rows = {}

    def _check_idle(self, running: list[_Live], room: int, prefill_room: int) -> None:
        """With tokens to spare: was a running request left out, or the head of the queue that surely had its blocks?

        Whoever's turn it is, it is the oldest or the first by priority and age; only if both surely fit, none may wait.
        """
        left_out = [live for live in running if live.id not in self._rows]
        if room > 0 and any(live.decodes for live in left_out):
            self._break("idleness", f"step {self._step} leaves a decode out and has {room} tokens to spare")
        prefills = [live for live in left_out if not live.decodes]
        if prefills and all(self._has_tokens(live, prefill_room) for live in prefills):
            self._break("idleness", f"step {self._step} leaves {prefills[0].id} out, {prefill_room} tokens to spare")
        waiting = self._all("waiting")
        if not waiting or prefills or len(running) >= self.limits.max_batch_size:
            return
        reserved = sum(self._blocks(live.written) for live in running)
        heads = (
            min(waiting, key=lambda live: live.order),
            min(waiting, key=lambda live: (-live.priority, live.order)),
        )
        if all(
            reserved + self._blocks(head.written) <= self.limits.num_blocks and self._has_tokens(head, prefill_room)
            for head in heads
        ):
            self._break("idleness", f"step {self._step} lets {heads[1].id} wait, which surely fits")

    def _has_tokens(self, live: _Live, room: int) -> bool:
        """A whole block always holds a chunk that ends on a border."""
        return room >= (self.limits.block_tokens if self.limits.cuts_prompts else live.known - live.computed)

    # -- bits ----------------------------------------------------------------------------------------------------

    def _in_state(self, event: Event, state: str) -> _Live | None:
        live = self._live.get(event.request_id)
        if live is None or live.state != state:
            where = "is not there" if live is None else f"is {live.state}"
            self._break("states", f"{event.request_id} is {event.kind} and {where}")
            return None
        if event.kind != "computed" and event.num_known_tokens != live.known:
            told = f"{event.num_known_tokens} known tokens, {live.known} by its rows"
            self._break("rows", f"{live.id} is {event.kind} with {told}")
        return live

    def _all(self, state: str) -> list[_Live]:
        return [live for live in self._live.values() if live.state == state]

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_tokens)

    def _break(self, rule: str, told: str) -> None:
        assert rule in RULES
        self.broken[rule] += 1
        if self.broken[rule] <= self.MAX_TOLD:
            self.told.append(f"{rule}: {told}")
