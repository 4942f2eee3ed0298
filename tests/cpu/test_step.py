"""A transaction undoes newest first, whatever happens on the way; a step plan adds up its rows."""

from __future__ import annotations

import pytest

from tonnage.step import StepItem, StepPlan, Txn, Veto


def test_rollback_runs_newest_first_and_once():
    told: list[int] = []
    txn = Txn()
    for number in range(3):
        txn.undo(lambda number=number: told.append(number))
    txn.rollback()
    txn.rollback()
    assert told == [2, 1, 0]
    assert not txn.is_open


def test_commit_forgets_the_undo_list():
    told: list[int] = []
    txn = Txn()
    txn.undo(lambda: told.append(1))
    txn.commit()
    txn.rollback()
    assert told == []


def test_an_undo_that_raises_does_not_stop_the_others():
    told: list[str] = []

    def fail(text: str) -> None:
        raise RuntimeError(text)

    txn = Txn()
    txn.undo(lambda: told.append("oldest"))
    txn.undo(lambda: fail("second"))
    txn.undo(lambda: told.append("middle"))
    txn.undo(lambda: fail("first"))
    with pytest.raises(RuntimeError, match="first"):
        txn.rollback()
    assert told == ["middle", "oldest"]


@pytest.mark.parametrize("end", [Txn.commit, Txn.rollback], ids=["committed", "rolled back"])
def test_a_closed_transaction_takes_no_more(end):
    txn = Txn()
    end(txn)
    with pytest.raises(AssertionError):
        txn.undo(lambda: None)
    with pytest.raises(AssertionError):
        txn.commit()


def test_a_veto_names_its_manager():
    assert str(Veto("kv", "no pages")) == "kv: no pages"


def test_the_shape_of_a_mixed_step():
    plan = StepPlan.of(
        7,
        (
            StepItem(request_id="new", start=0, count=5, samples=False),
            StepItem(request_id="chunk", start=8, count=4, samples=True),
            StepItem(request_id="decode", start=30, count=1, samples=True),
            StepItem(request_id="one token prompt", start=0, count=1, samples=True),
        ),
    )
    shape = plan.shape
    assert (shape.num_tokens, shape.prefill_tokens, shape.prefill_rows, shape.decode_rows) == (11, 10, 3, 1)
    assert (shape.attended_tokens, shape.max_row_tokens, shape.logits_rows) == (5 + 12 + 31 + 1, 31, 3)


def test_the_shape_of_an_empty_step():
    assert StepPlan.of(0, ()).shape.max_row_tokens == 0
