"""The playground in a real browser, against a real server; answers that a server gives only in trouble are put in its place."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

pytest.importorskip("playwright", reason="needs playwright")
pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")

from axe_playwright_python.sync_playwright import Axe
from browsing import SIZES, chromium
from playwright.sync_api import expect
from serving import serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on the PATH"),
]

FINISHED = ".caption:not(:empty)"


@pytest.fixture(scope="module")
def server_url():
    """A running server's address, with a slash at its end; TRUEDRAW_PLAYGROUND_URL names one that runs already."""
    if url := os.environ.get("TRUEDRAW_PLAYGROUND_URL"):
        yield url
        return
    with serving() as server:
        yield server.url + "/"


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def open_page(browser, server_url):
    """open_page(size, theme): the page, ready to be asked. Nothing may go wrong in it but what its `allowed` names."""
    contexts, faults = [], []

    def get(size="desktop", theme="light", path="", ready=True):
        context = browser.new_context(
            viewport=SIZES[size], color_scheme=theme, has_touch=size == "phone", reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.allowed = ()
        page.on("console", lambda message: faults.append((page, f"{message.type}: {message.text}")))
        page.on("pageerror", lambda error: faults.append((page, f"exception: {error}")))
        page.on("requestfailed", lambda request: faults.append((page, failure(request))))
        page.goto(server_url + path)
        if ready:
            expect(page.locator("#examples button").first).to_be_attached()
        return page

    yield get
    for context in contexts:
        context.close()
    unexpected = [text for page, text in faults if text and not any(re.search(pattern, text) for pattern in page.allowed)]
    assert not unexpected


def failure(request):
    """Chromium may report a stream as aborted although its script has read all of it: then the answer was there."""
    aborted = request.failure == "net::ERR_ABORTED" and request.url.endswith("completions")
    return None if aborted else f"failed: {request.url} {request.failure}"


def ask(page, prompt="the cat sat on"):
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def ask_and_wait(page, prompt="the cat sat on"):
    finished = page.locator(FINISHED).count()
    ask(page, prompt)
    expect(page.locator(FINISHED).nth(finished)).to_be_visible(timeout=30_000)


# ---------------------------------------------------------------- answers put in the server's place


def token(text, origin="draft", data=None, **more):
    data = list(text.encode()) if data is None else list(data)
    top = [{"id": 7, "text": text, "p": 0.4}, {"id": 8, "text": " other", "p": 0.3}]
    return {
        "id": 7,
        "text": text,
        "bytes": data,
        "origin": origin,
        "p": 0.4,
        "q": 0.8 if origin == "draft" else None,
        "top": top,
        **more,
    }


SUMMARY = {
    "drafter": "suffix", "rule": "coupled", "steps": 2, "proposed": 4, "accepted": 2, "tokens_per_step": 2.0,
    "acceptance_by_depth": [1.0, 0.0], "seconds": 0.02, "estimated_plain_seconds": 0.04, "drift": None,
}  # fmt: skip


def chunk(tokens, finish=None, **top):
    text = b"".join(bytes(each["bytes"]) for each in tokens).decode("utf-8", "ignore")
    drafts = sum(each["origin"] == "draft" for each in tokens)
    step = {"proposed": drafts + 1, "accepted": drafts, "emitted": len(tokens), "seconds": 0.01, "estimated_plain_seconds": 0.02}
    choice = {"index": 0, "text": text, "delta": {"content": text}, "finish_reason": finish}
    return {"choices": [{**choice, "speculation": {"step": step, "tokens": tokens}}], **top}


def stream(*events, done=True):
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines) + ("data: [DONE]\n\n" if done else "")


def answer(*chunks, **summary):
    """A whole stream: the last chunk carries the end and the counts."""
    *first, last = chunks
    return stream(*map(chunk, first), chunk(last, "stop", speculation={**SUMMARY, **summary}))


def instead(page, body="", status=200, headers=None):
    """Puts an answer in the place of the server's next ones; returns the requests that were asked."""
    asked = []

    def fulfil(route):
        asked.append(route.request.post_data_json)
        kind = "text/event-stream" if status == 200 else "application/json"
        route.fulfill(status=status, body=body, content_type=kind, headers=headers or {})

    page.unroute("**/completions")
    page.route("**/completions", fulfil)
    return asked


def with_facts(page, server_url, **facts):
    """Loads the page again, with other facts of the model told."""
    models = page.request.get(server_url + "v1/models").json()
    models["data"][0]["truedraw"].update(facts)
    page.unroute("**/v1/models")
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.reload()
    expect(page.locator("#examples button").first).to_be_attached()


def error_body(message):
    return json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None}})


# ---------------------------------------------------------------- asking


def test_every_token_shows_the_origin_that_the_server_told(open_page):
    page = open_page()
    bodies = []

    def through(route):
        response = route.fetch()
        bodies.append(response.text())
        route.fulfill(response=response)

    page.route("**/completions", through)
    ask_and_wait(page)
    events = [json.loads(line[6:]) for line in bodies[0].splitlines() if line.startswith("data: {")]
    told = [each for event in events for choice in event["choices"] for each in choice.get("speculation", {}).get("tokens", [])]
    shown = page.locator(".token").evaluate_all("all => all.map(one => [one.dataset.origin, one.textContent])")
    assert [origin for origin, _ in shown] == [each["origin"] for each in told] and {"draft"} < {each["origin"] for each in told}
    data = b"".join(bytes(each["bytes"]) for each in told)
    assert "".join(text for _, text in shown) == data.decode("utf-8", "replace")
    styles = page.locator(".sample").evaluate_all("all => all.slice(0, 4).map(one => getComputedStyle(one).textDecorationStyle)")
    assert len(set(styles)) == 4  # colour is never all that tells origins apart


def test_steps_and_readings_are_told_in_words_and_numbers(open_page):
    page = open_page()
    instead(page, answer([token("one"), token(" two", "residual")], [token(" three"), token(" four", "bonus")]))
    ask_and_wait(page)
    expect(page.get_by_role("img", name="2 steps, 4 proposed, 2 accepted")).to_be_visible()
    assert page.locator("#ratio").inner_text() == "2.00×"
    assert page.locator("#speed").inner_text() == "200 tok/s" and page.locator("#plain-speed").inner_text() == "100 tok/s"
    assert page.locator("#tokens-per-step").inner_text() == "2.00" and page.locator("#kept").inner_text() == "50 % of 4"
    assert "4 tokens in 2 steps" in page.locator(FINISHED).inner_text()


def test_details_open_by_pointing(open_page):
    page = open_page()
    instead(page, answer([token(" red\n"), token(" blue", "residual")]))
    ask_and_wait(page)
    before = page.locator("#details").bounding_box()
    page.locator(".token").first.hover()
    details = page.locator("#details").inner_text()
    assert "␣red⏎" in details and "draft" in details and re.search(r"min\(1, p/q\)[^0-9]+0\.5000", details), details
    assert re.search(r"other\s+0\.3000", details)
    assert page.locator("#details").bounding_box() == before
    page.locator(".token").nth(1).hover()
    assert "min(1, p/q)" not in page.locator("#details").inner_text()


def test_details_open_by_keyboard(open_page):
    page = open_page("phone")
    instead(page, answer([token("one"), token(" two"), token(" three", "bonus")]))
    ask_and_wait(page)
    expect(page.locator("#details")).to_be_hidden()
    page.locator("#conversation").focus()
    page.keyboard.press("Tab")
    expect(page.locator("#details")).to_be_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token:focus")).to_have_text(" three")
    expect(page.locator("#announce")).to_contain_text("␣three: bonus, p 0.4000")
    page.keyboard.press("Home")
    expect(page.locator(".token:focus")).to_have_text("one")
    assert page.locator(".token[tabindex='0']").count() == 1
    page.keyboard.press("Escape")
    expect(page.locator("#details")).to_be_hidden()


def test_a_character_belongs_to_the_token_that_completes_it(open_page):
    page = open_page()
    dice = "🎲".encode()
    parts = [token("", data=dice[:1]), token("", data=dice[1:3]), token("", "bonus", data=dice[3:])]
    instead(page, answer([token("a")], parts, [token("b", "plain"), token("", "plain", data=dice[:2])]))
    ask_and_wait(page)
    assert page.locator(".token").all_inner_texts() == ["a", "", "", "🎲", "b", "\N{REPLACEMENT CHARACTER}"]
    page.locator(".token").nth(3).hover()
    expect(page.locator("#details")).to_contain_text("Completes a character begun by f0 9f 8e")


def test_text_of_the_model_and_the_reader_is_inert(open_page):
    page = open_page()
    attack = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
    hostile = token(attack, top=[{"id": 7, "text": attack, "p": 0.4}])
    instead(page, answer([hostile], [token("end", "plain")], drafter=attack))
    ask_and_wait(page, attack)
    page.locator(".token").first.hover()
    assert page.locator(".token").first.inner_text() == attack and page.locator(".prompt").inner_text() == attack
    assert page.locator("main img, main script").count() == 0 and page.title() == "truedraw playground"


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain text"])
def test_settings_and_earlier_turns_are_sent(open_page, server_url, chat):
    page = open_page()
    with_facts(page, server_url, chat=chat)
    assert ("no chat template" in page.locator("#composer-hint").inner_text()) is not chat
    asked = instead(page, answer([token("one", "plain")]))
    page.get_by_label("Temperature, slider").focus()
    page.keyboard.press("Home")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Max draft").fill("3")
    page.get_by_label("Max tokens").fill("9")
    ask_and_wait(page, "first")
    page.get_by_label("Draft tokens").uncheck()
    ask_and_wait(page, "second")
    assert asked[0]["temperature"] == 0 and asked[0]["seed"] == 5 and asked[0]["max_tokens"] == 9
    assert asked[0]["speculation"].items() >= {"max_draft": 3, "trace": True, "alternatives": 5}.items()
    assert asked[1]["speculation"] == {"off": True, "trace": True, "alternatives": 5}
    if chat:
        turns = [(message["role"], message["content"]) for message in asked[1]["messages"]]
        assert turns == [("user", "first"), ("assistant", "one"), ("user", "second")]
    else:
        assert asked[1]["prompt"] == "firstone\nsecond"
    page.get_by_label("Max tokens").fill("0")
    ask(page, "third")
    expect(page.locator("#settings-error")).to_contain_text("Max tokens")
    assert len(asked) == 2 and page.input_value("#prompt") == "third"


def test_shift_enter_starts_a_line_and_clear_forgets(open_page):
    page = open_page()
    asked = instead(page, answer([token("one", "plain")]))
    page.fill("#prompt", "a")
    page.press("#prompt", "Shift+Enter")
    assert page.input_value("#prompt") == "a\n" and not asked
    ask_and_wait(page, "first")
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".turn").count() == 0
    ask_and_wait(page, "second")
    assert "first" not in json.dumps(asked[-1])


def test_stop_keeps_what_has_come(open_page):
    page = open_page()
    page.evaluate(
        """text => { window.fetch = (path, { signal }) => Promise.resolve(new Response(new ReadableStream({ start(out) {
            out.enqueue(new TextEncoder().encode(text));
            signal.addEventListener("abort", () => out.error(signal.reason));
        } }))) }""",
        stream(chunk([token("one"), token(" two", "bonus")]), done=False),
    )
    ask(page)
    expect(page.locator(".token")).to_have_count(2)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(FINISHED)).to_contain_text("stopped")
    expect(page.locator("#notice")).to_be_empty()
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_lossy_rule_is_offered_only_where_the_server_allows_it_and_its_drift_is_told(open_page, server_url):
    page = open_page()
    with_facts(page, server_url, lossy_rules=[])
    expect(page.locator("#rule option", has_text="coupled")).to_be_attached()
    assert page.locator("#rule option", has_text="lossy").count() == 0
    with_facts(page, server_url, lossy_rules=["typical"])
    page.get_by_label("Rule").select_option("typical")
    expect(page.locator("#rule-note")).to_contain_text("no longer have exactly the model's law")
    instead(page, answer([token("one")], drift={"total_variation": 0.5, "kl_divergence": 0.08, "bound": 0.2}))
    ask_and_wait(page)
    expect(page.locator(".drift")).to_contain_text("at most 0.2000 in total variation")


def test_a_server_that_hides_its_pace_is_asked_for_whole_answers(open_page, server_url):
    page = open_page()
    with_facts(page, server_url, steady_stream=True)
    expect(page.locator("#composer-hint")).to_contain_text("come whole")
    tokens = [token("one"), token(" two", "residual"), token(" three", "plain")]
    counts = {"proposed": 2, "accepted": 1, "emitted": 2, "seconds": 0.1, "estimated_plain_seconds": None}
    last = {**counts, "proposed": 0, "accepted": 0, "emitted": 1}
    choice = {"message": {"content": "one two three"}, "text": "one two three", "finish_reason": "stop", "index": 0}
    choice["speculation"] = {"tokens": tokens, "steps": [counts, last]}
    asked = instead(page, json.dumps({"choices": [choice], "speculation": SUMMARY}))
    ask_and_wait(page)
    assert asked[0]["stream"] is False and page.locator(".token").all_inner_texts() == ["one", " two", " three"]
    assert page.locator("#ratio").inner_text() == "–"  # no estimate, no ratio
    expect(page.locator("#strip .step")).to_have_count(2)


# ---------------------------------------------------------------- comparing


def test_comparing_with_the_same_seed_gives_the_same_text(open_page):
    page = open_page()
    page.fill("#prompt", "the cat sat on")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".comparison.same")).to_be_visible(timeout=60_000)
    expect(page.locator(".verdict")).to_contain_text("The same text, token for token.")
    assert re.search(r"\d\.\d\d× as fast as without, measured", page.locator(".verdict").inner_text())
    left, right = (page.locator(".sides .tokens").nth(i).inner_text() for i in (0, 1))
    assert left == right and page.locator(".sides .tokens").nth(1).locator("[data-origin=draft]").count() == 0


def test_comparing_marks_the_first_token_that_differs(open_page):
    page = open_page()
    asked = []

    def fulfil(route):
        asked.append(route.request.post_data_json)
        drafted = not asked[-1]["speculation"].get("off")
        route.fulfill(body=answer([token("a"), token(" b", id=8 if drafted else 9)]), content_type="text/event-stream")

    page.route("**/completions", fulfil)
    page.fill("#prompt", "anything")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".verdict")).to_contain_text("Differs from token 2 on")
    assert page.locator(".differs").all_inner_texts() == [" b", " b"]
    assert asked[0]["seed"] == asked[1]["seed"] and [each["speculation"].get("off", False) for each in asked] == [False, True]


# ---------------------------------------------------------------- trouble


def test_busy_says_when_to_try_again_and_keeps_the_text(open_page):
    page = open_page()
    page.allowed = (r"status of 429",)
    instead(page, error_body("all slots are taken"), 429, {"Retry-After": "2"})
    ask(page, "my words")
    expect(page.locator("#notice")).to_contain_text("It said: all slots are taken. Try again in 2 s.")
    assert page.input_value("#prompt") == "my words" and page.locator(".turn").count() == 0
    expect(page.locator("#notice")).to_contain_text("You can try again now.")
    instead(page, answer([token("one")]))
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".token")).to_have_text(["one"])
    expect(page.locator("#notice")).to_be_empty()


def test_a_refusal_is_told_in_the_servers_words(open_page):
    page = open_page()
    page.allowed = (r"status of 400",)
    instead(page, error_body("max_tokens is 9: at most 8"), 400)
    ask(page, "my words")
    expect(page.locator("#notice")).to_contain_text("max_tokens is 9: at most 8")
    assert page.input_value("#prompt") == "my words"


@pytest.mark.parametrize(
    ("last", "said"),
    [([{"error": {"message": "the pass failed"}}], "The server said: the pass failed"), ([], "lost in the middle of the answer")],
    ids=["error event", "no end"],
)
def test_an_answer_that_breaks_off_is_kept_and_not_remembered(open_page, last, said):
    page = open_page()
    instead(page, stream(chunk([token("one"), token(" two", "residual")]), *last, done=False))
    ask(page, "my words")
    expect(page.locator("#notice")).to_contain_text(said)
    assert page.locator(".token").all_inner_texts() == ["one", " two"] and page.input_value("#prompt") == "my words"
    asked = instead(page, answer([token("three")]))
    ask_and_wait(page, "again")
    assert "two" not in json.dumps(asked)


def test_a_lost_connection_is_told(open_page):
    page = open_page()
    page.allowed = (r"ERR_CONNECTION_REFUSED", r"failed: .*completions")
    page.route("**/completions", lambda route: route.abort("connectionrefused"))
    ask(page, "my words")
    expect(page.locator("#notice")).to_contain_text("The server cannot be reached.")
    assert page.input_value("#prompt") == "my words"


def test_the_key_is_asked_for_sent_and_kept_in_the_tab_only(open_page, server_url):
    page = open_page()
    models = page.request.get(server_url + "v1/models").json()
    page.allowed = (r"status of 401",)

    def guard(route):
        if route.request.headers.get("authorization") == "Bearer sesame":
            route.fulfill(json=models)
        else:
            route.fulfill(status=401, body=error_body("no key"), content_type="application/json")

    page.route("**/v1/models", guard)
    page.reload()
    expect(page.locator("#notice")).to_contain_text("The server asks for an API key.")
    field = page.get_by_role("textbox", name="API key")
    assert field.get_attribute("type") == "password"
    field.fill("sesame")
    field.press("Enter")
    expect(page.locator("#model")).to_have_text(models["data"][0]["id"])
    expect(page.locator("#notice")).to_be_empty()
    assert page.evaluate("[JSON.stringify(localStorage).includes('sesame'), document.cookie]") == [False, ""]


# ---------------------------------------------------------------- how acceptance works


def numbers(page, sign):
    return [float(page.get_by_label(f"{sign} of {name}, number").input_value()) for name in "abcde"]


def test_distributions_are_edited_by_keyboard(open_page):
    page = open_page(path="#acceptance")
    page.get_by_role("slider", name="q of a").focus()
    page.keyboard.press("End")
    assert numbers(page, "q") == [1, 0, 0, 0, 0]
    expect(page.locator(".masses .figures")).to_contain_text("0.500")  # the chance of acceptance is p of a
    page.keyboard.press("Home")
    assert numbers(page, "q") == [0, 0.25, 0.25, 0.25, 0.25]  # the others were all zero
    page.keyboard.press("PageUp")
    assert numbers(page, "q")[0] == 0.1 and abs(sum(numbers(page, "q")) - 1) < 0.03
    page.get_by_label("q of b, number").fill("0.5")
    page.keyboard.press("Tab")
    assert numbers(page, "q")[1] == 0.5 and page.get_by_role("slider", name="q of b").get_attribute("aria-valuenow") == "0.50"


def test_distributions_are_edited_by_dragging(open_page):
    page = open_page(path="#acceptance")
    box = page.get_by_role("slider", name="p of b").bounding_box()
    x, bottom = box["x"] + box["width"] / 2, box["y"] + box["height"]
    page.mouse.move(x, bottom - 5)
    page.mouse.down()
    page.mouse.move(x, bottom - 0.4 * box["height"])
    page.mouse.move(x, bottom - 0.6 * box["height"])
    page.mouse.up()
    page.mouse.move(x, bottom - 5)
    assert abs(numbers(page, "p")[1] - 0.6) < 0.02 and abs(sum(numbers(page, "p")) - 1) < 0.03


@pytest.mark.parametrize("preset", ["good drafter", "bad drafter", "one-hot copy", "p = q", "disjoint"])
def test_the_identity_holds_and_draws_follow_p(open_page, preset):
    """What comes out of 20,000 draws is within TV 0.03 of p; for 5 tokens chance alone gives 0.005 on average."""
    page = open_page(path="#acceptance")
    page.get_by_role("button", name=preset).click()
    rows = page.locator(".identity tbody tr").evaluate_all("all => all.map(row => [...row.cells].map(cell => cell.textContent))")
    assert [row[1] for row in rows] == [row[-1] for row in rows]
    for _ in range(20):
        page.get_by_role("button", name="Draw 1,000").click()
    summary = page.locator(".drawn .hint").inner_text()
    assert summary.startswith("20,000 drawn") and float(re.search(r"marks ([0-9.]+);", summary)[1]) < 0.03
    page.get_by_role("button", name="Draw one step").click()
    expect(page.locator(".told")).to_contain_text("Drafted")


def test_the_number_of_tokens_changes(open_page):
    page = open_page(path="#acceptance")
    page.get_by_role("button", name="disjoint").click()
    for size in ("4", "6"):
        page.get_by_label("Tokens", exact=True).select_option(size)
        assert page.locator(".identity tbody tr").count() == int(size)
        assert page.get_by_role("slider").count() == 2 * int(size)
        for column in ("2", "3"):
            row = page.locator(f".identity tbody tr > :nth-child({column})").all_inner_texts()
            assert abs(sum(map(float, row)) - 1) < 0.005, row


# ---------------------------------------------------------------- the page as a whole


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_stands_in_the_way_of_anybody(open_page, size, theme):
    page = open_page(size, theme)
    found = {"empty": violations(page)}
    ask_and_wait(page)
    page.locator(".token").first.click()
    found["answer"] = violations(page)
    page.keyboard.press("Escape")
    page.fill("#prompt", "the dog")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".verdict strong")).to_be_visible(timeout=60_000)
    found["comparison"] = violations(page)
    page.get_by_role("tab", name="How acceptance works").click()
    page.get_by_role("button", name="Draw 1,000").click()
    found["acceptance"] = violations(page)
    assert not any(found.values()), found
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def violations(page):
    results = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [(each["id"], node["html"], node.get("failureSummary")) for each in results for node in each["nodes"]]


def test_nothing_is_wider_than_a_small_phone(open_page):
    page = open_page("phone")
    page.set_viewport_size({"width": 360, "height": 740})
    ask_and_wait(page)
    for tab in ("Ask the model", "How acceptance works"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_theme_that_was_chosen_stays(open_page):
    page = open_page(theme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    light = page.evaluate(ground)
    page.reload()
    assert dark != light == page.evaluate(ground)


def test_tabs_are_moved_between_by_arrows(open_page):
    page = open_page()
    page.get_by_role("tab", name="Ask the model").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tabpanel", name="How acceptance works")).to_be_visible()
    expect(page.get_by_role("tabpanel", name="Ask the model")).to_be_hidden()
    assert page.url.endswith("#acceptance")


def test_the_page_asks_only_its_own_server(open_page, server_url):
    page = open_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    ask_and_wait(page)
    assert asked and all(url.startswith((server_url, "data:")) for url in asked)
