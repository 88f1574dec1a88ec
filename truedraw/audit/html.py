"""A report as one page: style and plots are inside, no script is needed, and every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files

from truedraw import __version__
from truedraw.audit import words
from truedraw.audit.findings import DirectionReport, ModeReport, Report
from truedraw.audit.svg import evidence_plot, power_plot

_TONES = {"no evidence": "good", "fault found": "bad", "not testable": "open", "not completed": "open"}


def html(report: Report) -> str:
    """The whole page, UTF-8. It stands alone: it can be mailed, printed, or attached to a bug report."""
    tone = {0: "good", 1: "bad"}.get(report.status, "open")
    modes = sorted(enumerate(report.modes), key=lambda pair: pair[1].verdict != "fault found")
    blocks = [_mode(mode, report, f"mode{i}") for i, mode in modes]
    control = [_mode(mode, report, f"control{i}", planted=True) for i, mode in enumerate(report.control)]
    blocks = [*blocks, *control] if report.control_seen else [*control, *blocks]
    title = f"{words.headline(report)}: audit of {report.subject}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n"
        f'<div class="wrap">\n{_header(report)}<main>\n{_verdict(report, tone)}{"".join(blocks)}{_facts(report)}{_glossary()}'
        f"</main>\n<footer>truedraw {escape(__version__)}. A pass says only what its size allows; it is no proof.</footer>\n"
        "</div>\n</body>\n</html>\n"
    )


def _style() -> str:
    return files("truedraw.audit").joinpath("page.css").read_text(encoding="utf-8")


def _header(report: Report) -> str:
    told = f"{report.started}, took {words.seconds(report.seconds)}"
    return f"<header>\n<h1>Audit of {escape(report.subject)}</h1>\n<p>{escape(told)}</p>\n</header>\n"


def _verdict(report: Report, tone: str) -> str:
    said = [f"<p{_class('first', i == 0)}>{escape(sentence)}</p>" for i, sentence in enumerate(words.summary(report))]
    power = [size for mode in report.modes if (size := words.power(mode)) is not None]
    figures = [
        ("Control", words.control_line(report), "a fault planted on purpose"),
        ("Smallest shift seen", f"TV {words.shift(max(power))}" if power else "-", "with 95 % power"),
        ("Asked to see", "-" if report.detect is None else f"TV {report.detect:g}", f"alpha {report.alpha:g}"),
        ("Exit status", str(report.status), {0: "no evidence", 1: "fault found"}.get(report.status, "no verdict")),
    ]
    return (
        f'<section class="verdict {tone}" aria-labelledby="verdict">\n<h2 class="word" id="verdict">'
        f"{escape(words.headline(report))}</h2>\n{''.join(said)}\n</section>\n{_figures(figures)}"
    )


def _figures(figures: Iterable[tuple[str, str, str]]) -> str:
    cells = (
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}<span class="of">{escape(of)}</span></dd></div>'
        for name, value, of in figures
    )
    return f'<dl class="figures">{"".join(cells)}</dl>\n'


def _mode(mode: ModeReport, report: Report, name: str, *, planted: bool = False) -> str:
    """One question: verdict, figures, what fired, how to see it again, plots, directions, notes."""
    badge: str = mode.verdict
    tone = _TONES[mode.verdict]
    if planted:
        badge, tone = ("seen, as it should be", "good") if mode.verdict == "fault found" else ("not seen", "bad")
    title = f"Control: {mode.mode}" if planted else mode.mode[:1].upper() + mode.mode[1:]
    parts = [
        f'<section class="mode" aria-labelledby="{name}">\n<div class="head"><h2 id="{name}">{escape(title)}</h2>'
        f'<span class="badge {tone}">{escape(badge)}</span></div>\n<p class="asked">{escape(mode.asked)}</p>\n'
    ]
    if mode.reason:
        parts.append(f"<p><strong>Why:</strong> {escape(mode.reason)}</p>\n")
    parts.append(_figures(_mode_figures(mode)))
    if mode.fired and not planted:
        parts.append(f'<h3>What fired, the strongest first</h3>\n<ul class="fired">{"".join(_fired(mode))}</ul>\n')
    if mode.example is not None:
        parts.append(f"<h3>First seen</h3>\n<p>{escape(mode.example.text)}</p>\n")
        if mode.example.command:
            parts.append(f"<p>To see it again:</p>\n<pre><code>{escape(mode.example.command)}</code></pre>\n")
    parts += [_plots(mode, report, name), _directions(mode, name) if mode.directions else ""]
    if mode.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in mode.notes)}</ul>\n')
    return "".join([*parts, "</section>\n"])


def _mode_figures(mode: ModeReport) -> list[tuple[str, str, str]]:
    figures = [("Looked at", words.samples(mode), "")]
    if words.evidence(mode):
        figures.append(("Evidence", words.evidence(mode), words.evidence_means(mode)))
    if words.power(mode) is not None:
        figures.append(("Smallest shift seen", f"TV {words.shift(words.power(mode))}", "with 95 % power"))
    if mode.floor is not None:
        figures.append(("Floor", f"TV {mode.floor:.2g}", "allowed for"))
    return figures


def _fired(mode: ModeReport) -> Iterable[str]:
    for fired in mode.fired:
        yield (
            f"<li>{escape(fired.name)} (evidence {escape(words.number(fired.e_value))})"
            f'<span class="cause">Usual cause: {escape(fired.usually)}</span></li>'
        )


def _plots(mode: ModeReport, report: Report, name: str) -> str:
    plots = []
    alpha = report.alpha if mode.alpha is None else mode.alpha
    if len(mode.path) > 1:
        plots.append(evidence_plot(mode.path, alpha, mode.unit, f"{name}-evidence"))
    size = words.power(mode)
    if size is not None and 0 < size < 1 and mode.samples:
        plots.append(power_plot(mode.samples, size, report.detect, mode.unit, f"{name}-power"))
    return f'<div class="plots">{"".join(plots)}</div>\n' if plots else ""


def _directions(mode: ModeReport, name: str) -> str:
    heads = (
        "Direction", "Looked at", "Evidence", "Shift measured", "Shift at most, 95 % sure", "Would have been seen from",
    )  # fmt: skip
    row = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    hit = 0.0 if mode.alpha is None else 1 / mode.alpha
    body = "".join(_direction(each, mode.verdict == "fault found" and each.e_value >= hit) for each in mode.directions)
    return (
        f'<h3>Directions</h3>\n<div class="scroll" tabindex="0" role="region" aria-label="Directions of {escape(mode.mode)}">\n'
        "<table>"
        "<caption>Each compares how often a kind of token came with what the target's law says. A shift is counted as a share of "
        f"what the direction can vary by: no smaller total variation can cause it.</caption>\n<thead><tr>{row}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>\n"
    )


def _direction(each: DirectionReport, hit: bool) -> str:
    cells = (
        f"{each.samples:,}", words.number(each.e_value), f"{each.shift:+.4f}", words.shift(each.bound),
        words.shift(each.detectable),
    )  # fmt: skip
    numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr{_class("hit", hit)}><th scope="row">{escape(each.name)}</th>{numbers}</tr>'


def _facts(report: Report) -> str:
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts)
    listed = f'<dl class="words">{pairs}</dl>\n' if pairs else ""
    command = f"<pre><code>{escape(report.command)}</code></pre>\n" if report.command else ""
    return f'<section class="more" aria-labelledby="facts">\n<h2 id="facts">How it was run</h2>\n{command}{listed}</section>\n'


def _glossary() -> str:
    pairs = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in words.GLOSSARY)
    return (
        f'<section class="more" aria-labelledby="words">\n<h2 id="words">Words</h2>\n<dl class="words">{pairs}</dl>\n</section>\n'
    )


def _class(name: str, given: bool) -> str:
    return f' class="{name}"' if given else ""
