import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraw.errors import TemplateError, UsageError
from truedraw.runners.toy import ByteTokenizer
from truedraw.text.chat import render_chat
from truedraw.text.stream import TextStream


def run(pieces, stops=(), stop_after=0):
    """Feed pieces one token each. Returns (text, tokens released, pieces of text as they came)."""
    stream = TextStream(lambda token: pieces[token], stops, stop_after)
    chunks = []
    for token in range(len(pieces)):
        if stream.feed(token):
            break
        chunks.append(stream.take())
    stream.finish()
    chunks.append(stream.take())
    return "".join(chunks), stream.num_released, chunks


# ---------------------------------------------------------------- characters


@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "é\N{GRINNING FACE}x", "A世ab", "ok", "x" * 25])
def test_characters_split_over_tokens_come_out_whole_and_once(text):  # B73, B74
    pieces = [bytes([byte]) for byte in text.encode()]
    got, released, chunks = run(pieces)
    assert got == text and released == len(pieces)
    assert all("\ufffd" not in chunk for chunk in chunks)


def test_an_unfinished_character_is_replaced_once_at_the_end():  # B74
    assert run([b"a", b"\xf0", b"\x9f", b"\x98"])[0] == "a\ufffd"
    assert run([b"C\xc3", b"\xa9\xf0"])[0] == "Cé\ufffd"


def test_bytes_that_are_no_utf8_are_replaced_in_place():
    assert run([b"a", b"\xff", b"b"])[0] == "a\ufffdb"


@given(st.binary(max_size=24), st.lists(st.integers(0, 24), max_size=6))
def test_chunks_join_to_the_decoded_bytes(data, cuts):
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert run(pieces)[0] == data.decode("utf-8", "replace")


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "released"),
    [
        ([b"a", b"X", b"b"], ("X",), "a", 1),  # B43, B44
        ([b"aXb"], ("X",), "a", 1),  # starts inside a token: that token's text contains the text
        ([b"ab", b"E", b"ND", b"c"], ("END",), "ab", 1),  # straddles tokens
        ([b"ab", b"cE", b"N", b"D"], ("END",), "abc", 2),
        ([b"X"], ("X",), "", 0),
        ([b"EN", b"x"], ("END",), "ENx", 2),  # a false start
        ([b"ENEN", b"D!"], ("END",), "EN", 1),
        ([b"a", b"EN"], ("END",), "aEN", 2),  # the text ends within a possible stop string
        ([b"abc", b"d"], ("bcd", "b"), "a", 1),  # as token by token: "b" was there first
        ([b"\xc3", b"\xa9", b"\xe4\xb8\x96"], ("世",), "é", 2),
        ([b"a", b"", b"X"], ("X",), "a", 1),  # a token without text behind the text is not needed
    ],
)
def test_stop_strings(pieces, stops, text, released):
    got, num_released, _chunks = run(pieces, stops)
    assert (got, num_released) == (text, released)


def test_no_text_is_released_that_a_stop_string_takes_back():
    _text, _released, chunks = run([b"ab", b"E", b"N", b"D"], ("END",))
    assert chunks == ["ab", "", "", ""]


def test_stop_strings_wait_for_min_tokens():
    assert run([b"X", b"aX", b"b"], ("X",), stop_after=1)[0] == "Xa"


@given(
    st.text(alphabet="abX", max_size=14), st.lists(st.text(alphabet="abX", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 14), max_size=5),
)  # fmt: skip
def test_stop_strings_against_a_search_after_each_token(text, stops, cuts):
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    expected, so_far = text, ""
    for piece in pieces:
        so_far += piece
        found = [so_far.index(stop) for stop in stops if stop in so_far]
        if found:
            expected = so_far[: min(found)]
            break
    got, released, _chunks = run([piece.encode() for piece in pieces], tuple(stops))
    assert got == expected
    if len(got) < len(text):  # cut: the shortest prefix of the tokens whose text contains the text
        lengths = [len("".join(pieces[:n])) for n in range(len(pieces) + 1)]
        assert released == next(n for n, length in enumerate(lengths) if length >= len(got))


# ---------------------------------------------------------------- chat templates


def tokenizer(template):
    made = ByteTokenizer()
    made.chat_template = template
    made.bos_text, made.eos_text = "<s>", "</s>"
    return made


def test_a_template_sees_messages_and_special_texts():
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rendered = render_chat(tokenizer(template), [{"role": "user", "content": " hi "}])
    assert rendered == "<s>[user] hi</s>\n[assistant]"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.__class__.__mro__ }}",  # the sandbox
        "{% for m in messages %}",
        "{{ raise_exception('only assistants') }}",
        "{{ messages[7].content.strip() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_is_one_clear_line(template):
    with pytest.raises(TemplateError, match="chat template failed") as error:
        render_chat(tokenizer(template), [{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


def test_no_template_and_broken_messages_are_usage_errors():
    with pytest.raises(UsageError, match="no chat template"):
        render_chat(tokenizer(None), [{"role": "user", "content": "x"}])
    with pytest.raises(UsageError, match="'role' and 'content'"):
        render_chat(tokenizer("x"), [{"role": "user"}])
