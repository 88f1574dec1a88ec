"""The command line as a person meets it: a process, its two outputs and its exit status."""

import contextlib
import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

COMMAND = [sys.executable, "-m", "truedraw"]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
ENVIRONMENT.pop("FORCE_COLOR", None)


def run(*arguments, stdin=b"", **options):
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, env=ENVIRONMENT, timeout=120, **options)


def one_line(result):
    text = result.stderr.decode()
    assert "Traceback" not in text and text.startswith("truedraw: ") and text.count("\n") == 1, text
    return text


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "message"),
    [
        (["generate", "--model", "missing.gguf", "x"], b"", 2, "no model file 'missing.gguf'"),
        (["generate", "--model", "/", "x"], b"", 2, "is a directory"),
        (["generate", "--model", __file__, "x"], b"", 2, "no GGUF file"),
        (["generate", "--model", "toy", ""], b"", 2, "prompt is empty"),
        (["generate", "--model", "toy", "-"], b"", 2, "prompt is empty"),
        (["generate", "--model", "toy", "-"], b"ab\xffcd", 2, "not UTF-8: byte 0xff at offset 2"),
        (["generate", "--model", "toy", b"a\xffb"], b"", 2, "not UTF-8"),
        (["generate", "--model", "toy", "--context", "4", "long prompt"], b"", 2, "11 tokens and the context 4"),
        (["generate", "--model", "toy", "--temperature", "-1", "x"], b"", 2, "temperature is -1.0: allowed is a number >= 0"),
        (["generate", "--model", "toy", "--temperature", "nan", "x"], b"", 2, "temperature is nan"),
        (["generate", "--model", "toy", "--temperature", "warm", "x"], b"", 2, "--temperature.*warm"),
        (["generate", "--model", "toy", "--top-p", "1.5", "x"], b"", 2, r"top_p is 1.5: allowed is a number in \[0, 1\]"),
        (["generate", "--model", "toy", "--logit-bias", "257=1", "x"], b"", 2, r"logit_bias token is 257: .*\[0, 256\]"),
        (["generate", "--model", "toy", "--logit-bias", "much", "x"], b"", 2, "TOKEN_ID=NUMBER"),
        (["generate", "--model", "toy", "--drafter", "magic", "x"], b"", 2, "drafter is 'magic': allowed is auto"),
        (["generate", "--model", "toy", "--draft-length", "-3", "x"], b"", 2, "draft_length is '-3'"),
        (
            ["generate", "--model", "toy", "--rule", "best", "x"],
            b"",
            2,
            "rule is 'best': allowed is auto, block, coupled, multidraft, ",
        ),
        (["generate", "--model", "toy", "--kv-type", "q2", "x"], b"", 2, "kv_type is 'q2'"),
        (["generate", "--model", "toy", "--slots", "0", "x"], b"", 2, "slots is 0"),
        (["generate", "--model", "toy", "--system", "s", "x"], b"", 2, "no chat template"),
        (["generate", "--model", "toy", "--system", "s", "--raw", "x"], b"", 2, "--raw means none"),
        (["generate", "--model", "hub:nobody/nothing", "x"], b"", 2, "hub:nobody/nothing is neither"),
        (["generate", "--model", "smollm2:q2", "x"], b"", 2, "q8_0"),
        (["generate", "--bogus", "x"], b"", 2, "--bogus"),
        (["generate"], b"", 2, "(?i)missing argument"),
        (["chat", "--model", "toy"], b"", 2, "no chat template"),
        (["nonsense"], b"", 2, "nonsense"),
        (["generate", "--model", "toy", "--stop", b"\xff", "x"], b"", 2, "lone surrogate"),
        (["generate", "--model", "x" * 5000, "x"], b"", 2, "cannot be read"),
        (["generate", "--model", "toy", "--drafter", "none", "--draft-length", "5", "x"], b"", 2, "draft_length is 5"),
        (["generate", "--model", "toy", "--corpus", "missing.txt", "x"], b"", 2, "corpus 'missing.txt': there is no such file"),
        (
            ["chat", "--model", "toy", "--corpus", "missing/a.corpus"],
            b"",
            2,
            "corpus 'missing/a.corpus': there is no folder for it",
        ),
        (
            ["bench", "--model", "toy", "--corpus", "new.corpus"],
            b"",
            2,
            "corpus 'new.corpus': there is no such file, and nothing",
        ),
        (
            ["generate", "--model", "toy", "--corpus", sys.executable, "x"],
            b"",
            2,
            "is binary: a null byte at offset|is too large",
        ),
        (["generate", "--model", "toy", "--corpus", "/dev/null", "x"], b"", 2, "'/dev/null' is neither a file nor a folder"),
        (["generate", "--model", "toy", "--corpus", "", "x"], b"", 2, "corpus '': there is no such file or folder"),
        (
            ["generate", "--model", "toy", "--corpus", __file__, "--corpus-size", "900", "x"],
            b"",
            2,
            "too large: it has .* 14400 ",
        ),
        (
            ["generate", "--model", "toy", "--corpus", __file__, "--corpus-size", "9000", "x"],
            b"",
            2,
            "tokens, and 9000 fit: take",
        ),
        (["generate", "--model", "toy", "--corpus", __file__, "--corpus-size", "0", "x"], b"", 2, "corpus_size is 0: allowed"),
        (
            ["generate", "--model", "toy", "--corpus-size", "9", "x"],
            b"",
            2,
            "corpus_size is 9: allowed is left out .* no --corpus",
        ),
        *(
            (["generate", "--model", "toy", "--corpus", __file__, *other, "x"], b"", 2, message)
            for other, message in (
                (["--drafter", "none"], "drafter is 'none': allowed is suffix, .* where a corpus is given"),
                (["--drafter", "ngram"], "drafter is 'ngram': allowed is suffix"),
                (["--drafter", "random"], "drafter is 'random': allowed is suffix"),
                (["--drafter", "model", "--draft-model", "toy"], "drafter is 'model': allowed is suffix"),
                (["--draft-length", "0"], "draft_length is 0: allowed is auto or at least 1 with a corpus"),
            )
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, stdin, status, message):
    result = run(*arguments, stdin=stdin)
    assert result.returncode == status and result.stdout == b""
    assert re.search(message, one_line(result))


def test_a_chat_template_that_fails_is_a_failed_run(tiny):
    result = run(
        "generate", "--model", str(tiny("llama", template="{{ raise_exception('only for robots') }}")), "--draft-length", "3", "x"
    )
    assert result.returncode == 1 and "only for robots" in one_line(result)


def test_a_draft_model_with_another_vocabulary(tiny):
    """It drafts on what both share, and that is told. Token for token the same vocabularies need no word."""
    options = ["-m", str(tiny("llama")), "--draft-length", "2", "--max-tokens", "4", "x"]
    told = run("generate", "--draft-model", str(tiny("llama", last="zebra")), *options)
    assert told.returncode == 0 and b"has another tokenizer than" in told.stderr and b"258 shared tokens" in told.stderr
    same = run("generate", "--draft-model", str(tiny("llama", seed=3)), *options)
    assert same.returncode == 0 and b"another tokenizer" not in same.stderr


def test_a_full_disk_while_converting(tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))

    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path)}
    command = [*COMMAND, "generate", "--model", "smollm2:f32", "x"]
    result = subprocess.run(command, capture_output=True, env=environment, preexec_fn=small_files, timeout=120)
    lines = result.stderr.decode().splitlines()
    assert result.returncode == 1 and "Traceback" not in result.stderr.decode()
    assert (
        lines[0] == "truedraw: converting the demo model to f32, once" and "could not be written" in lines[1] and len(lines) == 2
    )
    assert list((tmp_path / "truedraw").iterdir()) == []


def test_help_tells_every_option():
    text = run("generate", "--help").stdout.decode()
    for option in (
        "--model", "--draft-model", "--drafter", "--draft-length", "--rule", "--temperature", "--top-k", "--top-p", "--min-p",
        "--repetition-penalty", "--presence-penalty", "--frequency-penalty", "--logit-bias", "--min-tokens", "--max-tokens",
        "--stop", "--n",
        "--stop-token-id", "--seed", "--raw", "--system", "--context", "--slots", "--threads", "--kv-type", "--compare", "--json",
        "--corpus", "--corpus-size",
    ):  # fmt: skip
        assert option in text, option


# ---------------------------------------------------------------- output


def toy(*arguments):
    result = run("generate", "--model", "toy", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_json_is_one_object_with_all_fields():
    answer = toy("the cat sat", "--max-tokens", "40", "--seed", "3", "--compare")
    fields = {
        "text", "tokens", "origins", "finish_reason", "prompt_tokens", "completion_tokens", "prompt_seconds", "seconds",
        "tokens_per_second", "steps", "proposed", "accepted", "tokens_per_step", "rule", "seed",
    }  # fmt: skip
    assert fields | {"plain", "speedup"} <= answer.keys() and fields <= answer["plain"].keys()
    assert answer["text"] == answer["plain"]["text"] and answer["tokens"] == answer["plain"]["tokens"]
    assert answer["completion_tokens"] == len(answer["tokens"]) == len(answer["origins"])
    assert set(answer["plain"]["origins"]) == {"plain"} and answer["plain"]["proposed"] == 0
    assert {"draft", "plain"} <= set(answer["origins"]) <= {"draft", "residual", "bonus", "plain"}
    assert answer["accepted"] == answer["origins"].count("draft") <= answer["proposed"]
    assert answer["seed"] == 3 and answer["rule"] == "coupled" and answer["prompt_tokens"] == 11


def test_plain_means_that_the_step_proposed_nothing():
    always = toy("the cat sat", "--max-tokens", "30", "--seed", "1", "--drafter", "random", "--draft-length", "2")
    assert always["origins"][-1] == "plain" or "plain" not in always["origins"]  # no room for a draft before the last
    assert set(toy("the cat sat", "--max-tokens", "30", "--drafter", "none")["origins"]) == {"plain"}


def test_text_on_standard_output_and_statistics_on_standard_error():
    result = run("generate", "--model", "toy", "-", "--max-tokens", "12", "--seed", "1", stdin=b"the cat sat")
    assert result.returncode == 0
    assert result.stdout.decode().rstrip("\n") == toy("the cat sat", "--max-tokens", "12", "--seed", "1")["text"]
    assert "tokens/s" in result.stderr.decode() and "rule coupled" in result.stderr.decode()


def test_choices_each_have_their_own_text():
    answer = toy("the", "--max-tokens", "9", "--seed", "1", "--n", "3")
    assert next(choice["text"] for choice in answer["choices"]) == answer["text"]
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert answer["text"] == toy("the", "--max-tokens", "9", "--seed", "1")["text"]
    shown = run("generate", "--model", "toy", "the", "--max-tokens", "9", "--seed", "1", "--n", "3").stdout.decode()
    assert "--- choice 2 ---\n" + answer["choices"][2]["text"] in shown


def test_compare_shows_both_speeds_and_colours_accepted_drafts():
    environment = {**ENVIRONMENT, "FORCE_COLOR": "1"}
    command = [*COMMAND, "generate", "--model", "toy", "--max-tokens", "60", "--seed", "3", "--compare", "the cat sat"]
    result = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    table, text = result.stderr.decode(), result.stdout.decode()
    assert "\x1b[1;32m" in text and text.count("\x1b[1;32m") <= text.count("\x1b[0m")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip("\n")
    assert plain == toy("the cat sat", "--max-tokens", "60", "--seed", "3")["text"]
    assert all(word in table for word in ("plain", "speculative", "tokens per step", "speed-up", "the same text"))


def test_every_sampling_option_reaches_the_engine():
    base = ("the cat sat", "--max-tokens", "40", "--seed", "3")
    default = toy(*base)["tokens"]
    for extra in (
        ["--temperature", "0"], ["--top-k", "1"], ["--top-p", "0.1"], ["--min-p", "0.9"], ["--repetition-penalty", "3"],
        ["--presence-penalty", "4"], ["--frequency-penalty", "4"], ["--logit-bias", "116=-100"], ["--seed", "4"],
    ):  # fmt: skip
        assert toy(*base, *extra)["tokens"] != default, extra
    assert toy(*base, "--stop", "the")["text"] == toy(*base)["text"].partition("the")[0]
    ended = toy(*base, "--stop-token-id", "116")["tokens"]
    assert ended == default[: default.index(116) + 1]
    longer = toy(*base, "--stop-token-id", "116", "--min-tokens", "20")["tokens"]
    assert len(longer) > 20 and 116 not in longer[:20]


@pytest.mark.parametrize(
    ("line", "status", "out", "errors"),
    [
        ("generate --model toy - <&-", 2, "", "standard input is closed"),
        ("chat <&-", 2, "", "standard input is closed"),
        ("generate --model toy hi >&-", 1, "", "standard output is closed"),
        ("generate --model toy --json hi >&-", 1, "", "standard output is closed"),
        ("generate --model toy --json --seed 1 --max-tokens 2 hi 2>&-", 0, '{"text": ', ""),
    ],
)
@pytest.mark.model
def test_closed_standard_streams(line, status, out, errors):
    result = subprocess.run(f"{sys.executable} -m truedraw {line}", shell=True, capture_output=True, env=ENVIRONMENT, timeout=60)
    assert result.returncode == status and "Traceback" not in result.stderr.decode()
    assert result.stdout.decode().startswith(out) and (out or not result.stdout)
    assert errors in result.stderr.decode() and (errors or not result.stderr)
    if out:
        json.loads(result.stdout)


def test_a_terminal_without_a_character_loses_no_text():
    result = subprocess.run(
        [*COMMAND, "generate", "--model", "toy", "--temperature", "9", "--seed", "1", "--max-tokens", "60", "hi"],
        capture_output=True, env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0 and b"\\ufffd" in result.stdout and b"Traceback" not in result.stderr


def test_coloured_text_is_the_text(capsys, monkeypatch):
    from truedraw.cli.output import TextWriter
    from truedraw.runners.toy import ByteTokenizer
    from truedraw.types import Step

    monkeypatch.setenv("FORCE_COLOR", "1")
    text = "a\tb\r\x0c[bold]c\n\nd"
    tokens = tuple(text.encode())
    writer = TextWriter(ByteTokenizer(), coloured=True)
    writer.write(Step(0, 0, tokens, ("draft", "bonus") * (len(tokens) // 2) + ("draft",) * (len(tokens) % 2), text, 0, 0, 0, 0.0))
    writer.finish(text + "held")
    shown = capsys.readouterr().out
    assert "\x1b[1;32m" in shown and re.sub(r"\x1b\[[0-9;]*m", "", shown) == text + "held\n"


# ---------------------------------------------------------------- failures in the middle


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("fault", ["pass", "row"])
def test_a_run_that_fails_keeps_what_was_made(capsys, quiet, fault):
    from truedraw.cli.generate import _Run
    from truedraw.engine import Engine
    from truedraw.errors import RowError, RunnerError
    from truedraw.registry import Model
    from truedraw.runners.toy import ByteTokenizer, ToyRunner, toy_language
    from truedraw.types import SamplingParams

    language = toy_language()

    def next_logits(context):
        if len(context) < 20:
            return language(context)
        if fault == "pass":
            raise RunnerError("the machine gave up")
        return language(context) * float("nan")

    engine = Engine(Model("toy", ToyRunner(next_logits, 257), ByteTokenizer()))
    with pytest.raises(RunnerError if fault == "pass" else RowError):
        _Run(engine, "the cat sat", SamplingParams(seed=1), 1, quiet=quiet, raw=True).go(compare=False)
    shown = capsys.readouterr().out
    assert len(json.loads(shown)["text"] if quiet else shown.rstrip("\n")) == 9


# ---------------------------------------------------------------- interruption


def heed_ctrl_c():
    """A run of the tests in the background ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def started(*arguments, **options):
    """A process that does not outlive its test."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    process = subprocess.Popen([*COMMAND, *arguments], env=ENVIRONMENT, preexec_fn=heed_ctrl_c, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


LONG = ("generate", "--draft-length", "7", "--max-tokens", "3000", "--ignore-eos", "--raw", "--seed", "1", "Once upon a time")


@pytest.mark.model
def test_ctrl_c_keeps_the_text_and_exits_130():
    with started(*LONG) as process:
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and len(first) == 20 and "Traceback" not in errors.decode()
    assert errors.decode().splitlines()[-1] == "truedraw: interrupted: the text made so far is kept"
    assert "ended by cancelled" in errors.decode() and (first + rest).endswith(b"\n")


@pytest.mark.model
def test_ctrl_c_during_a_comparison_keeps_the_text_of_every_choice():
    with started(*LONG, "--compare", "--n", "2", "--stop", "zzzzzz") as process:
        first = process.stdout.read(20)  # it streams
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and len(first) == 20 and "Traceback" not in errors.decode()
    assert len(rest.decode().partition("--- choice 1 ---\n")[2]) > 0


@pytest.mark.model
def test_ctrl_c_with_json_still_gives_the_object():
    with started(*LONG, "--json") as process:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    answer = json.loads(out)
    assert process.returncode == 130 and answer["finish_reason"] == "cancelled" and "Traceback" not in errors.decode()
    assert answer["completion_tokens"] == len(answer["tokens"]) > 0


@pytest.mark.model
def test_a_closed_pipe_is_one_line():
    with started(*LONG) as process:
        process.stdout.read(10)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(timeout=60) == 1 and errors == "truedraw: standard output was closed: stopped\n"


# ---------------------------------------------------------------- corpora


def kept(path):
    """The texts in a kept corpus of the toy model."""
    from truedraw.drafters.corpus_files import from_files
    from truedraw.runners.toy import ByteTokenizer

    return [text.tolist() for text in from_files(path, ByteTokenizer()).added()]


def test_answers_are_kept_and_copied_the_next_time(tmp_path):
    path = tmp_path / "a.corpus"
    request = ("the cat", "--max-tokens", "300", "--seed", "5", "--temperature", "1.5", "--ignore-eos", "--draft-length", "7")
    plain = toy(*request)
    first = run("generate", "--model", "toy", "--json", "--corpus", str(path), *request)
    assert f"truedraw: corpus {path} is new: finished answers are kept in it\n" in first.stderr.decode()
    assert os.stat(path).st_mode & 0o777 == 0o600
    again = toy(*request, "--corpus", str(path), "--corpus", __file__)
    assert json.loads(first.stdout)["tokens"] == again["tokens"] == plain["tokens"]
    assert kept(path) == [plain["tokens"]]
    assert again["tokens_per_step"] > 1.5 * plain["tokens_per_step"]


def test_a_corpus_of_another_model_or_a_damaged_one(tiny, tmp_path):
    path = tmp_path / "a.corpus"
    toy("the cat", "--max-tokens", "9", "--corpus", str(path))
    result = run("generate", "-m", str(tiny("llama")), "--raw", "--draft-length", "3", "--corpus", str(path), "x")
    assert result.returncode == 2 and f"corpus '{path}' is of another tokenizer" in one_line(result)
    path.write_bytes(path.read_bytes()[:-1])
    result = run("generate", "--model", "toy", "--corpus", str(path), "x")
    assert result.returncode == 2 and f"corpus '{path}' is damaged" in one_line(result)


def test_bench_adds_nothing(tmp_path):
    path, prompts = tmp_path / "a.corpus", tmp_path / "prompts"
    toy("the cat", "--max-tokens", "40", "--seed", "1", "--corpus", str(path))
    before = path.read_bytes()
    prompts.write_text('{"workload": "w", "prompt": "the dog"}\n')
    options = ("--model", "toy", "--raw", "--prompts", str(prompts), "--max-tokens", "40", "--repeats", "2", "--json")
    result = run("bench", *options, "--corpus", str(path))
    assert result.returncode == 0 and path.read_bytes() == before, result.stderr


def test_ctrl_c_keeps_the_answer_so_far(tmp_path):
    path = tmp_path / "a.corpus"
    options = ("--context", "8192", "--max-tokens", "8000", "--ignore-eos", "--seed", "1", "--corpus", str(path))
    with started("generate", "--model", "toy", *options, "the cat") as process:
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors.decode()
    (tokens,) = kept(path)
    assert bytes(tokens).startswith((first + rest).rstrip(b"\n")) and 20 <= len(tokens) < 8000


def test_a_full_disk_loses_no_text(tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    path = tmp_path / "a.corpus"
    command = [*COMMAND, "generate", "--model", "toy", "--max-tokens", "9", "--seed", "1", "--corpus", str(path), "the cat"]
    result = subprocess.run(command, capture_output=True, env=ENVIRONMENT, preexec_fn=small_files, timeout=60)
    assert result.returncode == 1 and len(result.stdout) == 10
    last = result.stderr.decode().splitlines()[-1]
    assert last == f"truedraw: the corpus could not be written: File too large: {path}" and not list(tmp_path.iterdir())


def test_chat_keeps_its_answers(tiny, tmp_path):
    path = tmp_path / "a.corpus"
    model = str(tiny("llama", template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    options = ("-m", model, "--max-tokens", "8", "--ignore-eos", "--seed", "1", "--draft-length", "3", "--corpus", str(path))
    result = run("chat", *options, stdin=b"one\n/reset\ntwo\n")
    assert result.returncode == 0, result.stderr
    header = json.loads(path.read_bytes().partition(b"\n")[0])
    assert header["tokens"] == 1 + 2 * (8 + 1)


# ---------------------------------------------------------------- chat


@pytest.mark.model
def test_chat_keeps_its_cache_between_turns():
    lines = b"What is the capital of France?\nAnd of Italy?\n/reset\nSay hello.\n"
    result = run("chat", "-t", "0", "--max-tokens", "40", stdin=lines)
    assert result.returncode == 0, result.stderr
    told = re.findall(r"prompt (\d+) tokens in ([\d.]+) s", result.stderr.decode())
    lengths, seconds = [int(n) for n, _ in told], [float(s) for _, s in told]
    assert len(told) == 3 and lengths[1] > lengths[0] > 20 and lengths[2] < lengths[1]
    assert len(result.stdout.splitlines()) >= 3
    assert seconds[1] < lengths[1] * seconds[0] / lengths[0]  # of the second prompt only the new turn was computed


@pytest.mark.model
def test_chat_on_a_terminal_leaves_it_as_it_was():
    leader, follower = pty.openpty()
    before = termios.tcgetattr(follower)
    shown = b""

    def until(text):
        nonlocal shown
        deadline = time.time() + 60
        while text not in shown and time.time() < deadline:
            if select.select([leader], [], [], 1)[0]:
                shown += os.read(leader, 4096)
        assert text in shown, shown

    terminal = {"stdin": follower, "stdout": follower, "stderr": follower, "start_new_session": True}
    with started("chat", "-t", "0", "--max-tokens", "2000", "--ignore-eos", **terminal) as process:
        until(b"> ")
        shown = b""
        os.write(leader, b"Tell me a story.\n")
        until(b". ")
        process.send_signal(signal.SIGINT)
        until(b"ended by cancelled")
        until(b"> ")
        os.write(leader, b"/exit\n")
        assert process.wait(timeout=60) == 0
    assert b"Traceback" not in shown
    assert termios.tcgetattr(follower) == before
    os.close(leader)
    os.close(follower)
