"""Another process on the same card, which takes memory and gives it back when it is told to.

``python -m tonnage.bench.neighbour ORDINAL`` is that process. It opens its context at once, and says so: started before
the engine, it is one of the others that the engine's plan counts. Then it reads lines: "take N" asks the driver for N
bytes ("ok" or "refused"), "give" frees all ("ok"); it ends with its input.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Protocol

from tonnage.errors import DriverOOM, TonnageError, UserError

#: Seconds for an answer; opening a context takes some.
PATIENCE_S = 60.0
READY, OK, REFUSED = "ready", "ok", "refused"


class Card(Protocol):
    """Of a driver, what the process needs."""

    def mem_alloc(self, size: int) -> int: ...
    def mem_free(self, addr: int) -> None: ...
    def close(self) -> object: ...


def serve(card: Card, lines: Iterable[str], out: IO[str]) -> None:
    """Answer every line until there are no more."""
    held: list[int] = []
    print(READY, file=out, flush=True)
    for line in lines:
        verb, _, size = line.strip().partition(" ")
        answer = OK
        if verb == "take":
            try:
                held.append(card.mem_alloc(int(size)))
            except DriverOOM:
                answer = REFUSED
        else:
            while held:
                card.mem_free(held.pop())
        print(answer, file=out, flush=True)
    while held:
        card.mem_free(held.pop())
    card.close()


class Neighbour:
    """The process, from the caller's side; a context manager. ``num_taken`` counts, ``num_bytes`` is what it holds now.
    ``is_silent``: it has died, or did not answer in time.

    Raises ``UserError`` where it does not come up.
    """

    def __init__(
        self, ordinal: int = 0, *, command: Sequence[str] | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._patience_s = patience_s
        self._child = subprocess.Popen(
            command or [sys.executable, "-m", "tonnage.bench.neighbour", str(ordinal)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the soak, which then ends it
        )
        self.num_bytes = self.num_taken = self.most_bytes = 0
        self.is_silent = False
        if (answer := self._answer()) != READY:
            self.close()
            raise UserError(
                f"The other process of the soak cannot use the card{': ' * bool(answer)}{answer}",
                need="a second process with a context of its own on it",
                remedy="give it that (exclusive mode?), or soak with --no-neighbour",
            )

    def take(self, num_bytes: int) -> bool:
        """So many bytes more; whether it got them. One that has ended gets none."""
        has_got = self._ask(f"take {num_bytes}") == OK
        if has_got:
            self.num_bytes += num_bytes
            self.num_taken += 1
            self.most_bytes = max(self.most_bytes, self.num_bytes)
        return has_got

    def give(self) -> None:
        self._ask("give")
        self.num_bytes = 0

    def close(self) -> None:
        """Its memory goes back, its context with it; idempotent."""
        if self._child.stdin is not None and not self._child.stdin.closed:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
        try:
            self._child.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def _ask(self, line: str) -> str:
        if self.is_silent:
            return ""
        assert self._child.stdin is not None
        try:
            print(line, file=self._child.stdin, flush=True)
        except (BrokenPipeError, ValueError):
            return ""
        return self._answer()

    def _answer(self) -> str:
        """One line; "" where none comes in time or ever: then it is asked no more, since what comes late would answer
        the next question. It writes no line without being asked, so none is buffered."""
        assert self._child.stdout is not None
        line = ""
        if select.select([self._child.stdout], [], [], self._patience_s)[0]:
            line = self._child.stdout.readline().strip()
        self.is_silent = not line
        return line

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    from tonnage.device.cuda import CudaDriver

    try:
        card = CudaDriver(int(sys.argv[1]))
    except TonnageError as error:
        print(" ".join(str(error).split()), flush=True)  # for whoever asked; a traceback would be nobody's
        return
    serve(card, sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
