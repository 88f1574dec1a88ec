"""What an audit says, as text, page and JSON: the same verdict everywhere, what matters first, nothing unescaped."""

import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from audit_reports import ALL, CLEAN, CONTRACT, FOUND, NASTY, STATUS, report
from rich.console import Console

from truedraw.audit import words
from truedraw.audit.as_json import as_json
from truedraw.audit.html import html
from truedraw.audit.svg import evidence_plot, power_plot
from truedraw.audit.terminal import print_report

EACH = pytest.mark.parametrize("name", ALL)
VOID = {"meta", "link", "br", "img", "line", "circle"}


def text_of(found, width=100):
    stream = io.StringIO()
    print_report(found, Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


class Checker(HTMLParser):
    """Every tag is closed in order, ids are unique and what they are asked for exists."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.wanted, self.text, self.tags = [], [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append(tag)
        assert len(named) == len(attributes) and not any(name.startswith("on") for name in named)
        self.ids += [named["id"]] if "id" in named else []
        self.wanted += named.get("aria-labelledby", "").split()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


# ---------------------------------------------------------------- the words


@EACH
def test_one_status_everywhere(name):
    found = ALL[name]
    assert found.status == STATUS[name] == as_json(found)["status"]
    assert f"exit status {found.status}" in text_of(found)
    said = "".join(Checker(html(found)).text)
    assert words.headline(found) in said and words.headline(found) in text_of(found)
    for sentence in words.summary(found):
        assert sentence in said and " ".join(sentence.split()) in " ".join(text_of(found, 2000).split())


def test_headlines():
    told = {name: words.headline(found) for name, found in ALL.items()}
    assert {told[name] for name in ALL if STATUS[name] == 0} == {"No evidence of a fault"}
    assert {told[name] for name in ALL if STATUS[name] == 1} == {"Fault found"}
    assert {told[name] for name in ALL if STATUS[name] == 3} == {"Not completed"}


@pytest.mark.parametrize("name", ["control missed", "control missed, fault"])
def test_a_control_that_was_missed_is_said_first(name):
    found = ALL[name]
    assert words.summary(found)[0].startswith(words.CONTROL_MISSED)
    page, shown = html(found), text_of(found)
    assert page.index('id="control0"') < page.index('id="mode0"')
    assert shown.index(words.CONTROL_MISSED) < shown.index("law of the tokens") and "NOT SEEN" in shown
    assert ("stands" in words.summary(found)[0]) == bool(found.findings)


def test_a_pass_says_what_it_means_and_what_it_does_not():
    told = " ".join(words.summary(ALL["clean"]))
    assert "smaller than a total variation (TV, the share of tokens that would differ) of 0.069" in told
    assert "that was looked at, would not have been seen" in told
    assert "would not have been seen" not in " ".join(words.summary(ALL["fault"]))


def test_the_least_sensitive_mode_gives_the_size():
    coarse = report(CLEAN, replace(CLEAN, detectable=0.2))
    assert "of 0.2," in words.pass_means(coarse)


@pytest.mark.parametrize("name", [name for name in ALL if STATUS[name] == 3])
def test_status_3_is_no_verdict(name):
    told = " ".join(words.summary(ALL[name]))
    assert "no verdict (exit status 3)" in told and "Nothing was found" not in told


def test_why_a_run_was_not_completed_is_told():
    assert "the server answered 500" in " ".join(words.summary(ALL["not completed"]))
    assert "the server answered 500" in " ".join(words.summary(ALL["fault, then died"]))


def test_no_control_is_told():
    assert "No control was run" in words.summary(ALL["no control"])[-1]


def test_contracts_have_no_error_rate():
    assert "without exception" in " ".join(words.summary(ALL["contract"]))
    assert "in 1 in 100 runs at most" in " ".join(words.summary(ALL["fault"]))


@EACH
def test_no_verdict_says_lossless(name):
    found = ALL[name]
    assert not re.search("lossless", html(found) + text_of(found) + json.dumps(as_json(found)), re.IGNORECASE)


def test_numbers_as_a_person_says_them():
    inf = float("inf")
    assert [words.number(x) for x in (0.25, 7.0, 123.4, 12345.0, 3e9, inf)] == ["0.25", "7", "123", "12,345", "10^9", "infinite"]
    assert (words.shift(None), words.shift(1.0), words.shift(0.0512)) == ("-", "none", "0.051")
    assert (words.seconds(12.34), words.seconds(83.2)) == ("12.3 s", "1 min 23 s")
    assert (words.samples(CONTRACT), words.samples(CLEAN)) == ("1 step", "2,000 tokens")


# ---------------------------------------------------------------- text


def test_the_terminal_tells_cause_and_command():
    shown = text_of(ALL["fault"])
    assert "    Usual cause: after a rejected draft the replacement is drawn wrongly." in shown
    assert "Usual cause: after a rejected draft" in words.summary(ALL["fault"])[1]
    assert "of 0.069" not in shown and not any(line.endswith(" ") for line in shown.splitlines())
    assert FOUND.example.command in shown.splitlines()[next(i for i, x in enumerate(shown.splitlines()) if "curl" in x)]
    assert "Evidence infinite (a fault is told from 100 on)." in shown
    assert "control: planted fault: seen, as it should be" in shown
    assert "Allowed for: TV 0.02." in text_of(ALL["clean"])


def test_markup_in_texts_is_text():
    found = report(CLEAN, subject="[bold]x[/bold] [/red]")
    assert "[bold]x[/bold] [/red]" in text_of(found)


def test_lines_fit_a_terminal():
    shown = text_of(report(CLEAN, subject="s", command="c", facts=()), 60)
    inside = [line for line in shown.splitlines() if line.startswith("  ")]
    assert inside and max(map(len, inside)) <= 60


# ---------------------------------------------------------------- JSON


@EACH
def test_json_is_plain(name):
    found = as_json(ALL[name])
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again == found
    assert set(found) == {
        "ok", "status", "headline", "summary", "subject", "command", "started", "seconds", "alpha", "detect", "findings", "power",
        "control_seen", "control", "modes", "facts",
    }  # fmt: skip
    assert found["ok"] == (found["status"] == 0)
    assert [mode["mode"] for mode in found["findings"]] == [mode.mode for mode in ALL[name].findings]


def test_json_of_a_fault():
    found = as_json(ALL["fault"])
    mode = found["findings"][0]
    assert mode["e_value"] == "infinite" and mode["p_value"] == 0 and mode["fired"][0]["e_value"] == 1e30
    assert mode["example"]["command"] == FOUND.example.command and mode["path"][-1] == [1240, "infinite"]
    assert found["power"]["against a reference"] == {"samples": 2000, "unit": "tokens", "detectable": 0.069, "floor": 0.02}


# ---------------------------------------------------------------- the page


@EACH
def test_the_page_is_whole_and_escaped(name):
    page = html(ALL[name])
    checked = Checker(page)
    assert not checked.open and len(set(checked.ids)) == len(checked.ids) and set(checked.wanted) <= set(checked.ids)
    assert NASTY in "".join(checked.text) or name == "nothing"
    assert "script" not in checked.tags and page.count("</style>") == 1
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!127\.0\.0\.1)", page), "it must stand alone"
    assert "nan" not in page and page.startswith("<!DOCTYPE html>") and 'lang="en"' in page


def test_findings_come_first_on_the_page():
    page = html(ALL["contract"])
    assert page.index("What must hold exactly</h2>") < page.index("Against a reference</h2>")
    assert page.index("Against a reference</h2>") < page.index("Control: planted fault</h2>")


def test_plots_without_plotting_packages(monkeypatch):
    import sys

    for package in ("matplotlib", "scipy"):
        monkeypatch.setitem(sys.modules, package, None)
    page = html(ALL["clean"])
    assert page.count("<svg") == 3 and "fault: 100" in page and "asked for: 0.05" in page and "this run: 0.069" in page


def places(plot, kind):
    return [tuple(map(float, pair.split(","))) for pair in re.search(rf'class="{kind}" d="M([^"Z]+)', plot)[1].split(" L")]


def test_the_evidence_is_drawn_where_it_is():
    points = places(evidence_plot(((0, 0.0), (50, 1.0), (100, 3.0)), 0.01, "tokens", "x"), "curve")
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and (y0 - y1) * 2 == pytest.approx(y1 - y2, abs=0.3)
    line = float(re.search(r'<line class="goal"[^>]* y1="([\d.]+)"', evidence_plot(((0, 0.0), (9, 2.0)), 0.01, "t", "x"))[1])
    assert places(evidence_plot(((0, 0.0), (9, 2.0)), 0.01, "t", "x"), "curve")[1][1] == pytest.approx(line, abs=0.1)
    assert "reached the line of a fault" in evidence_plot(((0, 0.0), (9, 2.1), (10, 0.0)), 0.01, "t", "x")
    assert "stayed below" in evidence_plot(((0, 0.0), (9, 1.9)), 0.01, "t", "x")


@pytest.mark.parametrize("last", [0, 1, 7, 3791, 5_000_000])
def test_plots_of_any_size(last):
    for plot in (
        evidence_plot(((0, 0.0), (last, float("inf"))), 1e-9, "tokens", "x"),
        power_plot(max(last, 1), 0.3, None, "t", "x"),
    ):
        assert "nan" not in plot and "inf" not in plot.replace("infinite", "")
        for x, y in places(plot, "curve"):
            assert -1 <= x <= 461 and -1 <= y <= 271


def test_four_times_the_samples_see_half():
    (x0, y0), (x1, y1) = places(power_plot(1000, 0.05, None, "tokens", "x"), "curve")
    assert x1 > x0 and y1 > y0
    assert "Four times as many see half" in power_plot(1000, 0.05, None, "tokens", "x")


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright", reason="needs playwright")
    pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium on the PATH")
    from browsing import chromium

    with chromium() as running:
        yield running


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_the_page_in_a_browser(browser, size, theme):
    from axe_playwright_python.sync_playwright import Axe
    from browsing import SIZES

    context = browser.new_context(viewport=SIZES[size], color_scheme=theme, java_script_enabled=True)
    page = context.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    for name in ("fault", "clean", "control missed", "not completed"):
        page.set_content(html(ALL[name]))
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} is wider than the screen"
        found = Axe().run(page)
        assert not found.response["violations"], found.generate_report()
    small = page.evaluate("Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))")
    assert small > 11 and not asked
    context.close()
