"""Tokens to text, one at a time, for the ways in which tokenizers spell text: bytes, words with their space, both."""

from __future__ import annotations

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


def test_the_cost_of_a_token_does_not_grow_with_the_text(byte_text, monkeypatch):
    longest = 0
    decode = Text.decode

    def counted(self, ids, **how):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, **how)

    monkeypatch.setattr(Text, "decode", counted)
    assert "".join(pieces(byte_text, ids_of(byte_text, "x" * 500))) == "x" * 500
    assert longest <= 4


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
