"""Tokens to text, one at a time, for the ways in which tokenizers spell text: bytes, words with their space, both."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import byte_tokenizer

from tonnage.engine.text import Detokenizer, Text
from tonnage.errors import ModelConfigError

LOST = "\ufffd"
WORDS = ["▁", "▁▁", "a", "▁a", "b", "▁and", "▁the", "é", "▁€"]


def falling_back_tokenizer():
    """In the manner of Llama 2: pieces that carry their space, single bytes for the rest, one leading space cut off."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    vocabulary |= {f"<0x{byte:02X}>": len(WORDS) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory):
    """Ids 0-255 stand for one byte each, 256 and 257 are special, beyond them is nothing."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer().save_pretrained(folder)
    return Text(folder)


@pytest.fixture(scope="module")
def word_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    falling_back_tokenizer().save_pretrained(folder)
    return Text(folder)


def ids_of(text, told):
    """Ids of the bytes of ``told``, one each."""
    vocabulary = text.tokenizer.get_vocab()
    return [vocabulary[f"<0x{byte:02X}>"] for byte in told.encode()] if "<0x00>" in vocabulary else text.encode(told)


@cache
def byte_id(text, byte):
    """Of any byte, text or not: by its name, or in the alphabet of GPT-2, where unprintable ones stand from U+0100."""
    vocabulary = text.tokenizer.get_vocab()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    symbol = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return vocabulary[f"<0x{byte:02X}>"] if "<0x00>" in vocabulary else vocabulary[symbol]


@pytest.mark.parametrize("kind", ["byte_text", "word_text"])
def test_ids_of_bytes_are_those_of_text(request, kind):
    text, told = request.getfixturevalue(kind), "x\n é€😀ÿ\u00ad\x7f"
    assert [byte_id(text, byte) for byte in told.encode()] == ids_of(text, told)


def pieces(text, ids, **how):
    detokenizer = Detokenizer(text, **how)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 299), max_size=60), st.booleans())
def test_pieces_joined_are_the_text_for_any_bytes(byte_text, ids, skip):
    assert "".join(pieces(byte_text, ids, skip_special_tokens=skip)) == byte_text.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=40))
def test_a_character_comes_whole_with_its_last_byte(byte_text, told):
    detokenizer = Detokenizer(byte_text)
    for character in told:
        *first, last = byte_text.encode(character)
        assert [detokenizer.push(token) for token in first] == [""] * len(first)
        # U+FFFD itself looks like a broken character until the next one comes.
        if character == LOST:
            assert detokenizer.push(last) + detokenizer.flush() == LOST
        else:
            assert detokenizer.push(last) == character
    assert detokenizer.flush() == ""


@given(st.lists(st.sampled_from([*WORDS, "€", "😀", "👩‍🚒", "\n"]), max_size=40))
def test_spaces_and_bytes_come_as_in_the_whole_text(word_text, spelled):
    vocabulary = word_text.tokenizer.get_vocab()
    ids = []
    for word in spelled:
        ids += [vocabulary[word]] if word in vocabulary else ids_of(word_text, word)
    told = pieces(word_text, ids)
    assert "".join(told) == word_text.decode(ids)
    assert not any(LOST in piece for piece in told)


def test_a_spoiled_run_of_bytes_takes_nothing_back(word_text):
    """All or nothing: this tokenizer decodes the character and the lonely byte behind it as five broken ones."""
    *emoji, lonely = ids_of(word_text, "😀") + ids_of(word_text, "€")[:1]
    a = word_text.tokenizer.get_vocab()["a"]
    assert word_text.decode([*emoji, lonely]) == LOST * 5
    assert pieces(word_text, [*emoji, lonely, a, a]) == ["", "", "", "😀", "", LOST + "a", "a", ""]


@pytest.mark.parametrize("kind", ["byte_text", "word_text"])
def test_bytes_that_are_no_text_are_told_in_time(request, kind):
    """A run of them never ends; three may still become a character, the ones before cannot."""
    text = request.getfixturevalue(kind)
    (first, *_), (a,) = ids_of(text, "€"), ids_of(text, "a")
    detokenizer = Detokenizer(text)
    assert [detokenizer.push(first) for _ in range(6)] == ["", "", "", LOST, LOST, LOST]
    assert (detokenizer.push(a) + detokenizer.flush()).startswith(LOST * 3)


def test_half_a_character_is_told_at_the_end(byte_text):
    detokenizer = Detokenizer(byte_text)
    assert detokenizer.push(ids_of(byte_text, "€")[0]) == ""
    assert detokenizer.flush() == LOST
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(("skip", "told"), [(True, ["a", "", "b", ""]), (False, ["a", "</s>", "b", ""])])
def test_special_tokens_are_left_out_where_asked(byte_text, skip, told):
    a, b = ids_of(byte_text, "ab")
    assert pieces(byte_text, [a, 257, b], skip_special_tokens=skip) == told


# -- text that does not come -------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are several bytes each, over the borders of characters; Python decodes them."""

    PIECES = (b"a", b" \xf0\x9f", b"\x98\x80", b"\xe2", b"\x82", b"\xac\xe2", b"\x82\xac", b"\xf0\x90\x80", b"\xff\xc3",
              b"\xa9\xc3\xa9", b"\x80\x80\x80\x80", b"\xef\xbf\xbd", b"")  # fmt: skip

    def decode(self, ids, *, skip_special_tokens=True):
        return b"".join(self.PIECES[i] for i in ids).decode("utf-8", "replace")


#: Lead bytes, the bytes that go on from them and bytes that are never text, and line breaks.
BROKEN = [0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xFF, 0x0A]


@given(st.lists(st.sampled_from([*BROKEN, ord("a"), None]), min_size=30, max_size=150))
def test_long_runs_of_broken_bytes_are_told_as_the_whole_text(byte_text, run):
    """None is a special token, skipped."""
    ids = [257 if byte is None else byte_id(byte_text, byte) for byte in run]
    assert "".join(pieces(byte_text, ids)) == byte_text.decode(ids)


@given(st.lists(st.integers(0, len(Bytes.PIECES) - 1), min_size=30, max_size=150))
def test_tokens_that_end_in_the_middle_of_characters_are_told_as_the_whole_text(ids):
    assert "".join(pieces(Bytes(), ids)) == Bytes().decode(ids)


@given(
    st.sampled_from([[0xFF], [0x80], [0xE2, 0x0A], [0xF0, 0x9F, 0xFF]]),
    st.lists(st.sampled_from([*BROKEN, None]), min_size=30, max_size=100),
    st.sampled_from(["", "😀€"]),
)
def test_a_run_of_bytes_that_began_spoiled_stays_so(word_text, spoiler, run, end):
    """All or nothing, however long: nothing of it has been told as a character."""
    a, special = (word_text.tokenizer.get_vocab()[word] for word in ("▁a", "</s>"))
    told = [special if byte is None else byte_id(word_text, byte) for byte in [*spoiler, *run, *end.encode()]]
    ids = [a, *told, a, *ids_of(word_text, "€")]
    assert "".join(pieces(word_text, ids)) == word_text.decode(ids)


@pytest.mark.parametrize("num_first", [1, 2, 3])
def test_a_spoiled_run_is_not_mended_by_what_is_forgotten(word_text, num_first):
    """A character begins it and, much later, goes on; all else but what stands between is text."""
    emoji = "😀".encode()
    for num_between in range(1, 30):
        for num_after in range(4, 10):
            run = emoji[:num_first] + b"\xff" * num_between + emoji[num_first:] + b"\n" * num_after + emoji
            ids = [byte_id(word_text, byte) for byte in run]
            assert "".join(pieces(word_text, ids)) == word_text.decode(ids)


@given(st.lists(st.sampled_from(["▁", "▁▁", "▁a", "</s>"]), max_size=40))
def test_spaces_alone_and_skipped_tokens_are_told_as_in_the_whole_text(word_text, words):
    ids = [word_text.tokenizer.get_vocab()[word] for word in words]
    assert "".join(pieces(word_text, ids)) == word_text.decode(ids)


class Counted:
    """Counts the tokens decoded."""

    def __init__(self, text):
        self.text, self.num_tokens = text, 0

    def decode(self, ids, **how):
        self.num_tokens += len(ids)
        return self.text.decode(ids, **how)


#: Tokenizer; tokens at first; tokens that come again and again: bytes, or by name.
ENDLESS = {
    "letters": ("byte_text", [], b"x"),
    "skipped tokens": ("byte_text", [], ["</s>"]),
    "skipped tokens inside a character": ("byte_text", b"\xe2", ["</s>"]),
    "lead bytes": ("byte_text", b"a", b"\xe2"),
    "bytes that go on from nothing": ("byte_text", b"", b"\x80"),
    "halves of characters": ("byte_text", b"", b"\xf0\x9f\x98"),
    "replacement characters": ("byte_text", b"", LOST.encode()),
    "lead bytes, falling back": ("word_text", b"", b"\xe2"),
    "characters in a spoiled run": ("word_text", b"\xff", "€\n".encode()),
    "skipped tokens, falling back": ("word_text", ["▁"], ["</s>"]),
    "spaces alone": ("word_text", ["a"], ["▁"]),
}  # fmt: skip


def cost_of_tokens(text, ids):
    """Tokens decoded at each push; what was told is what the whole reads."""
    counted, costs, told = Counted(text), [], ""
    detokenizer = Detokenizer(counted)
    for token in ids:
        before = counted.num_tokens
        told += detokenizer.push(token)
        costs.append(counted.num_tokens - before)
    assert told + detokenizer.flush() == text.decode(ids)
    return costs


@pytest.mark.parametrize("case", ENDLESS)
def test_the_cost_of_a_token_does_not_grow(request, case):
    kind, *parts = ENDLESS[case]
    text = request.getfixturevalue(kind)
    first, again = ([byte_id(text, one) if isinstance(one, int) else text.tokenizer.get_vocab()[one] for one in part]
                    for part in parts)  # fmt: skip
    costs = cost_of_tokens(text, first + again * (600 // len(again)))
    assert max(costs[100:]) <= max(costs[:100]) <= (3 if case == "letters" else 100)


def test_nor_does_it_where_no_token_ends_with_a_character():
    e2, x82, xac_e2 = (Bytes.PIECES.index(piece) for piece in (b"\xe2", b"\x82", b"\xac\xe2"))
    costs = cost_of_tokens(Bytes(), [e2, x82, *[xac_e2, x82] * 300])
    assert max(costs[100:]) <= max(costs[:100]) <= 100


def test_a_folder_without_tokenizer_is_told(tmp_path):
    with pytest.raises(ModelConfigError, match=r"tokenizer\.json"):
        Text(tmp_path)


@pytest.mark.model
def test_a_real_vocabulary_of_byte_pieces():
    from tonnage.engine.models import model_folder

    text = Text(model_folder("smollm2"))
    vocabulary = len(text.tokenizer)

    @given(st.lists(st.integers(0, vocabulary - 1), max_size=30), st.booleans())
    def any_tokens(ids, skip):
        assert "".join(pieces(text, ids, skip_special_tokens=skip)) == text.decode(ids, skip_special_tokens=skip)

    any_tokens()
    spoken = "Le café — 你好, 🧑🏽‍🚀 and 🏳️‍🌈 at 3 €"
    told = pieces(text, text.encode(spoken))
    assert "".join(told) == spoken
    assert not any(LOST in piece for piece in told)


def test_half_a_surrogate_pair_is_refused_and_told(tiny_llama):
    from tonnage.engine.text import Text
    from tonnage.errors import InputError

    text = Text(tiny_llama)
    with pytest.raises(InputError, match="character 4 is half of a pair"):
        text.encode("ok \ud83d")
    with pytest.raises(InputError, match="no valid Unicode"):
        text.encode_chat([{"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "Llama 3.1 8B Instruct"])
def test_a_built_in_shape_has_no_weights_to_run(name):
    from tonnage.engine.models import model_folder
    from tonnage.errors import ModelNotFound

    with pytest.raises(ModelNotFound, match=r"a built-in shape, for plans alone.*give the folder"):
        model_folder(name)
