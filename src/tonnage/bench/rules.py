"""What the oracle goes by: its rules, the bounds of the engine, and what the caller did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tonnage.bench.texts import Text

RULES = {
    "refusals": "refused are those that could never fit or make no sense, no others",
    "states": "who waits is admitted, who runs is computed or suspended",
    "rows": "a row goes on exactly where its request stood, once a step",
    "reuse": "what is found cached was computed before for the same salt; what runs is found",
    "tokens": "no step computes more tokens, or longer chunks, than its limits",
    "sequences": "no more requests run at once than the limit",
    "blocks": "running requests never hold more KV blocks than the pool has",
    "order": "nobody is admitted past an older one of no lower priority",
    "starvation": "the oldest that waits is passed a bounded number of times",
    "suspension": "the oldest that runs is never suspended; nobody is under reserve_all",
    "idleness": "no step leaves out whom it had tokens, sequences and blocks for",
    "waiting": "loads end; who waits for a neighbour's tokens waits only while it moves",
    "endings": "who was accepted ends once, at its length or with a reason",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the engine. None: no bound of its own. ``malformed``: ids of requests that make no sense.

    max_chunk_tokens          of one row of prefill
    max_beside_decode_tokens  of all prefill in a step that also decodes
    cuts_prompts              False: a prompt is computed in one step
    shares                    requests may begin with what others have computed
    windows                   of each group of layers the tokens that they see, None: all; every group has blocks of
                              its own, and the ones with a window keep what it touches and what is not computed yet
    max_load_steps            for which somebody may be admitted and load, though the steps had room for its tokens
    is_link_slow              the copies of a step are bounded: but for its first chunk, none is sure to fit
    steps_ahead               that are launched when an earlier one has not been looked at: so many tokens may be
                              drawn for a request and not be told, since it has ended or left
    careful_steps             after one that ran out of memory, which are smaller than they might be
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
    shares: bool = False
    windows: tuple[int | None, ...] = (None,)
    max_load_steps: int = 1000
    is_link_slow: bool = False
    steps_ahead: int = 0
    careful_steps: int = 32
    malformed: set[str] = field(default_factory=set)

    @property
    def keeps_all(self) -> bool:
        """No layer forgets, so what a running request has computed can be found whole."""
        return all(window is None for window in self.windows)

    def most_blocks(self, num_tokens: int) -> int:
        """In all groups, of one sequence of so many tokens at whatever moment."""
        return sum(self._most(num_tokens, window) for window in self.windows)

    def _most(self, num_tokens: int, window: int | None) -> int:
        blocks = -(-num_tokens // self.block_tokens)
        if window is None:
            return blocks
        # Where it begins in the middle of a block, one block more.
        touched = window - 1 + (1 + self.steps_ahead) * self.max_num_tokens
        return min(blocks, -(-touched // self.block_tokens) + 1)


@dataclass(frozen=True, slots=True)
class Act:
    """What the caller did, or made happen, right before it did.

    ask     of a request, whose ``text`` is told, once for each request
    step    one step more; cancel, pin, unpin: of a request
    sleep   the engine is sent to sleep, wake: it is woken
    fault   a copy of blocks fails; whoever loads may have to do without
    """

    kind: Literal["ask", "step", "cancel", "pin", "unpin", "fault", "sleep", "wake"]
    request_id: str = ""
    text: Text | None = None
