"""Somebody else's verifier as a program: JSON lines, in order or not, and everything that can go wrong on the way."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from truedraw.audit import exact_law, process
from truedraw.audit.convention import Answer, Lost, Refused, Request, WrongAnswer, given
from truedraw.audit.function import Options, report_process
from truedraw.errors import UsageError

ROOT = Path(__file__).parent.parent
PYTHON = shlex.quote(sys.executable)
REQUEST = Request(np.array([[0.5, 0.3, 0.2]] * 2), np.array([[0.2, 0.3, 0.5]]), (2,))
HELLO = 'print(json.dumps({"protocol": 1, "name": "test", "uniforms": True}), flush=True)'
TOKEN_RULE = """
def verify(request):
    from truedraw.audit import own
    return own.token(request["p"], request["q"], request["drafts"], request["uniforms"])
"""


def script(tmp_path, body, hello=HELLO):
    """A program that answers each line by `body`, which sees `request` and `number`."""
    path = tmp_path / "program.py"
    path.write_text(
        f"import json, os, random, sys, time\n{TOKEN_RULE}\n{hello}\n"
        "for number, line in enumerate(sys.stdin):\n    request = json.loads(line)\n" + "".join(f"    {x}\n" for x in body)
    )
    return f"{PYTHON} {shlex.quote(str(path))}"


SMALL = [case for case in exact_law.problems() if case[0].name in ("swapped halves", "point-mass drafts")]


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    """Two are enough for most tests."""
    monkeypatch.setattr(exact_law, "problems", lambda min_drafts=0: SMALL)


ANSWER = 'print(json.dumps({"id": request["id"], "accepted": 0, "token": 0}), flush=True)'


def modes(report):
    return {mode.mode: mode for mode in report.modes}


# ---------------------------------------------------------------- programs that are right


def test_the_python_example_is_exact():
    report = report_process(f"{PYTHON} {ROOT / 'examples' / 'verifier.py'}", options=Options(rule="token"))
    assert report.status == 0, modes(report)
    assert ("says it is", "example in Python") in report.facts
    assert all("TV 0 after one step" in note for note in modes(report)["exact law"].notes[:-1])
    assert modes(report)["token rule, answer by answer"].verdict == "no evidence"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_cpp_example_is_exact(tmp_path):
    binary = tmp_path / "verifier"
    subprocess.run(["c++", "-O1", "-Wall", "-Werror", "-o", str(binary), str(ROOT / "examples" / "verifier.cpp")], check=True)
    report = report_process(str(binary), options=Options(rule="token"))
    assert report.status == 0, modes(report)
    assert modes(report)["exact law"].samples == len(SMALL) and modes(report)["edge cases"].verdict == "no evidence"


def test_answers_in_another_order_are_fine(tmp_path):
    command = script(
        tmp_path,
        [
            "held = globals().setdefault('held', [])",
            'held.append({"id": request["id"], "accepted": 0, "token": request["drafts"][0]})',
            "if len(held) == 4:",
            "    [print(json.dumps(answer), flush=True) for answer in reversed(held)]; held.clear()",
        ],
    )
    requests = [(Request(REQUEST.p, REQUEST.q, (i % 3,)), given((0.5, 0.5))) for i in range(12)]
    with process.program(command) as subject:
        assert subject.ask_many(requests) == [Answer(0, i % 3) for i in range(12)]


def test_many_requests_are_under_way_at_once(tmp_path):
    """A program that takes 2 ms for a line, however many it has: 400 of them in far less than one after the other."""
    command = script(tmp_path, ["if number % 16 == 0: time.sleep(0.03)", ANSWER])
    with process.program(command) as subject:
        started = time.monotonic()
        assert len(subject.ask_many([(REQUEST, given((0.5, 0.5)))] * 800)) == 800
        assert time.monotonic() - started < 5


def test_a_program_with_its_own_uniforms_is_sampled(tmp_path):
    hello = 'print(json.dumps({"protocol": 1, "name": "own"}), flush=True)'
    body = [
        "request['uniforms'] = [random.random() for _ in request['uniforms']]",
        "try:",
        "    accepted, token = verify(json.loads(json.dumps(request), parse_constant=float))",
        '    answer = {"accepted": int(accepted), "token": int(token)}',
        "except Exception as error: answer = {'error': str(error)}",
        'print(json.dumps({"id": request["id"], **answer}), flush=True)',
    ]
    report = report_process(script(tmp_path, body, hello), options=Options(detect=0.1))
    assert report.status == 0 and modes(report)["sampled law"].verdict == "no evidence"


def test_a_fault_in_a_program_is_convicted(tmp_path):
    body = [
        "accepted, token = (1, 0) if request['drafts'] else (0, 0)",
        'print(json.dumps({"id": request["id"], "accepted": accepted, "token": token}), flush=True)',
    ]
    report = report_process(script(tmp_path, body))
    assert report.status == 1 and modes(report)["exact law"].example.command.startswith("truedraw audit process")
    assert modes(report)["edge cases"].example.command.startswith("printf")


def test_the_command_of_an_example_repeats_it(tmp_path):
    command = f"{PYTHON} {ROOT / 'examples' / 'verifier.py'}"
    with process.program(command) as subject:
        shown = subject.reproduce(REQUEST, (0.9, 0.5))
        expected = subject.ask(REQUEST, given((0.9, 0.5)))
    lines = subprocess.run(shown, shell=True, capture_output=True, text=True, check=True).stdout.splitlines()
    assert json.loads(lines[1]) == {"id": 0, "accepted": expected.accepted, "token": expected.token}


def test_errors_and_wrong_answers_are_the_programs_own(tmp_path):
    command = script(
        tmp_path,
        [
            'told = [{"error": "row 0 is no law"}, {"accepted": 9, "token": 0}, {"token": "x"}]',
            'print(json.dumps({"id": request["id"], **told[number]}), flush=True)',
        ],
    )
    with process.program(command) as subject:
        first, second, third = subject.ask_many([(REQUEST, given((0.5, 0.5)))] * 3)
    assert isinstance(first, Refused) and "row 0 is no law" in str(first)
    assert isinstance(second, WrongAnswer) and isinstance(third, WrongAnswer)


def test_what_json_lacks_goes_as_strings():
    line = process.encode(3, Request(np.array([[np.nan, np.inf, -np.inf, 0.5]]), None, ()), (0.5,))
    told = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert told == {"id": 3, "p": [["NaN", "Infinity", "-Infinity", 0.5]], "q": None, "drafts": [], "uniforms": [0.5]}
    assert np.isnan(process.decode_row(told["p"][0])[0])


# ---------------------------------------------------------------- programs that fail


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (["sys.exit(7)"], "the program ended with status 7"),
        (["os.kill(os.getpid(), 11)"], "the program was ended by SIGSEGV"),
        (["print('warming up', flush=True)"], "a line is no JSON: 'warming up'"),
        (["print('[1, 2]', flush=True)"], "a line is no JSON object"),
        (
            ['print(json.dumps({"id": 10**6, "accepted": 0, "token": 0}), flush=True)'],
            "an answer to id 1000000, which is not open",
        ),
        ([ANSWER, ANSWER], "which is not open"),
        (["time.sleep(30)"], "no answer within 0.5 s"),
        (["sys.stdout.write('x' * 3_000_000); sys.stdout.flush(); time.sleep(30)"], "a line of more than 1 MiB"),
        (["sys.stdin.close(); sys.stdout.close(); os.close(1); time.sleep(30)"], "the program closed its standard output"),
        (["raise ValueError('CUDA out of memory')"], "CUDA out of memory"),
    ],
)
def test_a_program_that_fails_is_status_3(tmp_path, body, told):
    started = time.monotonic()
    report = report_process(script(tmp_path, body), timeout=0.5)
    assert report.status == 3 and told in report.modes[-1].reason and report.modes[-1].verdict == "not completed"
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        ("time.sleep(30)", "no first line within 0.5 s"),
        ("print('loading ...', flush=True)", "a line is no JSON"),
        ("print(json.dumps({'protocol': 2}), flush=True)", 'the first line has to be {"protocol": 1'),
        ("sys.exit('no GPU')", "no GPU"),
    ],
)
def test_a_program_that_says_nothing_sound_is_status_3(tmp_path, hello, told):
    report = report_process(script(tmp_path, [ANSWER], hello), timeout=0.5)
    assert report.status == 3 and told in report.modes[0].reason


def test_what_was_found_before_a_crash_stands(tmp_path):
    """It dies at the first row that is no law: the law has its verdict, the edge cases have none."""
    body = [
        "if 'NaN' in line: os.abort()",
        "accepted, token = verify(request)",
        'print(json.dumps({"id": request["id"], "accepted": int(accepted), "token": int(token)}), flush=True)',
    ]
    report = report_process(
        script(
            tmp_path,
            [
                *body[:1],
                "try: accepted, token = verify(request)",
                "except Exception as e:",
                '    print(json.dumps({"id": request["id"], "error": str(e)}), flush=True); continue',
                body[2],
            ],
        )
    )
    assert report.status == 3
    assert modes(report)["exact law"].verdict == "no evidence"
    assert modes(report)["edge cases"].verdict == "not completed" and "SIGABRT" in modes(report)["edge cases"].reason


def test_nothing_is_asked_of_a_program_that_was_lost(tmp_path):
    with process.program(script(tmp_path, ["sys.exit(1)"])) as subject:
        with pytest.raises(Lost):
            subject.ask(REQUEST, given((0.5, 0.5)))
        with pytest.raises(Lost):
            subject.ask_many([(REQUEST, given((0.5, 0.5)))])
        with pytest.raises(Lost):
            exact_law.exact_mode(subject, picked=exact_law.problems()[:1])


@pytest.mark.parametrize("command", ["", "no-such-program --x", "'unclosed"])
def test_what_cannot_be_started_is_usage(command):
    with pytest.raises(UsageError):
        report_process(command)


def test_the_program_ends_with_the_audit(tmp_path):
    with process.program(script(tmp_path, [ANSWER])) as subject:
        subject.ask(REQUEST, given((0.5, 0.5)))
        running = subject.ask.__closure__
        programs = [cell.cell_contents for cell in running if isinstance(cell.cell_contents, process.Program)]
    assert programs[0]._process.poll() is not None


def test_the_command_has_a_status_of_its_own(tmp_path):
    words = [sys.executable, "-m", "truedraw", "audit", "process", script(tmp_path, ["sys.exit(7)"])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "the program ended with status 7" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr and "lossless" not in done.stdout
