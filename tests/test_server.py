"""A real server process, driven by the real `openai` client: what it answers is what the engine makes."""

import asyncio
import json

import httpx
import openai
import pytest
from serving import serving

from truedraw.engine import Engine
from truedraw.types import SamplingParams

PROMPT = "the cat sat on the mat. the cat"


@pytest.fixture(scope="module")
def server():
    with serving("--slots", "4", "--context", "512") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def engine():
    with Engine.load("toy", drafter="none", context=512) as made:
        yield made


def ask(client, prompt=PROMPT, **options):
    extra = {name: options.pop(name) for name in list(options) if name in EXTENSIONS}
    return client.completions.create(model="toy", prompt=prompt, extra_body=extra, **{"max_tokens": 40, "seed": 1, **options})


EXTENSIONS = (
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "return_token_ids", "speculation",
    "response_format",
)  # fmt: skip


def joined(chunks):
    """The choices that a stream adds up to, by index, and its last usage and statistics."""
    choices, usage, speculation = {}, None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        speculation = getattr(chunk, "speculation", None) or speculation
        for part in chunk.choices:
            whole = choices.setdefault(part.index, {"text": "", "ids": [], "logprobs": [], "offsets": [], "finish": None})
            whole["text"] += part.text
            whole["ids"] += getattr(part, "token_ids", None) or []
            if part.logprobs:
                whole["logprobs"] += part.logprobs.token_logprobs
                whole["offsets"] += part.logprobs.text_offset
            assert whole["finish"] is None, "nothing follows the end"
            whole["finish"] = part.finish_reason
    return choices, usage, speculation


# ---------------------------------------------------------------- the answer is the engine's


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        ({"temperature": 0}, {}),
        ({"temperature": 0.7, "top_p": 0.8}, {}),
        ({"top_k": 3}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.2}, {}),
        ({"presence_penalty": 1.5, "frequency_penalty": -0.5}, {}),
        ({"repetition_penalty": 1.5}, {}),
        ({"logit_bias": {"101": -100, "97": 3.5}}, {"logit_bias": {101: -100.0, 97: 3.5}}),
        ({"stop": "sat"}, {"stop": ("sat",)}),
        ({"stop": ["ma", "on t"]}, {"stop": ("ma", "on t")}),
        ({"stop_token_ids": [32]}, {"stop_token_ids": (32,)}),
        ({"min_tokens": 9, "stop": "t"}, {"stop": ("t",)}),
        ({"ignore_eos": True, "max_tokens": 60}, {}),
        ({"max_tokens": 0}, {}),
        ({"max_tokens": 100_000}, {}),
        ({"seed": -5}, {"seed": 2**64 - 5}),
        ({"seed": 2**64 - 1}, {}),
    ],
)
def test_every_sampling_field_does_what_the_engine_does(client, engine, options, same):
    """Streamed or not, drafted or not: one text, and text, ids, log-probabilities, usage and finish reason of one prefix."""
    params = SamplingParams(**{"max_tokens": 40, "seed": 1, **options, **same})
    (expected,) = engine.generate([PROMPT], params, top_logprobs=0)
    for speculation in (None, {"off": True}, {"drafter": "random", "max_draft": 3}):
        answer = ask(client, **options, logprobs=0, return_token_ids=True, speculation=speculation)
        choice = answer.choices[0]
        logprobs = [record.logprob.logprob for record in expected.records]
        assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
        assert choice.token_ids == list(expected.tokens)
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs)
        assert answer.usage.completion_tokens == len(expected.tokens)
        assert answer.usage.prompt_tokens == len(PROMPT) == len(answer.prompt_token_ids)
        chunks = ask(
            client, **options, logprobs=0, return_token_ids=True, speculation=speculation,
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        choices, usage, _ = joined(chunks)
        assert choices[0] == {
            "text": expected.text,
            "ids": list(expected.tokens),
            "logprobs": pytest.approx(logprobs),
            "offsets": choice.logprobs.text_offset,
            "finish": expected.finish_reason,
        }
        assert usage.completion_tokens == len(expected.tokens)


def test_the_end_of_the_context_ends_the_text(client):
    answer = ask(client, prompt="a" * 500, max_tokens=None, ignore_eos=True, speculation={"drafter": "suffix"})
    assert answer.choices[0].finish_reason == "length"
    cut = ask(client, prompt="a" * 500, max_tokens=400, ignore_eos=True, return_token_ids=True)
    assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (12, "length")
    assert len(cut.choices[0].token_ids) == 12


def test_an_end_of_text_inside_an_accepted_run(client, engine):
    """Byte 256 ends the toy's texts: seeds until one ends inside a step that accepted drafts."""
    ended = 0
    for seed in range(60):
        answer = ask(client, seed=seed, max_tokens=60, return_token_ids=True, speculation={"trace": True, "drafter": "suffix"})
        (expected,) = engine.generate([PROMPT], SamplingParams(seed=seed, max_tokens=60))
        choice = answer.choices[0]
        assert choice.token_ids == list(expected.tokens) and choice.text == expected.text
        assert [token["id"] for token in choice.speculation["tokens"]] == choice.token_ids
        assert sum(step["emitted"] for step in choice.speculation["steps"]) == len(choice.token_ids)
        ended += choice.finish_reason == "stop" and choice.speculation["steps"][-1]["accepted"] > 0
    assert ended > 0


def test_choices_and_prompts_are_numbered_and_keyed(client, engine):
    answer = ask(client, prompt=[PROMPT, "on the"], n=3, max_tokens=12)
    expected = engine.generate([PROMPT, "on the"], SamplingParams(seed=1, max_tokens=12, n=3))
    texts = {(i % 2, result.choice): result.text for i, result in enumerate(expected)}
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [texts[place, choice] for place in range(2) for choice in range(3)]
    choices, _, _ = joined(ask(client, prompt=[PROMPT, "on the"], n=3, max_tokens=12, stream=True))
    assert [choices[i]["text"] for i in range(6)] == [choice.text for choice in answer.choices]
    by_ids = ask(client, prompt=[list(PROMPT.encode()), list(b"on the")], n=3, max_tokens=12)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in answer.choices]
    assert by_ids.usage.total_tokens == answer.usage.total_tokens


def test_echo_repeats_and_judges_the_prompt(client, engine):
    (expected,) = engine.generate([PROMPT], SamplingParams(seed=1, max_tokens=8), top_logprobs=2, prompt_logprobs=True)
    answer = ask(client, echo=True, logprobs=2, max_tokens=8)
    choice = answer.choices[0]
    assert choice.text == PROMPT + expected.text
    told = [each.logprob for each in expected.prompt_logprobs] + [record.logprob.logprob for record in expected.records]
    assert choice.logprobs.token_logprobs == [None, *(pytest.approx(value) for value in told)]
    assert choice.logprobs.text_offset == list(range(len(PROMPT) + 8))
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs[1:])
    choices, _, _ = joined(ask(client, echo=True, logprobs=2, max_tokens=8, stream=True))
    assert choices[0]["text"] == choice.text and choices[0]["logprobs"] == choice.logprobs.token_logprobs
    alone = ask(client, echo=True, logprobs=2, max_tokens=0)
    assert alone.choices[0].text == PROMPT and alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs[: len(PROMPT)]
    assert ask(client, echo=True, prompt=[list(b"abc")], max_tokens=1).choices[0].text[:3] == "abc"


def test_logprobs_are_those_of_plain_decoding_for_every_origin(client):
    plain = ask(client, logprobs=3, temperature=0.6, speculation={"off": True}).choices[0]
    drafted = ask(client, logprobs=3, temperature=0.6, speculation={"trace": True})
    assert {token["origin"] for token in drafted.choices[0].speculation["tokens"]} >= {"draft", "residual"}
    assert drafted.choices[0].logprobs == plain.logprobs


# ---------------------------------------------------------------- speculation


def test_statistics_and_traces_tell_one_story(client):
    answer = ask(client, speculation={"trace": True, "alternatives": 3, "max_draft": 4})
    stats, trace = answer.speculation, answer.choices[0].speculation
    assert stats["steps"] == len(trace["steps"]) and stats["drafter"] == "suffix" and stats["rule"] == "coupled"
    assert stats["proposed"] == sum(step["proposed"] for step in trace["steps"])
    assert stats["accepted"] == sum(token["origin"] == "draft" for token in trace["tokens"]) > 0
    assert stats["tokens_per_step"] == pytest.approx(len(trace["tokens"]) / stats["steps"])
    assert all(step["proposed"] <= 4 for step in trace["steps"])
    for token in trace["tokens"]:
        assert len(token["top"]) == 3 and 0 < token["p"] <= 1
        assert (token["q"] is None) == (token["origin"] != "draft")
    assert b"".join(bytes(token["bytes"]) for token in trace["tokens"]).decode() == answer.choices[0].text
    chunks = list(ask(client, speculation={"trace": True, "alternatives": 3, "max_draft": 4}, stream=True))
    streamed = [token for chunk in chunks for choice in chunk.choices for token in choice.speculation["tokens"]]
    assert streamed == trace["tokens"]
    assert sum(hasattr(chunk, "speculation") for chunk in chunks) == 1
    counts = ("steps", "proposed", "accepted", "acceptance_by_depth")
    assert {name: chunks[-1].speculation[name] for name in counts} == {name: stats[name] for name in counts}


def test_off_is_plain_decoding_and_names_are_checked(client):
    for speculation in ({"off": True}, {"drafter": "none"}, {"max_draft": 0}):
        assert ask(client, speculation=speculation).speculation["proposed"] == 0
    assert ask(client, speculation={"rule": "auto", "drafter": "ngram"}).speculation["drafter"] == "ngram"
    for speculation, message in (
        ({"drafter": "model"}, "drafter is 'model': allowed is one of suffix, ngram, random"),
        ({"rule": "nonsense"}, "rule is 'nonsense'"),
        ({"rule": "lenience:0.5"}, "has to be allowed"),
        ({"lookahead": 3}, "speculation.lookahead is not supported"),
        ({"max_draft": -1}, "speculation.max_draft"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, speculation=speculation)
        assert message in error.value.message, error.value.message


def test_lossy_rules_tell_their_drift_where_they_are_allowed():
    with serving("--allow-lossy") as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="-") as own:
        answer = ask(own, speculation={"rule": "lenience:0.5", "drafter": "random"}, max_tokens=60)
        assert answer.speculation["rule"] == "lenience:0.5" and answer.speculation["drift"]["bound"] > 0
        assert "lenience" in own.models.list().data[0].truedraw["lossy_rules"]


# ---------------------------------------------------------------- one seed, one text


def test_a_seeded_text_is_the_same_alone_among_fifteen_and_after_a_thousand(server, client):
    alone = ask(client, seed=77, max_tokens=60)

    async def crowd(count, speculation):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as many:
            others = [
                many.completions.create(model="toy", prompt=f"the {i} ", max_tokens=3 + i % 20, temperature=1)
                for i in range(count)
            ]
            mine = many.completions.create(
                model="toy", prompt=PROMPT, max_tokens=60, seed=77, extra_body={"speculation": speculation}
            )
            *_, answer = await asyncio.gather(*others, mine)
            return answer

    for speculation in ({}, {"off": True}):
        assert asyncio.run(crowd(15, speculation)).choices[0].text == alone.choices[0].text
    for _ in range(20):
        asyncio.run(crowd(50, {}))
    again = ask(client, seed=77, max_tokens=60)
    assert again.choices[0].text == alone.choices[0].text
    health = httpx.get(f"{server.url}/metrics").text
    assert "truedraw_choices_running 0.0" in health and "truedraw_choices_waiting 0.0" in health


def test_shared_prompts_are_read_once_and_told_so(client):
    long = "once upon a time there was a cat. " * 8
    first = ask(client, prompt=long, max_tokens=2)
    again = ask(client, prompt=long + "it", max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens < 16
    assert again.usage.prompt_tokens_details.cached_tokens >= len(long) - 1


# ---------------------------------------------------------------- models, errors, pages


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "toy" and client.models.retrieve("toy").truedraw == model.truedraw
    assert model.truedraw["drafters"] == ["suffix", "ngram", "random", "none"] and model.truedraw["context"] == 512
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-4")
    assert error.value.code == "model_not_found"


def test_errors_come_by_their_classes(client):
    with pytest.raises(openai.NotFoundError) as wrong:
        client.completions.create(model="other", prompt="x")
    assert wrong.value.code == "model_not_found" and wrong.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, prompt="a" * 512)
    assert long.value.code == "context_length_exceeded" and "512" in long.value.message
    with pytest.raises(openai.BadRequestError) as hot:
        ask(client, temperature=3)
    assert hot.value.param == "temperature" and "3 was given" in hot.value.message
    with pytest.raises(openai.BadRequestError, match="no chat template") as chat:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    assert chat.value.code == "no_chat_template"


def test_the_pages_are_there_and_need_nothing_from_outside(server):
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").json() == {"status": "ok"}
        page = http.get("/")
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
        docs = http.get("/docs")
        assert docs.status_code == 200 and "//cdn" not in docs.text
        for path in ("static-offline-docs/swagger-ui-bundle.js", "static-offline-docs/swagger-ui.css"):
            assert path in docs.text and http.get(f"/{path}").status_code == 200
        document = http.get("/openapi.json").json()
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(document["paths"])
        assert "speculation" in document["components"]["schemas"]["ChatRequest"]["properties"]


def test_metrics_count_what_happened(server, client):
    def read():
        lines = [line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = read()
    answer = ask(client, seed=9, speculation={"drafter": "suffix"})
    after = read()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    stats = answer.speculation
    origins = sum(value for name, value in grown.items() if name.startswith("truedraw_tokens_total"))
    assert origins == answer.usage.completion_tokens
    assert grown['truedraw_tokens_total{origin="draft"}'] == stats["accepted"]
    depths = [value for name, value in grown.items() if name.startswith("truedraw_drafts_proposed_total")]
    assert sum(depths) == stats["proposed"]
    assert grown['truedraw_requests_total{reason="length"}'] + grown.get('truedraw_requests_total{reason="stop"}', 0) == 1
    assert grown['truedraw_responses_total{endpoint="completions",status="200"}'] == 1
    assert grown['truedraw_step_seconds_count{part="target"}'] == stats["steps"] == grown["truedraw_draft_length_count"]
    assert sum(grown[f'truedraw_prompt_tokens_total{{source="{source}"}}'] for source in ("cached", "copied", "computed")) == len(
        PROMPT
    )


# ---------------------------------------------------------------- private


def test_keys_keep_their_caches_apart_unless_told_otherwise(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key-123\nsecond-key-456\n")
    long = "a secret that nobody else may find out by timing. " * 4

    def cached(url, key):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as own:
            return ask(own, prompt=long, max_tokens=1).usage.prompt_tokens_details.cached_tokens

    for options, shared in (((), False), (("--share-caches",), True)):
        with serving("--slots", "2", "--api-key-file", str(keys), *options) as running:
            assert cached(running.url, "first-key-123") == 0
            assert (cached(running.url, "second-key-456") > 0) == shared
            assert cached(running.url, "first-key-123") > 0
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key="third-key-789", max_retries=0) as other:
                with pytest.raises(openai.AuthenticationError) as error:
                    ask(other)
                assert error.value.code == "invalid_api_key"


def test_kept_answers_are_kept_for_each_key(tmp_path):
    kept = tmp_path / "answers.corpus"
    options = ("--corpus", str(kept), "--api-key", "first-key-123", "--api-key", "second-key-456")
    with serving(*options) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="first-key-123") as own:
        ask(own, max_tokens=50, ignore_eos=True)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 1 and files[0].startswith("answers-") and "first-key" not in files[0]


def test_a_steady_stream_has_one_pace_and_one_size(engine):
    (expected,) = engine.generate([PROMPT], SamplingParams(seed=1, max_tokens=200, ignore_eos=True))
    with serving("--steady-stream", "--context", "512") as running, httpx.Client(base_url=running.url) as http:
        body = {"prompt": PROMPT, "seed": 1, "max_tokens": 200, "ignore_eos": True, "stream": True}
        sizes, text, finish, speculation = [], "", None, None
        with http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not line or line == "data: [DONE]":
                    continue
                sizes.append(len(line.encode()))
                event = json.loads(line[6:])
                speculation = event.get("speculation", speculation)
                for choice in event["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"]
        assert text == expected.text and finish == "length" and speculation["steps"] > 0
        assert len(set(sizes)) == 1 and len(sizes) >= 3, "the number and size of chunks tell nothing of the steps"
        for extra in ({"logprobs": 1}, {"return_token_ids": True}, {"speculation": {"trace": True}}):
            refused = http.post("/v1/completions", json={**body, **extra})
            assert refused.status_code == 400 and "--steady-stream" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json={**body, "stream": False, "logprobs": 1}).status_code == 200


# ---------------------------------------------------------------- response_format

PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


def test_response_formats_hold_on_every_position_and_change_nothing_else(client):
    asked = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}
    for seed in range(12):
        texts = set()
        for speculation in ({"off": True}, {"drafter": "random", "max_draft": 3}, {"drafter": "suffix"}):
            answer = ask(client, seed=seed, max_tokens=80, response_format=asked, speculation=speculation)
            texts.add(answer.choices[0].text)
        assert len(texts) == 1
        pet = json.loads(texts.pop())
        assert pet["kind"] in ("cat", "dog") and 0 <= pet["age"] <= 30 and answer.choices[0].finish_reason == "stop"
    anything = ask(client, max_tokens=120, temperature=0, response_format={"type": "json_object"})
    assert anything.choices[0].text.startswith("{")
    assert ask(client, response_format={"type": "text"}).choices[0].text == ask(client).choices[0].text


@pytest.mark.parametrize(
    ("format", "more", "message"),
    [
        ({"type": "yaml"}, {}, "response_format.type"),
        ({"type": "json_schema"}, {}, "exactly when its type"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, {}, "has no schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}, {}, "response_format"),
        ({"type": "json_object"}, {"ignore_eos": True}, "ignore_eos does not go"),
        ({"type": "json_object"}, {"min_tokens": 3}, "min_tokens does not go"),
    ],
)
def test_response_formats_that_cannot_be_held_to_are_refused(client, format, more, message):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, response_format=format, **more)
    assert message in error.value.message, error.value.message
