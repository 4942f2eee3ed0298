"""Extra inputs of captured steps: what is written where, what is refused, and that nothing ever moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import GraphInputError, InvalidSetting
from tonnage.graphs.extra_inputs import ExtraInput, ExtraInputs

CPU = torch.device("cpu")
SLOTS = ExtraInput(name="slots", padding=-1)
SCALES = ExtraInput(name="scales", dtype=torch.float32, row_shape=(3, 2), padding=0.5)


def made(max_rows: int = 8) -> ExtraInputs:
    return ExtraInputs([SLOTS, SCALES], max_rows=max_rows, device=CPU)


def values(num_rows: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "slots": random.integers(0, 100, num_rows),
        "scales": random.random((num_rows, 3, 2)).astype(np.float32),
    }


def test_made_once_at_the_largest_and_all_padding():
    extra = made()
    assert extra.num_bytes == 8 * 8 + 8 * 6 * 4
    assert extra.tensors["slots"].tolist() == [-1] * 8
    assert extra.tensors["scales"].unique().tolist() == [0.5]
    views = extra.views(5)
    assert {name: tuple(view.shape) for name, view in views.items()} == {"slots": (5,), "scales": (5, 3, 2)}
    assert all(view.data_ptr() == extra.tensors[name].data_ptr() for name, view in views.items())


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_a_graph_sees_this_step_and_padding_and_nothing_older(steps):
    """Invariant 39: addresses stay, and of what the graph reads each row is this step's or padding."""
    extra = made()
    places = {name: tensor.data_ptr() for name, tensor in extra.tensors.items()}
    for number, (size, rows) in enumerate(steps):
        num_rows, given_ = min(size, rows), values(min(size, rows), seed=number)
        kept = {name: value.copy() for name, value in given_.items()}
        extra.load(given_, num_rows=num_rows, size=size)
        for name, padding in (("slots", -1), ("scales", 0.5)):
            seen = extra.views(size)[name].numpy()
            assert (seen[:num_rows] == given_[name]).all()
            assert (seen[num_rows:] == padding).all()
            assert (given_[name] == kept[name]).all(), "what was given is not written to"
        assert {name: tensor.data_ptr() for name, tensor in extra.tensors.items()} == places


def test_a_step_without_a_graph_gets_its_own_tensors():
    extra, given_ = made(), values(7)
    found = extra.eager(given_, num_rows=7)
    assert (found["scales"].numpy() == given_["scales"]).all()
    assert extra.tensors["slots"].tolist() == [-1] * 8, "the graphs' own were left alone"


def test_arrays_that_torch_would_not_take_as_they_are():
    extra, slots = made(), np.arange(8)[::-2]
    scales = np.broadcast_to(np.float32(2), (4, 3, 2))
    extra.load({"slots": slots, "scales": scales}, num_rows=4, size=4)
    assert extra.views(4)["slots"].tolist() == [7, 5, 3, 1]
    assert extra.views(4)["scales"].unique().tolist() == [2.0]


def test_values_that_are_tensors():
    extra = made()
    given_ = {name: torch.from_numpy(value) for name, value in values(2).items()}
    extra.load(given_, num_rows=2, size=4)
    assert torch.equal(extra.views(2)["scales"], given_["scales"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"slots": None}, "slots is missing"),
        ({"more": np.zeros(3)}, "more was not declared"),
        ({"slots": np.zeros(2, np.int64)}, r"slots: \[2\] of torch.int64, and the step takes \[3\]"),
        ({"slots": np.zeros(3, np.int32)}, "slots: .* of torch.int32, and the step takes .* of torch.int64"),
        ({"scales": np.zeros((3, 6), np.float32)}, r"takes \[3, 3, 2\]"),
    ],
    ids=str,
)
def test_what_was_not_declared_is_refused_before_anything_is_written(change, told):
    extra = made()
    given_ = {name: value for name, value in (values(3) | change).items() if value is not None}
    for take in (lambda: extra.load(given_, num_rows=3, size=4), lambda: extra.eager(given_, num_rows=3)):
        with pytest.raises(GraphInputError, match=told):
            take()
    assert extra.tensors["slots"].tolist() == [-1] * 8
    assert extra.tensors["scales"].unique().tolist() == [0.5]


def test_a_tensor_cannot_be_replaced_unseen():
    extra = made()
    with pytest.raises(TypeError):
        extra.tensors["slots"] = torch.zeros(8, dtype=torch.int64)
    extra.tensors["slots"].data = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(GraphInputError, match="slots: its tensor was replaced"):
        extra.load(values(3), num_rows=3, size=4)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: ExtraInput(name="input_ids"),
        lambda: ExtraInput(name="two words"),
        lambda: ExtraInput(name="x", row_shape=(3, 0)),
        lambda: ExtraInputs([SLOTS, SLOTS], max_rows=4, device=CPU),
    ],
)
def test_declarations_that_mean_nothing(declare):
    with pytest.raises(InvalidSetting, match="extra input"):
        declare()


def test_none_is_fine():
    extra = ExtraInputs([], max_rows=4, device=CPU)
    extra.load({}, num_rows=2, size=4)
    assert extra.views(4) == extra.eager({}, num_rows=2) == {}
