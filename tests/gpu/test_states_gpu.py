"""Recurrent states in a card's memory: zeros in stream order, tensors over them, steps that are run again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder, Part
from tonnage.ledger import Ledger
from tonnage.resources.base import ProbeRequest
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.slots import SlotManager
from tonnage.resources.states import StateManager
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.units import GiB

pytestmark = pytest.mark.gpu

WIDTH = 4096
LAYOUT = KVLayout(
    slab_bytes=WIDTH * 8,
    order=KVOrder.BLOCK_MAJOR,
    groups=(
        KVGroup(
            name="state", kind=KVGroupKind.STATE, layers=(0,), window=None, block_tokens=0, block_bytes=WIDTH * 8,
            parts=(Part(name="sums", dtype="int64", shape=(WIDTH,), offset_bytes=0),),
        ),
    ),
)  # fmt: skip
#: So long a stream does nothing, so that the host is far ahead of it.
SLEEP_CYCLES = 100_000_000


class Model:
    """s = 31 s + token, on the execution stream; ``spoil`` is what a launch leaves behind that fails half way."""

    def __init__(self, states: StateManager, torch_stream) -> None:
        self.states, self.torch_stream = states, torch_stream
        self.view = states.tensor("state", "sums")

    def run(self, plan: StepPlan, tokens: list[list[int]], *, spoil: bool = False) -> None:
        import torch

        slots = self.states.slots(plan)
        with torch.cuda.stream(self.torch_stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            for row, (read, write) in enumerate(zip(slots.reads.tolist(), slots.writes.tolist(), strict=True)):
                if spoil:
                    self.view[write].fill_(-1)
                    continue
                state = self.view[read].clone()
                for token in tokens[row]:
                    state = 31 * state + token
                self.view[write].copy_(state)

    def at(self, slot: int) -> int:
        import torch

        torch.cuda.synchronize()
        values = self.view[slot].unique()
        assert values.numel() == 1
        return int(values)


def reference(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = 31 * state + token
    return state


@pytest.fixture
def model() -> Iterator[tuple[Dispatcher, Model]]:
    import torch

    from tonnage.device.cuda import CudaDriver

    torch.cuda.init()
    torch_stream = torch.cuda.Stream()
    stream = Stream(Device(CudaDriver(0)), torch_stream.cuda_stream)
    buffers = BufferManager(stream, ledger=Ledger(0, 140 * GiB, host_is_device=False), owner="states")
    slots = SlotManager(2)
    states = StateManager(slots, LAYOUT, buffers=buffers)
    made = Model(states, torch_stream)
    yield Dispatcher([slots, states]), made
    torch.cuda.synchronize()
    made.view = None
    states.close()


def plan_of(number: int, *rows: tuple[str, int, int]) -> StepPlan:
    return StepPlan.of(number, [StepItem(request_id=name, start=at, count=n, samples=False) for name, at, n in rows])


def admit(dispatcher: Dispatcher, name: str) -> None:
    dispatcher.admit(ProbeRequest(id=name, num_prompt_tokens=4, max_total_tokens=8))


def test_steps_that_fail_run_again_and_a_new_sequence_starts_from_zeros(model):
    dispatcher, card = model
    admit(dispatcher, "a")
    admit(dispatcher, "b")
    first = plan_of(0, ("a", 0, 2), ("b", 0, 3))
    for spoil in (True, False):  # the first launch spoils what it writes and is taken back
        txn = Txn()
        dispatcher.prepare(first, txn)
        card.run(first, [[3, 5], [7, 7, 1]], spoil=spoil)
        if spoil:
            txn.rollback()
    txn.commit()
    # A step ahead: prepared and launched while the one before it sleeps on the stream.
    second, txn = plan_of(1, ("a", 2, 1), ("b", 3, 1)), Txn()
    dispatcher.prepare(second, txn)
    card.run(second, [[9], [4]])
    txn.commit()
    writes = card.states.slots(second).writes.tolist()
    dispatcher.update(first, None)
    dispatcher.update(second, None)
    assert [card.at(slot) for slot in writes] == [reference([3, 5, 9]), reference([7, 7, 1, 4])]
    # Its seat goes to another while its kernels may still run: zeros come after them.
    third, txn = plan_of(2, ("a", 3, 1)), Txn()
    dispatcher.prepare(third, txn)
    card.run(third, [[2]])
    txn.commit()
    dispatcher.free("a")
    admit(dispatcher, "c")
    fourth, txn = plan_of(3, ("c", 0, 1)), Txn()
    dispatcher.prepare(fourth, txn)
    card.run(fourth, [[6]])
    txn.commit()
    assert card.at(int(card.states.slots(fourth).writes[0])) == reference([6])
