"""The planted server: what it serves has the law that it says, right or wrong, and HTTP goes wrong only where it should.

Seeds are fixed. Chi-square and normal bounds are two-sided tests at 1e-5 or rarer each; what they would see is said beside them.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress

import httpx
import numpy as np
import pytest

from truedraw.audit.planted import (
    END,
    FAULTS,
    VOCAB,
    Model,
    PlantedServer,
    Settings,
    Trouble,
    decode,
    encode,
    mean_tv,
    strength_for,
)
from truedraw.audit.planted.decoder import Counted
from truedraw.audit.planted.law import follow
from truedraw.audit.planted.model import CLASS_OF, classes, shape
from truedraw.audit.planted.vocabulary import FIRST_HALF, SECOND_HALF, chat_prompt
from truedraw.errors import InvalidParameter
from truedraw.prove.goodness import g_test

CLIENT = httpx.Client()
LAW_FAULTS = [fault for fault in FAULTS.values() if fault.shows == "law"]
PROMPT = " the red fish sings"


@pytest.fixture(scope="module", autouse=True)
def _client_is_closed():
    yield
    CLIENT.close()


def post(server, path="/v1/completions", status=200, headers=None, **body):
    answer = CLIENT.post(server.url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def chat(server, text=PROMPT, **body):
    return post(server, "/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)


def events(server, path="/v1/completions", **body):
    """The events of a stream, without [DONE]."""
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"] == "text/event-stream"
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def in_fields(settings: Settings) -> dict:
    fields = {name: getattr(settings, name) for name in Settings.__slots__ if name != "logit_bias"}
    return {**fields, "logit_bias": {str(token): bias for token, bias in settings.logit_bias}}


def outputs(server, prompts, length, **body):
    """(length, prompts) token ids, END beyond the end."""
    answer = post(server, prompt=[list(map(int, prompt)) for prompt in prompts], max_tokens=length, return_token_ids=True, **body)
    table = np.full((len(prompts), length), END)
    for choice in answer["choices"]:
        table[choice["index"], : len(choice["token_ids"])] = choice["token_ids"]
    return table.T


# ---------------------------------------------------------------- vocabulary and model


@pytest.mark.parametrize("text", ["", " red green", " redgreen reds", "Été à\u0000 🙂 and", "x" * 50 + " fish\n"])
def test_every_text_is_encoded_and_comes_back(text):
    assert decode(encode(text)) == text.encode()


def test_words_are_tokens_and_a_character_has_two_halves():
    assert len(encode(" red fish and")) == 3
    assert encode("é") == [FIRST_HALF, SECOND_HALF]
    assert decode([FIRST_HALF, SECOND_HALF]) == "é".encode()
    tokens = np.random.default_rng(1).integers(1, VOCAB - 2, 50).tolist()
    assert encode(decode(tokens).decode()) == tokens


def test_the_model_is_peaked_like_a_real_one():
    model = Model()
    p, q = shape(model.target, Settings()), shape(model.draft, Settings())
    entropy = -(p * np.log(p)).sum(-1).mean()
    assert 1.2 < entropy < 1.9
    assert 0.4 < p.max(-1).mean() < 0.6
    assert 0.2 < 0.5 * np.abs(p - q).sum(-1).mean() < 0.3
    assert 0.002 < p[..., END].mean() < 0.01
    assert (p[:, FIRST_HALF, SECOND_HALF] > 0.9).all()


def test_a_kernel_moves_each_row_by_exactly_its_distance():
    p, moved = shape(Model().target, Settings()), shape(Model(kernel_tv=0.02).target, Settings())
    np.testing.assert_allclose(0.5 * np.abs(p - moved).sum(-1), 0.02, rtol=1e-9)
    assert (moved > 0).all()
    ups = (np.take_along_axis(moved - p, p.argmax(-1)[..., None], -1) > 0).mean()
    assert 0.2 < ups < 0.8, "in no fixed direction"
    with pytest.raises(InvalidParameter):
        Model(kernel_tv=0.3)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(0.0),
        Settings(0.7, top_k=5, top_p=0.9, min_p=0.05),
        Settings(top_p=0.5),
        Settings(presence_penalty=0.5, frequency_penalty=-0.4, repetition_penalty=1.3, logit_bias=((3, 4.0), (5, -100.0))),
    ],
)
def test_rows_are_shaped_as_truedraw_shapes_them(settings):
    """Two implementations of the same words."""
    from truedraw.sampling import shape as ours
    from truedraw.types import SamplingParams

    fields = {name: getattr(settings, name) for name in Settings.__slots__} | {"logit_bias": dict(settings.logit_bias)}
    tokens = encode(" red fish red sings with red")
    with PlantedServer() as server:
        row = server.row(tokens, settings, prompt_length=2)
    logits = Model().target[tokens[-2], tokens[-1]]
    np.testing.assert_allclose(row, ours(logits, SamplingParams(**fields), np.array(tokens), 2), atol=1e-12)


def test_counts_move_both_ways():
    tokens = [3, 100, 4, 3, 5, 4, 4]
    counts = Counted(tokens, 3)
    for place in (3, 7, 4, 6, 3, 5):
        counts.move_to(place)
        assert counts.output.tolist() == np.bincount(tokens[3:place], minlength=VOCAB).tolist()
        assert counts.seen.tolist() == np.bincount(tokens[:place], minlength=VOCAB)[:VOCAB].tolist()


def test_tokens_outside_the_vocabulary_select_rows_too():
    assert list(CLASS_OF) == classes(np.arange(VOCAB + 256)).tolist()
    assert max(CLASS_OF) < 64
    with PlantedServer() as server:
        assert not np.array_equal(server.row(encode("ab")), server.row(encode("ac")))
        assert server.row([]).sum() == pytest.approx(1)


# ---------------------------------------------------------------- the law


def joint(server, prompt, settings):
    """Of three tokens, exactly: {tokens: probability}; shorter where the text ends."""
    law = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, weight in law.items():
            if text and text[-1] == END:
                longer[text] = weight
            else:
                row = server.row(prompt + list(text), settings, prompt_length=len(prompt))
                longer |= {(*text, token): weight * p for token, p in enumerate(row.tolist())}
        law = longer
    return law


def chi_square(server, prompt, settings, n, **body):
    fields = {**in_fields(settings), **body}
    choices = post(server, prompt=[prompt] * (n // 1000), n=1000, max_tokens=3, return_token_ids=True, **fields)["choices"]
    law = joint(server, prompt, settings)
    assert sum(law.values()) == pytest.approx(1)
    places = {text: i for i, text in enumerate(law)}
    counts = np.bincount([places[tuple(choice["token_ids"])] for choice in choices], minlength=len(places))
    return g_test(counts, np.array(list(law.values()))).p_value


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("settings", [Settings(), Settings(0.8, top_p=0.9)])
def test_three_tokens_of_a_correct_server_have_their_exact_law(settings, off):
    """Null: the product of rows. n = 6,000 in about 270 cells, alpha 1e-5."""
    with PlantedServer(seed=5) as server:
        assert chi_square(server, encode(PROMPT), settings, 6000, speculation={"off": off}) > 1e-5


def test_the_same_test_sees_a_wrong_law():
    """The naive resample, 0.08 per token: below 1e-70 with each of 20 other seeds."""
    with PlantedServer("naive resample", seed=5) as server:
        assert chi_square(server, encode(PROMPT), Settings(), 6000) < 1e-5
        assert chi_square(server, encode(PROMPT), Settings(), 6000, speculation={"off": True}) > 1e-5


def z_scores(fault, settings, strength, tokens, prompts):
    """Of tokens (length, texts) against law.py's law of them: along sign(law - p), and for the most likely token.

    Also the mean shift that was measured and the one that law.py has for these texts. Both directions are known
    before the token comes, so each score is a sum of martingale differences, and nearly normal.
    """
    running = np.ones(tokens.shape[1], dtype=bool)
    sums = np.zeros((2, 2))
    shifts, count = np.zeros(2), 0
    for place in follow(fault, settings, strength, prompts, len(tokens), draw=lambda _, at: tokens[at]):
        rows = np.arange(len(running))
        best = np.eye(VOCAB)[place.p.argmax(1)]
        for i, g in enumerate((np.sign(place.law - place.p), best)):
            mean = (place.law * g).sum(1)
            sums[i] += (g[rows, place.tokens] - mean)[running].sum(), ((place.law * g**2).sum(1) - mean**2)[running].sum()
        sign = np.sign(place.law - place.p)
        shifts[0] += 0.5 * (sign[rows, place.tokens] - (place.p * sign).sum(1))[running].sum()
        shifts[1] += 0.5 * np.abs(place.law - place.p).sum(1)[running].sum()
        count += running.sum()
        running &= place.tokens != END
    return sums[:, 0] / np.sqrt(np.maximum(sums[:, 1], 1e-9)), shifts / count


def random_prompts(n, seed=3):
    return np.random.default_rng(seed).integers(1, VOCAB - 2, size=(n, 4))


@pytest.mark.parametrize("strength", [1.0, 0.4])
@pytest.mark.parametrize("fault", LAW_FAULTS, ids=lambda fault: fault.name)
def test_each_fault_has_the_law_that_is_said_of_it(fault, strength):
    """The decoder's tokens against law.py, which drafts nothing. Null: they agree. 120 texts of at most 64 tokens: a mean
    that is off by 0.03 in either direction is seen with power 0.9 (19 of 20 seeds) at alpha 1e-5."""
    prompts = random_prompts(120)
    with PlantedServer(fault, strength, seed=11) as server:
        tokens = outputs(server, prompts, 64, **in_fields(fault.settings))
        plain = outputs(server, prompts, 64, speculation={"off": True}, **in_fields(fault.settings))
    z, (measured, said) = z_scores(fault, fault.settings, strength, tokens, prompts)
    assert np.abs(z).max() < 4.6, (z, measured, said)
    assert said == pytest.approx(mean_tv(fault, strength=strength).mean, rel=0.15)
    if said > 0.06:
        z_plain, (measured_plain, _) = z_scores(fault, fault.settings, strength, plain, prompts)
        assert abs(z_plain[0]) > 4.6 and measured_plain < measured / 2, "without speculation the fault is absent"


def test_a_fault_of_a_given_size_can_be_planted():
    planting = strength_for(FAULTS["naive resample"], 0.03)
    assert planting.reached and 0 < planting.strength < 1
    assert planting.shift.mean == pytest.approx(0.03, rel=0.02)
    again = mean_tv(FAULTS["naive resample"], strength=planting.strength, seed=9)
    assert abs(again.mean - 0.03) < 5 * again.error
    weak = strength_for(FAULTS["naive resample"], 0.9)
    assert not weak.reached and weak.strength == 1 and weak.shift.mean < 0.9


def test_faults_outside_their_settings_shift_nothing():
    assert mean_tv(FAULTS["one-sided top-p"], Settings()).mean == pytest.approx(0, abs=1e-12)
    assert mean_tv(FAULTS["seed ignored"]).mean == 0


# ---------------------------------------------------------------- what a request asks for


@pytest.mark.parametrize("settings", [Settings(), Settings(0.7, top_k=6), Settings(presence_penalty=0.5, repetition_penalty=1.2)])
def test_a_seed_has_one_text_on_and_off(settings):
    with PlantedServer() as server:
        for seed in range(10):
            body = {"prompt": PROMPT, "seed": seed, "max_tokens": 40, "n": 2, "return_token_ids": True, **in_fields(settings)}
            on, off = post(server, **body), post(server, speculation={"off": True}, **body)
            assert on["choices"] == off["choices"]
            assert on["choices"][0]["text"] != on["choices"][1]["text"]
            assert on["speculation"]["accepted"] > 0 == off["speculation"]["proposed"]


@pytest.mark.parametrize("seed", [None, 1])
def test_drafts_are_accepted_as_often_as_the_models_agree(seed):
    """By the p/q rule about 1 - TV(p, q) = 3/4 of those that are reached; by race somewhat fewer."""
    with PlantedServer(seed=1) as server:
        told = post(server, prompt=PROMPT, n=100, max_tokens=40, seed=seed, ignore_eos=True)
    statistics = told["speculation"]
    assert 0.35 < statistics["accepted"] / statistics["proposed"] < 0.75
    assert statistics["tokens_per_step"] == told["usage"]["completion_tokens"] / statistics["steps"]
    assert 2 < statistics["tokens_per_step"] < 3.2


def test_a_seeded_text_has_the_law():
    """Null: the product of rows; 120 texts, one seed each: the same bounds as for faults, of which there is none."""
    prompts = random_prompts(60)
    with PlantedServer() as server:
        tokens = np.concatenate(
            [outputs(server, prompts[i : i + 1], 64, seed=i, speculation={"off": i % 2 == 0}) for i in range(60)], axis=1
        )
    z, (_, said) = z_scores(FAULTS["naive resample"], Settings(), 1e-9, tokens, prompts)
    assert np.abs(z).max() < 4.6
    assert said < 1e-6


def test_temperature_zero_has_one_text_and_forgets_no_penalty():
    settings = Settings(0.0, presence_penalty=2.0, frequency_penalty=2.0)
    with PlantedServer() as server:
        texts = [
            post(server, prompt=PROMPT, max_tokens=60, speculation={"off": off}, **in_fields(settings))["choices"][0]["text"]
            for off in (False, True, False)
        ]
        tokens = post(server, prompt=PROMPT, max_tokens=60, return_token_ids=True, **in_fields(settings))["choices"][0][
            "token_ids"
        ]
        prompt = encode(PROMPT)
        for i, token in enumerate(tokens):
            assert server.row(prompt + tokens[:i], settings, prompt_length=len(prompt))[token] == 1
    assert len(set(texts)) == 1 and len(tokens) > 10


def test_a_law_fault_breaks_seeds_repeatably():
    with PlantedServer("naive resample") as server:
        on, again, off = (
            [
                post(server, prompt=PROMPT, seed=seed, max_tokens=40, speculation={"off": is_off})["choices"][0]["text"]
                for seed in range(5)
            ]
            for is_off in (False, False, True)
        )
    assert on == again
    assert all(mine != plain for mine, plain in zip(on, off, strict=True))


def test_a_seed_that_is_ignored_shows():
    with PlantedServer("seed ignored") as server:
        texts = [post(server, prompt=PROMPT, seed=1, max_tokens=40)["choices"][0]["text"] for _ in range(3)]
        plain = [
            post(server, prompt=PROMPT, seed=1, max_tokens=40, speculation={"off": True})["choices"][0]["text"] for _ in range(3)
        ]
    assert len(set(texts)) == 3 and len(set(plain)) == 1


def test_requests_without_a_seed_differ_and_a_servers_seed_repeats_them():
    def texts():
        with PlantedServer(seed=4) as server:
            return [post(server, prompt=PROMPT, max_tokens=30)["choices"][0]["text"] for _ in range(3)]

    first = texts()
    assert len(set(first)) == 3 and first == texts()


def test_stop_strings_and_max_tokens_hold_on_speculated_positions():
    with PlantedServer(seed=1) as server:
        for choice in post(server, prompt=PROMPT, n=200, max_tokens=30, stop=[" red", "s "], return_token_ids=True)["choices"]:
            assert " red" not in choice["text"] and "s " not in choice["text"]
            assert len(choice["token_ids"]) <= 30 and choice["finish_reason"] in ("stop", "length")
        lengths = {
            len(choice["token_ids"])
            for choice in post(server, prompt=PROMPT, n=100, max_tokens=7, ignore_eos=True, return_token_ids=True)["choices"]
        }
        assert lengths == {7}


def test_late_stop_overrun_and_same_choices():
    with PlantedServer("late stop", seed=1) as server:
        texts = [choice["text"] for choice in post(server, prompt=PROMPT, n=100, max_tokens=60, stop=" red")["choices"]]
        assert any(" red" in text for text in texts) and not all(" red" in text for text in texts)
        plain = post(server, prompt=PROMPT, n=100, max_tokens=60, stop=" red", speculation={"off": True})
        assert not any(" red" in choice["text"] for choice in plain["choices"])
    with PlantedServer("overrun", seed=1) as server:
        answer = post(server, prompt=PROMPT, n=50, max_tokens=6, return_token_ids=True, ignore_eos=True)
        assert {len(choice["token_ids"]) for choice in answer["choices"]} == {6, 7, 8, 9}
    with PlantedServer("same choices") as server:
        assert len({choice["text"] for choice in post(server, prompt=PROMPT, n=5, max_tokens=40)["choices"]}) == 1
        plain = post(server, prompt=PROMPT, n=5, max_tokens=40, speculation={"off": True})
        assert len({choice["text"] for choice in plain["choices"]}) == 5


@pytest.mark.parametrize("processed", [False, True])
def test_logprobs_are_those_of_the_rows(processed):
    settings = Settings(0.7, top_k=8)
    with PlantedServer(processed_logprobs=processed, digits=4) as server:
        answer = post(server, prompt=PROMPT, max_tokens=30, logprobs=3, return_token_ids=True, **in_fields(settings))
        told, tokens = answer["choices"][0]["logprobs"], answer["choices"][0]["token_ids"]
        prompt = encode(PROMPT)
        for i, token in enumerate(tokens):
            row = server.row(prompt + tokens[:i], settings if processed else Settings())
            assert told["token_logprobs"][i] == round(float(np.log(row[token])), 4)
            assert list(told["top_logprobs"][i].values()) == [round(float(value), 4) for value in np.log(np.sort(row)[::-1][:3])]
        assert answer["prompt_token_ids"] == prompt
        offsets = told["text_offset"]
        assert offsets[0] == 0 and sorted(offsets) == offsets


def test_logprobs_of_the_draft_model_show():
    def apart(**body):
        told = post(server, prompt=PROMPT, max_tokens=60, seed=2, logprobs=0, ignore_eos=True, return_token_ids=True, **body)[
            "choices"
        ][0]
        prompt = encode(PROMPT)
        rows = [server.row(prompt + told["token_ids"][:i]) for i in range(60)]
        return [abs(np.log(rows[i][told["token_ids"][i]]) - told["logprobs"]["token_logprobs"][i]) > 1e-9 for i in range(60)]

    with PlantedServer("draft logprobs") as server:
        assert sum(apart()) > 20 and not any(apart(speculation={"off": True}))


def test_another_models_name_and_another_server_are_off_too():
    with PlantedServer(plain_name="planted-plain") as server, PlantedServer(speculates=False, knows_speculation=False) as other:
        names = [model["id"] for model in httpx.get(server.url + "/v1/models").json()["data"]]
        assert names == ["planted", "planted-plain"]
        on, off = (post(server, model=name, prompt=PROMPT, max_tokens=40, seed=3) for name in names)
        assert on["speculation"]["proposed"] > 0 == off["speculation"]["proposed"]
        assert on["choices"][0]["text"] == off["choices"][0]["text"]
        assert post(other, prompt=PROMPT, max_tokens=40, seed=3)["choices"][0]["text"] == on["choices"][0]["text"]


# ---------------------------------------------------------------- HTTP


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_what_the_whole_says(path):
    is_chat = "chat" in path
    body = {"seed": 6, "n": 2, "max_tokens": 60, "return_token_ids": True, "stop": [" bird tree"], "logprobs": is_chat or 2}
    body |= {"messages": [{"role": "user", "content": "é?"}], "top_logprobs": 2} if is_chat else {"prompt": "é?"}
    with PlantedServer() as server:
        whole = post(server, path, **body)
        chunks = events(server, path, stream_options={"include_usage": True}, **body)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert chunks[-2]["speculation"] == whole["speculation"]
    assert (
        chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == encode(chat_prompt([("user", "é?")]) if is_chat else "é?")
    )
    for choice in whole["choices"]:
        mine = [part for chunk in chunks[:-1] for part in chunk["choices"] if part["index"] == choice["index"]]
        text = "".join(part["delta"].get("content", "") if is_chat else part["text"] for part in mine)
        assert text == (choice["message"]["content"] if is_chat else choice["text"])
        assert [token for part in mine for token in part.get("token_ids", [])] == choice["token_ids"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        assert max(len(part.get("token_ids", [])) for part in mine) == 4, "one chunk per step"
        name = "content" if is_chat else "tokens"
        told = [entry for part in mine if part["logprobs"] for entry in part["logprobs"][name]]
        assert told == choice["logprobs"][name]
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])


def test_half_a_character_waits_for_the_other():
    bias = {str(FIRST_HALF): 8}
    with PlantedServer() as server:
        chunks = events(server, prompt=PROMPT, seed=1, max_tokens=100, logit_bias=bias)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        chopped = post(server, prompt=PROMPT, n=200, max_tokens=1, logit_bias={str(FIRST_HALF): 50})["choices"]
    assert text.count("é") > 10
    assert {choice["text"] for choice in chopped} == {"\ufffd"}, "told once it can't become whole"


def test_openais_own_client_reads_it():
    import openai

    with PlantedServer(api_key="k") as server, openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["planted"]
        told = client.chat.completions.create(
            model="planted", messages=[{"role": "user", "content": "Hi"}], max_tokens=20, logprobs=True, top_logprobs=3, seed=1
        )
        assert len(told.choices[0].logprobs.content) == told.usage.completion_tokens
        stream = client.completions.create(model="planted", prompt="Hi", max_tokens=20, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream)
        with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=server.url + "/v1", api_key="x") as stranger:
            stranger.models.list()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"prompt": PROMPT, "temperature": 3}),
        (400, {"prompt": PROMPT, "temperature": True}),
        (400, {"prompt": PROMPT, "beams": 3}),
        (400, {"prompt": PROMPT, "stop": [""]}),
        (400, {"prompt": PROMPT, "stop": 5}),
        (400, {"prompt": PROMPT, "logit_bias": {"500": 1}}),
        (400, {"prompt": PROMPT, "logit_bias": {"1": None}}),
        (400, {"prompt": PROMPT, "logprobs": 21}),
        (400, {"prompt": PROMPT, "stream": "yes"}),
        (400, {"prompt": [1, 5000]}),
        (400, {"prompt": {}}),
        (400, {}),
        (400, {"messages": [{"role": "user", "content": "x"}]}),
        (404, {"prompt": PROMPT, "model": "gpt"}),
    ],
)
def test_what_is_not_understood_is_refused(status, body):
    with PlantedServer() as server:
        assert post(server, status=status, **body)["error"]["message"]


def test_bodies_that_are_no_json_and_paths_that_are_not_there():
    with PlantedServer() as server:
        assert httpx.post(server.url + "/v1/completions", content=b"{").status_code == 400
        assert httpx.post(server.url + "/v1/completions", content=b"[]").status_code == 400
        assert httpx.get(server.url + "/v1/engines").status_code == 404
        assert post(server, "/v1/chat/completions", status=400, messages=[])["error"]


def test_a_server_that_knows_no_speculation_refuses_the_field():
    with PlantedServer(knows_speculation=False) as server:
        assert post(server, status=400, prompt=PROMPT, speculation={"off": True})["error"]["code"] == "unknown_parameter"
        assert post(server, prompt=PROMPT)["choices"][0]["text"]


def test_a_server_without_ids_and_logprobs():
    with PlantedServer(has_ids=False, has_logprobs=False) as server:
        choice = post(server, prompt=PROMPT, logprobs=2, return_token_ids=True)["choices"][0]
        assert "token_ids" not in choice and choice["logprobs"] is None


def test_options_are_checked():
    with pytest.raises(InvalidParameter, match="naive resample"):
        PlantedServer("no such fault")
    with pytest.raises(InvalidParameter):
        PlantedServer("threshold", strength=0)


# ---------------------------------------------------------------- troubles


def test_refusals_come_when_they_should():
    troubles = (Trouble("429", after=1, every=2, retry_after=0.2), Trouble("500", after=2, every=2))
    with PlantedServer(troubles=troubles) as server:
        answers = [httpx.post(server.url + "/v1/completions", json={"prompt": PROMPT}) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 429, 500, 429, 500]
        assert answers[1].headers["retry-after"] == "0.2"


@pytest.mark.parametrize("stream", [False, True])
def test_broken_answers(stream):
    def read(kind):
        with PlantedServer(troubles=(Trouble(kind, after=1),)) as server, httpx.Client() as client:
            body = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": stream}
            assert client.post(server.url + "/v1/completions", json=body).status_code == 200
            return client.post(server.url + "/v1/completions", json=body, timeout=0.5).text

    for kind in ("garbage", "half event"):
        text = read(kind)
        with pytest.raises(ValueError):
            [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part and part != "data: [DONE]"]
        assert ("[DONE]" in text) == (stream and kind == "garbage")
    with pytest.raises(httpx.ReadTimeout):
        read("stalls")
    for kind in ("closes", "dies"):
        with pytest.raises(httpx.RemoteProtocolError):
            read(kind)


def test_a_dead_server_stays_dead():
    with PlantedServer(troubles=(Trouble("dies", after=2),)) as server:
        for _ in range(2):
            post(server, prompt=PROMPT)
        for _ in range(3):
            with pytest.raises(httpx.TransportError):
                post(server, prompt=PROMPT)


def test_another_model_and_no_logprobs_from_some_request_on():
    with PlantedServer(troubles=(Trouble("other model", after=1), Trouble("no logprobs", after=2))) as server:
        first, second, third = (post(server, prompt=PROMPT, seed=1, max_tokens=40, logprobs=1) for _ in range(3))
    assert first["model"] == "planted" and second["model"] == third["model"] == "planted-2"
    assert first["choices"][0]["text"] != second["choices"][0]["text"] == third["choices"][0]["text"]
    assert second["choices"][0]["logprobs"] and third["choices"][0]["logprobs"] is None


def test_many_clients_at_once_and_clients_that_leave():
    """A seeded request has the same text in a crowd."""
    with PlantedServer() as server:
        alone = post(server, prompt=PROMPT, seed=8, max_tokens=50)["choices"][0]["text"]
        texts = []

        def ask():
            with (
                suppress(httpx.TransportError),
                httpx.stream("POST", server.url + "/v1/completions", json={"prompt": PROMPT, "stream": True}) as answer,
            ):
                next(answer.iter_raw())  # and leaves
            texts.append(post(server, prompt=PROMPT, seed=8, max_tokens=50)["choices"][0]["text"])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [alone] * 8
