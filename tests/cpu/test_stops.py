"""Stop strings against a search of the whole text, for any text, any borders between tokens, any stop strings."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import byte_tokenizer

from tonnage.engine.stops import TextStream
from tonnage.engine.text import Text
from tonnage.sampling import SamplingParams


class Pieces:
    """A tokenizer whose token i is the i-th of some pieces of text."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(self.pieces[i] for i in ids)


def told_of(pieces, stop, *, include_stop=False, min_tokens=0):
    """What each token told, what the end told, and the stop string found."""
    stream = TextStream(Pieces(pieces), SamplingParams(stop=stop, include_stop=include_stop))
    told = [stream.push(i, check_stop=i + 1 >= min_tokens) for i in range(len(pieces))]
    told.append(stream.flush())
    assert stream.told == "".join(told)
    return told, stream.matched


def reference(pieces, stop, *, include_stop=False, min_tokens=0):
    """(text, stop string) by looking at every end of the whole text in turn; the token of an end is counted."""
    whole = "".join(pieces)
    token_of = [number for number, piece in enumerate(pieces, 1) for _ in piece]
    for end in range(1, len(whole) + 1):
        found = [one for one in stop if whole[:end].endswith(one)]
        if found and token_of[end - 1] >= min_tokens:
            longest = max(found, key=len)
            return whole[: end if include_stop else end - len(longest)], longest
    return whole, None


# Few letters, so that stop strings occur, overlap themselves and one another.
letters = st.text("ab", max_size=6)
stop_strings = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(st.lists(letters, max_size=12), stop_strings, st.booleans(), st.integers(0, 12))
def test_told_is_what_a_search_of_the_whole_text_gives(pieces, stop, include_stop, min_tokens):
    told, matched = told_of(pieces, stop, include_stop=include_stop, min_tokens=min_tokens)
    assert ("".join(told), matched) == reference(pieces, stop, include_stop=include_stop, min_tokens=min_tokens)


@given(letters.filter(bool), st.lists(st.integers(0, 6)), stop_strings, st.booleans())
def test_borders_between_tokens_change_nothing(text, cuts, stop, include_stop):
    cuts = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in pairwise(cuts)]
    (told, matched), (whole, whole_matched) = (told_of(p, stop, include_stop=include_stop) for p in (pieces, [text]))
    assert ("".join(told), matched) == ("".join(whole), whole_matched)


@given(st.lists(st.text("ab", min_size=1, max_size=1), max_size=30), stop_strings)
def test_no_more_is_held_back_than_must_be(pieces, stop):
    """At every token, what is not told yet is the longest end that begins a stop string, and no more."""
    stream = TextStream(Pieces(pieces), SamplingParams(stop=stop))
    beginnings = {one[:n] for one in stop for n in range(len(one))}
    for number in range(len(pieces)):
        stream.push(number)
        if stream.matched is not None:
            break
        so_far = "".join(pieces[: number + 1])
        held = max((end for end in beginnings if so_far.endswith(end)), key=len, default="")
        assert stream.told + held == so_far


CASES = {
    "alone in a token": (["x", "END", "y"], ["END"], ["x", "", "", ""], "END"),
    "over three tokens": (["xE", "N", "Dy"], ["END"], ["x", "", "", ""], "END"),
    "begun and not ended": (["xE", "N", "x"], ["END"], ["x", "", "ENx", ""], None),
    "held to the end": (["xE", "N"], ["END"], ["x", "", "EN"], None),
    "overlaps itself": (["a", "a", "a", "b"], ["aab"], ["", "", "a", "", ""], "aab"),
    "the one that ends first": (["abc", "d"], ["bcd", "bc"], ["a", "", ""], "bc"),
    "the longest of one end": (["abc"], ["c", "abc", "bc"], ["", ""], "abc"),
    "inside another": (["ab", "x"], ["abc", "b"], ["a", "", ""], "b"),
    "at once": (["END"], ["END"], ["", ""], "END"),
    "nothing asked": (["a", "b"], [], ["a", "b", ""], None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_cases(case):
    pieces, stop, told, matched = CASES[case]
    assert told_of(pieces, stop) == (told, matched)


def test_an_included_stop_string_holds_nothing_back():
    assert told_of(["xE", "N", "Dy", "z"], ["END"], include_stop=True) == (["xE", "N", "D", "", ""], "END")


@pytest.mark.parametrize(
    ("min_tokens", "told"), [(1, "x"), (2, "x-"), (3, "x--"), (4, "x---")], ids=lambda value: repr(value)
)
def test_a_stop_string_ends_no_earlier_than_min_tokens(min_tokens, told):
    """Begun before, ended in time: it counts. Ended too early: it is text."""
    assert "".join(told_of(["x--", "-", "-", "-", "-"], ["--"], min_tokens=min_tokens)[0]) == told


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer().save_pretrained(folder)
    return Text(folder)


@given(st.text("a€😀", max_size=12), st.lists(st.text("a€😀", min_size=1, max_size=3), max_size=3))
def test_characters_split_over_tokens(byte_text, text, stop):
    stream = TextStream(byte_text, SamplingParams(stop=stop))
    told = [stream.push(token) for token in byte_text.encode(text)] + [stream.flush()]
    assert ("".join(told), stream.matched) == reference([text], stop)
    assert "\ufffd" not in stream.told


def test_half_a_character_at_the_end_follows_what_was_held(byte_text):
    stream = TextStream(byte_text, SamplingParams(stop=["abc"]))
    assert [stream.push(token) for token in byte_text.encode("xab€")[:4]] == ["x", "", "", ""]
    assert stream.flush() == "ab\ufffd"
    assert stream.told == "xab\ufffd"


@pytest.mark.parametrize(("skip", "told", "matched"), [(True, "ab", None), (False, "a", "</s>")])
def test_a_special_token_that_is_skipped_is_no_text(byte_text, skip, told, matched):
    stream = TextStream(byte_text, SamplingParams(stop=["</s>"], skip_special_tokens=skip))
    a, b = byte_text.encode("ab")
    for token in (a, 257, b):
        stream.push(token)
    assert (stream.told, stream.matched) == (told, matched)
