import json
import os
import random
import stat
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraw.drafters import corpus as corpus_module
from truedraw.drafters.corpus import DEPTH, PENDING, SAMPLE, Corpus, Index
from truedraw.drafters.corpus_files import BYTES_PER_TOKEN, CorpusFile, fingerprint, from_files, gather
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.suffix import SuffixDrafter
from truedraw.engine import Engine
from truedraw.errors import CorpusError, InvalidParameter
from truedraw.policy import FixedLength
from truedraw.registry import Model, check_takes_corpus
from truedraw.runners.toy import ByteTokenizer, LetterTokenizer, ToyRunner, hashed
from truedraw.types import SamplingParams

BYTES = ByteTokenizer()


def tokens(values):
    return np.array(values, dtype=np.int32)


# ---------------------------------------------------------------- what is found


def occurrences(texts, context):
    """The longest end of the context that some text goes on behind, and where: (length, [(text, end), ...])."""
    for length in range(min(DEPTH, len(context)), 0, -1):
        found = [(t, e) for t in texts for e in range(length, len(t)) if t[e - length : e] == context[-length:]]
        if found:
            return length, found
    return 0, []


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=45),
    st.integers(1, 4),
)
def test_found_is_what_trying_all_finds(texts, context, at_least):
    corpus = Corpus(texts)
    length, found = occurrences(texts, context)
    match = corpus.find(tokens(context), at_least)
    if length < at_least:
        assert match is None
        return
    following = [text[end] for text, end in found]
    most = max(following.count(token) for token in following)
    text, end = [(t, e) for t, e in found if following.count(t[e]) == most][-1]
    assert (match.length, match.occurrences, match.share) == (length, len(found), most / len(found))
    assert [corpus.copy(match, count) for count in (0, 1, 3, 99)] == [text[end : end + count] for count in (0, 1, 3, 99)]


@pytest.mark.parametrize("vocab", [2, 300, 49_152, 2**31 - 1])
def test_places_are_told_apart_whatever_the_size_of_the_ids(vocab):
    generator = random.Random(vocab)
    words = [[generator.randrange(vocab) for _ in range(50)] for _ in range(4)]
    texts = [[token for _ in range(6) for token in generator.choice(words)[generator.randrange(9) :]] for _ in range(5)]
    corpus = Corpus(texts)
    for _ in range(200):
        text = generator.choice(texts)
        context = text[: generator.randrange(1, len(text))]
        match = corpus.find(tokens(context))
        length, found = occurrences(texts, context)
        assert (match.length, match.occurrences) == (length, len(found)) if found else match is None


def test_a_match_ends_at_the_border_of_its_text_and_at_the_depth():
    text = list(range(100))
    corpus = Corpus([[5, 6], text, [7, 8]])
    assert corpus.find(tokens(text[:60])).length == DEPTH
    assert corpus.find(tokens([8, 7])).occurrences == 2 and corpus.find(tokens([6, 5])).length == 1
    assert corpus.copy(corpus.find(tokens(text[:98])), 5) == [98, 99]
    assert corpus.find(tokens([99])) is None and corpus.find(tokens([])) is None and Corpus().find(tokens([1])) is None


def test_of_many_occurrences_some_are_counted():
    texts = [[1, 2, 3 if i % 4 else 4, 10 + i] for i in range(16 * SAMPLE)]  # with a period that divides their number
    match = Corpus(texts).find(tokens([1, 2]))
    assert match.occurrences == 16 * SAMPLE and match.share == pytest.approx(0.75, abs=0.1)
    assert Corpus(texts).copy(match, 1) == [3]


def test_a_lookup_compares_few_places(monkeypatch):
    """Twice the logarithm and some: a scan of 100,000 would be noticed."""
    generator = random.Random(0)
    text = [generator.randrange(300) for _ in range(100_000)]
    index, plain, seen = Index([tokens(text)]), Index._run, []

    def counted(self, size):
        run = plain(self, size)
        return lambda place: seen.append(place) or run(place)

    monkeypatch.setattr(Index, "_run", counted)
    for end in range(100, 100_000, 1000):
        seen.clear()
        assert index.find(tokens(text[end - 40 : end])).length == DEPTH
        assert len(seen) < 30
    index = Index([tokens([1, 2] * 50_000)])
    seen.clear()
    assert index.find(tokens([3, 1])).occurrences == 50_000 and len(seen) < 80


# ---------------------------------------------------------------- what is added


def sorts(monkeypatch):
    made = []
    plain = corpus_module.Index
    monkeypatch.setattr(corpus_module, "Index", lambda texts: made.append(plain(texts)) or made[-1])
    return made


def test_added_texts_are_found_after_the_next_sort_and_sorting_is_amortised(monkeypatch):
    made = sorts(monkeypatch)
    corpus = Corpus([[7, 8, 9]])
    corpus.add([1, 2, 3])
    assert corpus.find(tokens([1, 2])) is None and len(made) == 1
    corpus.add(list(range(10, 10 + PENDING)))
    assert corpus.copy(corpus.find(tokens([1, 2])), 5) == [3] and corpus.find(tokens([7, 8])).length == 2 and len(made) == 2
    for i in range(2000):
        corpus.add([i] * 50)
    assert sum(len(index.tokens) for index in made) < 12 * corpus.size


@given(st.integers(1, 30), st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=12))
def test_the_bound_holds_and_the_oldest_go_first(limit, texts):
    corpus = Corpus([[0, 1]] if limit > 3 else [], limit=limit)
    room = limit - corpus.size
    kept = []
    for text in texts:
        corpus.add(text)
        text = text[len(text) - min(len(text), max(room - 1, 0)) :]
        if len(text) > 1:
            kept = [old for old in kept if old != text] + [text]
        while sum(len(old) + 1 for old in kept) > room:
            kept.pop(0)
        assert [text.tolist() for text in corpus.added()] == kept
        assert corpus.size == limit - room + sum(len(text) + 1 for text in kept) <= limit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Corpus(limit=0), r"corpus_size is 0: allowed is a number of tokens in \[1, 100000000\]"),
        (lambda: Corpus(limit=True), "corpus_size is True"),
        (lambda: Corpus(limit=10**9), "corpus_size is 1000000000"),
        (lambda: Corpus([[1, 2, 3]], limit=3), "limit is 3: allowed is at least the 4 tokens"),
        (lambda: Corpus([[1, -1]]), "corpus token is -1"),
        (lambda: Corpus().add([-3, 1]), "corpus token is -3"),
        (lambda: gather([], limit=0), "corpus_size is 0"),
        (lambda: check_takes_corpus("ngram"), "drafter is 'ngram': allowed is suffix"),
        (lambda: Engine.load("missing", drafter="none", corpus=Corpus()), "drafter is 'none'"),
        (lambda: Engine.load("missing", draft_model="missing", drafter="model", corpus=Corpus()), "drafter is 'model'"),
        (lambda: Engine.load("toy", drafter=NGramDrafter(), corpus=Corpus()), "None together with a Drafter"),
        (lambda: Engine.load("toy", draft_length=0, corpus=Corpus()), "draft_length is 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(InvalidParameter, match=message):
        make()


# ---------------------------------------------------------------- texts from files


def test_files_and_folders_become_texts(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße\n")
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "b.py").write_text("x = 1")
    (folder / "deep" / "c.md").write_text("# c")
    (folder / "d.bin").write_bytes(b"\0" * 10**6)
    (folder / "a.latin").write_bytes(b"caf\xe9" * 3997)  # takes no room from the texts
    (folder / ".hidden").write_text("secret")
    (folder / "empty").write_text("")
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    sources = gather([tmp_path / "a.txt", str(folder)], limit=1000)
    assert [text for _, text in sources.texts] == ["Grüße\n", "x = 1", "# c"]
    assert sources.notes == (f"corpus {folder}: 2 text files; passed over: 2 hidden, 2 binary, 2 not readable",)
    corpus = sources.open(BYTES)
    assert not corpus.learning and corpus.size == len("Grüße\n".encode()) + 1 + 6 + 4
    assert bytes(corpus.copy(corpus.find(tokens(list(b"x ="))), 9)) == b" 1"


def refusals(tmp_path):
    (tmp_path / "binary").write_bytes(b"ab\0c")
    (tmp_path / "latin").write_bytes(b"ab\xffcd")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "none").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"\0")
    (tmp_path / "text").write_text("a" * 60)
    (tmp_path / "other").write_text("b" * 60)
    for name in ("half", "rest"):
        (tmp_path / name).write_text("a" * 1000)
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", 10**13)  # a hole: nobody could read it
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "long").write_text("a" * 2000)
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.corpus")
    return {
        "missing": "corpus '[^']*missing': there is no such file or folder",
        "text/below": "corpus '[^']*below': there is no such file or folder",
        "binary": "corpus '[^']*binary' is binary: a null byte at offset 2",
        "latin": "corpus '[^']*latin' is binary or not UTF-8: byte 0xff at offset 2",
        "empty": "corpus '[^']*empty' is empty",
        "none": "corpus '[^']*none' is a folder without a text file",
        "images": r"corpus '[^']*images' is a folder without a text file \(passed over: 1 binary\)",
        "pipe": "corpus '[^']*pipe' is neither a file nor a folder",
        "pipe.corpus": "corpus '[^']*pipe.corpus' is neither a file nor a folder",
        "large": "corpus '[^']*large' is too large: it has 10000000000000 bytes, and 1600 are left of the 1600 .* --corpus-size",
        "folder": "corpus '[^']*long' is too large: it has 2000 bytes, and 1600 are left",
        "text other": "corpus '[^']*text', '[^']*other' holds 122 tokens, and 100 fit: take a larger --corpus-size",
        "half rest": "corpus '[^']*rest' is too large: it has 1000 bytes, and 600 are left",
        "nowhere/a.corpus": "corpus '[^']*a.corpus': there is no folder for it",
        "text/a.corpus": "corpus '[^']*a.corpus': there is no folder for it",
        "a.corpus b.corpus": "corpus '[^']*b.corpus': answers are kept in one file, and '[^']*a.corpus' is one already",
        "nul\0": "cannot be read: embedded null",
        "x" * 300: "cannot be read: File name too long",
    }


def test_what_is_no_text_is_refused_by_name(tmp_path):
    for names, message in refusals(tmp_path).items():
        with pytest.raises(CorpusError, match=message) as caught:
            from_files([tmp_path / name for name in names.split(" ")], BYTES, limit=1600 // BYTES_PER_TOKEN)
        assert "\n" not in str(caught.value)
    with pytest.raises(CorpusError, match="no such file, and nothing is added here"):
        gather([tmp_path / "new.corpus"], learning=False)


def test_a_folder_that_may_not_be_written_to_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    kept(tmp_path / "a.corpus", [[1, 2]])
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write everywhere
    with pytest.raises(CorpusError, match=r"a.corpus' cannot be written: its folder is read-only"):
        from_files(tmp_path / "a.corpus", BYTES)
    assert gather([tmp_path / "a.corpus"], learning=False).open(BYTES).size == 3


def test_a_text_without_a_token_is_refused(tmp_path):
    class Silent(ByteTokenizer):
        def encode(self, text, *, add_special=True):
            return []

    (tmp_path / "a").write_text("a")
    with pytest.raises(CorpusError, match="a' holds no token"):
        from_files(str(tmp_path / "a"), Silent())


# ---------------------------------------------------------------- the kept file


def kept(path, texts, **options):
    corpus = from_files([path], BYTES, **options)
    for text in texts:
        corpus.add(text)
    corpus.close()
    return [text.tolist() for text in corpus.added()]


def read(path, limit=1000):
    return [text.tolist() for text in from_files([path], BYTES, limit).added()]


def test_what_was_added_is_there_again(tmp_path):
    path = tmp_path / "a.corpus"
    assert gather([path]).notes == (f"corpus {path} is new: finished answers are kept in it",)
    assert not path.exists()
    kept(path, [])
    assert not path.exists()  # nothing to keep
    kept(path, [[1, 2, 3], [4, 5]])
    kept(path, [[6, 7]])
    assert read(path) == [[1, 2, 3], [4, 5], [6, 7]]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [file.name for file in tmp_path.iterdir()] == ["a.corpus"]
    corpus = from_files(path, BYTES)
    assert corpus.learning and corpus.copy(corpus.find(tokens([1])), 5) == [2, 3]
    assert gather([path]).notes == ()


def test_the_file_is_bounded_like_the_memory(tmp_path):
    path = tmp_path / "a.corpus"
    for i in range(50):
        kept(path, [[i % 7, i, i + 1, i + 2]], limit=23)
        assert path.stat().st_size <= 1024 + 4 * 24
    assert read(path) == [[i % 7, i, i + 1, i + 2] for i in (46, 47, 48, 49)]


def test_two_at_a_time_lose_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.corpus"
    first, second = from_files(path, BYTES), from_files(path, BYTES)
    first.add([1, 2])
    second.add([3, 4])
    first.close()
    second.close()
    assert read(path) == [[1, 2], [3, 4]]
    first.add([5, 6])
    first.close()
    first.close()  # nothing new: nothing written
    assert read(path) == [[1, 2], [3, 4], [5, 6]]
    monkeypatch.delattr(CorpusFile, "read")  # not wanted where nobody else wrote
    first.add([7, 8])
    first.close()


def test_texts_to_copy_from_are_not_kept(tmp_path):
    path = tmp_path / "a.corpus"
    (tmp_path / "text").write_text("abc")
    corpus = from_files([tmp_path / "text", path], BYTES)
    corpus.add([1, 2])
    corpus.close()
    assert read(path) == [[1, 2]] and corpus.find(tokens(list(b"ab"))).length == 2


def test_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "a.corpus"
    path.symlink_to(tmp_path / "elsewhere" / "b")
    kept(path, [[1, 2]])
    assert path.is_symlink() and read(path) == [[1, 2]]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.corpus"
    kept(path, [[1, 2]])
    before = path.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="the corpus could not be written: No space left on device") as caught:
        kept(path, [[3, 4]])
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def damaged(content):
    line, _, data = content.partition(b"\n")
    header = json.loads(line)

    def changed(data=data, **fields):
        return json.dumps({**header, **fields}).encode() + b"\n" + data

    beyond = tokens([-1, 1, 2, 300, -1]).tobytes()
    borderless, headless, endless = (tokens(values).tobytes() for values in ([1, 2, 3], [1, 2, -1], [-1, 1, 2]))
    return {
        "is damaged or no corpus": [
            b"",
            b"hello",
            b"[" * 1000,
            b"[1]\n",
            b"\xff\xfe\n",
            changed(tokens="many"),
            b"{" + b" " * 5000,
        ],
        "is of format 2, and this version reads 1": [changed(truedraw_corpus=2)],
        "is of another tokenizer": [changed(tokenizer="0" * 64)],
        "holds 5000 tokens and 1000 fit: take a larger --corpus-size": [changed(tokens=5001)],
        "is damaged: [0-9]+ bytes of tokens where": [content[:-1], content[:-4], content + b"....", changed(tokens=-1)],
        "is damaged: its tokens are not": [
            content[:-8] + b"\1" + content[-7:],
            changed(checksum=0),
            changed(b"", tokens=0, checksum=zlib.crc32(b"")),
            changed(beyond, tokens=5, checksum=zlib.crc32(beyond)),
            *(changed(data, tokens=3, checksum=zlib.crc32(data)) for data in (borderless, headless, endless)),
        ],
    }


def test_a_kept_file_that_cannot_be_used_is_refused_by_name(tmp_path):
    path = tmp_path / "a.corpus"
    kept(path, [[1, 2, 3], [4, 5]])
    for message, contents in damaged(path.read_bytes()).items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(CorpusError, match=f"corpus '[^']*a.corpus' {message}") as caught:
                from_files(path, BYTES, 1000)
            assert "\n" not in str(caught.value) and path.read_bytes() == content


def test_a_large_kept_file_is_refused_unread(tmp_path):
    path = tmp_path / "a.corpus"
    kept(path, [[1, 2, 3]])
    os.truncate(path, 10**13)
    with pytest.raises(CorpusError, match=r"is damaged: 9999999\d+ bytes of tokens where 20 are announced"):
        from_files(path, BYTES)


def test_tokenizers_are_told_apart():
    class Renamed(ByteTokenizer):
        def token_text(self, token):
            return b"?" if token == 256 else super().token_text(token)

    assert len({fingerprint(tokenizer) for tokenizer in (BYTES, Renamed(), LetterTokenizer(5), LetterTokenizer(6))}) == 4
    assert fingerprint(BYTES) == fingerprint(ByteTokenizer())


# ---------------------------------------------------------------- drafting from it


def toy(vocab=257, **options):
    return Model(
        "toy", ToyRunner(hashed(vocab, **options), vocab, num_slots=2), BYTES if vocab == 257 else LetterTokenizer(vocab)
    )


def answers(corpus, params, prompts=([1, 2, 3], [4, 1]), vocab=257, **options):
    with Engine(toy(vocab, **options), SuffixDrafter(corpus=corpus), FixedLength(7)) as engine:
        results = engine.generate(list(prompts), params)
        return [result.tokens for result in results], engine.stats.tokens_per_step


def test_the_text_never_depends_on_the_corpus():
    for seed in range(8):
        params = SamplingParams(max_tokens=60, seed=seed, temperature=0.4 * (seed % 3), ignore_eos=True)
        plain, _ = answers(None, params, vocab=5, order=2)
        generator = random.Random(seed)
        right = Corpus(plain)
        wrong = Corpus([[generator.randrange(5) for _ in range(500)] for _ in range(3)], learning=True)
        foreign = Corpus([[*plain[0][:30], 77, 10**6], [3, 99]])  # ids that the model does not know
        for corpus in (right, wrong, foreign):
            assert answers(corpus, params, vocab=5, order=2)[0] == plain


def test_a_request_that_comes_again_takes_far_fewer_steps(tmp_path):
    params = SamplingParams(max_tokens=100, seed=3, ignore_eos=True)
    path = tmp_path / "a.corpus"
    first, slow = answers(from_files(path, BYTES), params)
    second, quick = answers(from_files(path, BYTES), params)
    assert first == second and slow < 1.2 and quick > 5


def test_answers_are_kept_and_prompts_are_not():
    corpus = Corpus(learning=True)
    found, _ = answers(corpus, SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    assert sorted(text.tolist() for text in corpus.added()) == sorted(map(list, found))
    read_only = Corpus()
    answers(read_only, SamplingParams(max_tokens=20, seed=1))
    assert not read_only.added()


def test_cancelled_and_unfinished_answers_are_kept():
    corpus = Corpus(learning=True)
    with Engine(toy(), SuffixDrafter(corpus=corpus), FixedLength(3)) as engine:
        params = SamplingParams(max_tokens=500, seed=1, ignore_eos=True)
        requests = [engine.submit([1, 2, 3], params), engine.submit([4, 5], params)]
        for _ in range(12):
            engine.step()
        engine.cancel(requests[0])
        assert [text.tolist() for text in corpus.added()] == [list(requests[0].results[0].tokens)]
    assert len(corpus.added()) == 2 and len(corpus.added()[1]) > 9


def test_a_failing_store_does_not_keep_the_model_open():
    closed = []

    class Runner(ToyRunner):
        def close(self):
            closed.append(self)

    def store(corpus):
        raise OSError("full")

    corpus = Corpus(learning=True, store=store)
    engine = Engine(Model("toy", Runner(hashed(9), 9), LetterTokenizer(9)), SuffixDrafter(corpus=corpus))
    corpus.add([1, 2])
    with pytest.raises(OSError, match="full"):
        engine.close()
    assert closed


def test_the_library_takes_paths_sources_and_a_corpus(tmp_path):
    said = []
    path = tmp_path / "a.corpus"
    params = SamplingParams(max_tokens=30, seed=1)
    for corpus in (path, str(path), [path], gather([path]), from_files(path, BYTES)):
        with Engine.load("toy", corpus=corpus, drafter="suffix+random", on_progress=said.append) as engine:
            engine.generate(["the cat"], params)
    assert len(read(path)) == 1 and said == 2 * [f"corpus {path} is new: finished answers are kept in it"]


def test_a_file_that_is_of_another_tokenizer_by_the_end_is_not_replaced(tmp_path):
    path = tmp_path / "a.corpus"
    corpus = from_files(path, BYTES)
    other = CorpusFile(path, "other", 9, 100)
    other(Corpus(added=[[1, 2]], limit=100))
    before = path.read_bytes()
    corpus.add([1, 2])
    with pytest.raises(CorpusError, match="another tokenizer"):
        corpus.close()
    assert path.read_bytes() == before
