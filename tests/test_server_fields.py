"""Every field has its effect, or has none by its nature, or is refused by name."""

import pytest
from pydantic import ValidationError
from wire import CHAT, COMPLETIONS, error_of, in_thread, is_well

from truedraw.runners.toy import ToyRunner, toy_language
from truedraw.server.access import Limits
from truedraw.server.schema import ChatRequest, CompletionRequest, Message, Speculation, StreamOptions

GOOD = {
    COMPLETIONS: {"prompt": "the", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2},
}
USER = {"role": "user", "content": "a" * 40}
BOTH = (COMPLETIONS, CHAT)


@pytest.fixture(scope="module")
def client():
    limits = Limits(prompts=4, choices=3, stops=2, stop_length=5, prompt_tokens=50, body_bytes=5000)
    with in_thread(limits=limits, max_queue=20) as client:
        yield client
        assert is_well(client)


def ask(client, path, **fields):
    return client.post(path, json={**GOOD[path], **fields})


def refused(client, path, **fields):
    answer = ask(client, path, **fields)
    assert answer.status_code == 400, answer.text
    return error_of(answer)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
UNSUPPORTED = [
    *((path, "foo", 1) for path in BOTH),
    *((path, "foo", False) for path in BOTH),
    *((path, "logits_processors", ["x"]) for path in BOTH),
    *((path, "use_beam_search", True) for path in BOTH),
    *((path, "skip_special_tokens", False) for path in BOTH),
    (COMPLETIONS, "best_of", 2),
    (COMPLETIONS, "suffix", "x"),
    (COMPLETIONS, "messages", GOOD[CHAT]["messages"]),
    (COMPLETIONS, "max_completion_tokens", 5),
    (CHAT, "prompt", "x"),
    (CHAT, "tools", [TOOL]),
    (CHAT, "functions", [TOOL["function"]]),
    (CHAT, "function_call", "auto"),
    (CHAT, "tool_choice", "auto"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "web_search_options", {"search_context_size": "low"}),
    (CHAT, "audio", {"voice": "x", "format": "wav"}),
    (CHAT, "modalities", ["audio"]),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "store", True),
    (CHAT, "reasoning_effort", "low"),
    (CHAT, "verbosity", "low"),
    (CHAT, "chat_template", "{{ messages }}"),
    (CHAT, "continue_final_message", True),
]


@pytest.mark.parametrize(("path", "name", "value"), UNSUPPORTED, ids=lambda value: str(value)[:20])
def test_what_would_change_the_answer_and_is_not_supported_is_refused_by_name(client, path, name, value):
    error = refused(client, path, **{name: value})
    assert error["param"] == name and name in error["message"]
    assert error["code"] in ("unknown_parameter", "unsupported_value")


INSIDE = [
    ("speculation.foo", {"speculation": {"foo": 1}}),
    ("stream_options.foo", {"stream": True, "stream_options": {"foo": 1}}),
    ("response_format.foo", {"response_format": {"type": "text", "foo": 1}}),
    ("messages[0].tool_calls", {"messages": [{"role": "assistant", "content": "x", "tool_calls": [TOOL]}]}),
    ("messages[1].foo", {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "foo": 1}]}),
]


@pytest.mark.parametrize(("name", "fields"), INSIDE)
def test_fields_inside_of_others_are_refused_by_name_too(client, name, fields):
    error = refused(client, CHAT, **fields)
    assert error["param"] == name and name in error["message"]


WRONG = [
    *((path, "model", 5) for path in BOTH),
    *((path, "stream", "yes") for path in BOTH),
    *((path, "stream_options", {"include_usage": True}) for path in BOTH),
    *((path, "logit_bias", {"999999": 1}) for path in BOTH),
    *((path, "logit_bias", {"cat": 1}) for path in BOTH),
    *((path, "logit_bias", {"-1": 1}) for path in BOTH),
    *((path, "logit_bias", {"5": 101}) for path in BOTH),
    *((path, "logit_bias", {"5": None}) for path in BOTH),
    *((path, "logit_bias", [1]) for path in BOTH),
    *((path, "stop_token_ids", [257]) for path in BOTH),
    *((path, "stop_token_ids", [2**40]) for path in BOTH),
    *((path, "stop_token_ids", list(range(65))) for path in BOTH),
    *((path, "stop", "") for path in BOTH),
    *((path, "stop", ["a", 5]) for path in BOTH),
    *((path, "stop", ["a", "b", "c"]) for path in BOTH),
    *((path, "stop", "too long") for path in BOTH),
    *((path, "n", 0) for path in BOTH),
    *((path, "n", 4) for path in BOTH),
    *((path, "n", 2**62) for path in BOTH),
    *((path, "n", 1.5) for path in BOTH),
    *((path, "n", True) for path in BOTH),
    *((path, "seed", 2**64) for path in BOTH),
    *((path, "seed", -(2**63) - 1) for path in BOTH),
    *((path, "seed", 1.5) for path in BOTH),
    *((path, "max_tokens", -1) for path in BOTH),
    *((path, "max_tokens", 2**63) for path in BOTH),
    *((path, "max_tokens", "5") for path in BOTH),
    *((path, "min_tokens", 3) for path in BOTH),
    *((path, "temperature", -0.1) for path in BOTH),
    *((path, "temperature", 2.1) for path in BOTH),
    *((path, "temperature", "0") for path in BOTH),
    *((path, "top_p", 1.1) for path in BOTH),
    *((path, "top_k", -2) for path in BOTH),
    *((path, "top_k", 10**30) for path in BOTH),
    *((path, "min_p", -0.1) for path in BOTH),
    *((path, "presence_penalty", 3) for path in BOTH),
    *((path, "frequency_penalty", -3) for path in BOTH),
    *((path, "repetition_penalty", 0) for path in BOTH),
    *((path, "speculation", {"max_draft": -1}) for path in BOTH),
    *((path, "speculation", {"alternatives": 21}) for path in BOTH),
    *((path, "speculation", []) for path in BOTH),
    *((path, "response_format", {"type": "regex"}) for path in BOTH),
    *((path, "response_format", {"type": "json_schema"}) for path in BOTH),
    *((path, "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}) for path in BOTH),
    *((path, "response_format", "json_object") for path in BOTH),
    (COMPLETIONS, "logprobs", 21),
    (COMPLETIONS, "logprobs", True),
    (COMPLETIONS, "prompt", []),
    (COMPLETIONS, "prompt", ""),
    (COMPLETIONS, "prompt", [[]]),
    (COMPLETIONS, "prompt", [""]),
    (COMPLETIONS, "prompt", [257]),
    (COMPLETIONS, "prompt", [-1]),
    (COMPLETIONS, "prompt", [2**70]),
    (COMPLETIONS, "prompt", [1, "a"]),
    (COMPLETIONS, "prompt", [True]),
    (COMPLETIONS, "prompt", None),
    (COMPLETIONS, "prompt", {"text": "x"}),
    (COMPLETIONS, "prompt", ["a"] * 5),
    (COMPLETIONS, "prompt", "a" * 51),
    (COMPLETIONS, "prompt", [5] * 51),
    (CHAT, "top_logprobs", 5),
    (CHAT, "max_completion_tokens", 5),
    (CHAT, "messages", []),
    (CHAT, "messages", None),
    (CHAT, "messages", "hello"),
    (CHAT, "messages", ["hello"]),
    (CHAT, "messages", [{"content": "x"}]),
    (CHAT, "messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
    (CHAT, "messages", [{"role": "function", "content": "x", "name": "f"}]),
    (CHAT, "messages", [{"role": "nobody", "content": "x"}]),
    (CHAT, "messages", [{"role": "user", "content": 5}]),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "text"}]}]),
    (CHAT, "messages", [{"role": "user", "content": "a" * 51}]),
    (CHAT, "messages", [{"role": "user", "content": "x", "name": "n" * 257}]),
]


@pytest.mark.parametrize(("path", "name", "value"), WRONG, ids=lambda value: str(value)[:30])
def test_values_outside_of_what_is_allowed_are_refused_by_name(client, path, name, value):
    error = refused(client, path, **{name: value})
    assert error["param"] == name
    assert name in error["message"] or name in ("prompt", "messages")


NAMED = [
    ({"rule": "none"}, "rule"),
    ({"drafter": "nobody"}, "drafter"),
    ({"rule": "lossy"}, "rule"),
    ({"rule": "x" * 3000}, "rule"),
]


@pytest.mark.parametrize(("speculation", "name"), NAMED, ids=["rule", "drafter", "a lossy rule", "a long name"])
def test_unknown_rules_and_drafters_are_refused_by_name(client, speculation, name):
    error = refused(client, COMPLETIONS, speculation=speculation)
    assert error["param"] == name and f"{name} is" in error["message"]


def test_a_model_of_another_name_is_not_there(client):
    answer = ask(client, CHAT, model="gpt-4\n\x1b[31m" + "x" * 900)
    assert answer.status_code == 404
    error = error_of(answer)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_lengths_beyond_the_servers_limit_have_the_code_that_clients_know(client):
    assert refused(client, COMPLETIONS, prompt="a" * 51)["code"] == "context_length_exceeded"
    assert client.post(COMPLETIONS, json={"prompt": "a" * 5000}).status_code == 413


@pytest.mark.parametrize("path", BOTH)
def test_null_is_as_good_as_absent_for_every_field(client, path):
    kind = CompletionRequest if path == COMPLETIONS else ChatRequest
    needed = "prompt" if path == COMPLETIONS else "messages"
    names = [*kind.model_fields, *kind.neutral, "foo", "tools"]
    nulls = {name: None for name in names if name not in (needed, "max_tokens")}
    assert len(nulls) > 25
    answer = ask(client, path, **nulls)
    assert answer.status_code == 200, answer.text
    for name, field in (("speculation", Speculation), ("stream_options", StreamOptions)):
        inner = {each: None for each in field.model_fields if field.model_fields[each].default is None}
        answer = ask(client, path, stream=True, **{name: {**inner, "foo": None}})
        assert answer.status_code == 200, answer.text


def test_null_is_as_good_as_absent_inside_of_messages(client):
    nulls = {name: None for name in [*Message.model_fields, *Message.neutral, "foo"] if name != "role"}
    assert ask(client, CHAT, messages=[{"role": "user", "content": "x"}, {"role": "assistant", **nulls}]).status_code == 200


NEUTRAL = {
    "user": "someone",
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "x",
    "safety_identifier": "x",
    "tools": [],
    "foo": {},
    "seed": 2**64 - 1,
    "max_tokens": 0,
    "min_tokens": 2,
    "top_k": -1,
    "min_p": 1,
    "temperature": 5e-324,
    "repetition_penalty": 10,
    "presence_penalty": -2,
    "logit_bias": {"5": -100, "0256": 100.0},
    "stop": [],
    "stop_token_ids": [0, 0],
    "n": 3,
    "response_format": {"type": "text"},
    "stream": False,
    "speculation": {"max_draft": 2**63 - 1, "rule": "auto", "drafter": None, "off": True, "trace": True, "alternatives": 20},
}
NEUTRAL_CHAT = {
    "store": False,
    "tool_choice": "none",
    "function_call": "none",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "max_completion_tokens": 2,
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": "", "refusal": None, "annotations": []},
        {"role": "user", "content": "", "name": "someone"},
    ],
}
NEUTRAL_COMPLETIONS = {"best_of": 1, "suffix": "", "prompt": [[0], [256]], "echo": False, "logprobs": 0}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *((path, name, value) for path in BOTH for name, value in NEUTRAL.items()),
        *((CHAT, name, value) for name, value in NEUTRAL_CHAT.items()),
        *((COMPLETIONS, name, value) for name, value in NEUTRAL_COMPLETIONS.items()),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_changes_nothing_or_is_only_extreme_is_accepted(client, path, name, value):
    answer = ask(client, path, **{name: value})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63])
def test_seeds_of_64_bits_are_taken_with_either_sign(client, seed):
    texts = [ask(client, COMPLETIONS, seed=given, max_tokens=20).json()["choices"][0]["text"] for given in (seed, seed % 2**64)]
    assert texts[0] == texts[1]


MANY = {
    "prompt": [None, -1, [], [-1], [[-1]]],
    "stop": [None],
    "stop_token_ids": [None, -1],
    "messages": [None, {}, {"role": "x"}],
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, values in MANY.items() for wrong in values], ids=str)
def test_a_thousand_wrong_elements_make_few_errors(name, wrong):
    """Each costs a kilobyte: four megabytes of body could be made to cost four gigabytes."""
    kind = ChatRequest if name == "messages" else CompletionRequest
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"prompt": "x"} | {name: [wrong] * 1000})
    assert caught.value.error_count() < 10


def test_a_message_of_a_thousand_wrong_parts_makes_few_errors():
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": [{"role": "user", "content": [{}] * 1000}]})
    assert caught.value.error_count() < 10


@pytest.mark.parametrize("path", BOTH)
def test_a_huge_max_tokens_is_cut_by_the_context(path):
    with in_thread(runner=ToyRunner(toy_language(), 257, max_length=40)) as client:
        answer = ask(client, path, max_tokens=2**63 - 1, ignore_eos=True).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 40
        too_long = ask(client, path, **({"prompt": "a" * 40} if path == COMPLETIONS else {"messages": [USER]}))
        assert too_long.status_code == 400 and error_of(too_long)["code"] == "context_length_exceeded"
