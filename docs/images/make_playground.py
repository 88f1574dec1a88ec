"""Pictures of the playground: python docs/images/make_playground.py http://127.0.0.1:8000/ [prompt]"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from browsing import SIZES, chromium  # noqa: E402  # found by the line above

PROMPT = "Copy this, word for word: red, green, blue, red, green, blue, red, green, blue, red, green, blue, red, green, blue."


def take(url: str, prompt: str = PROMPT, folder: Path = HERE) -> None:
    """playground-{desktop,phone}.png (one light, one dark), playground-compare.png, playground-acceptance.png."""
    with chromium() as browser:
        for size, theme in (("desktop", "light"), ("phone", "dark")):
            context = browser.new_context(viewport=SIZES[size], color_scheme=theme, has_touch=size == "phone")
            page = context.new_page()
            page.goto(url)
            page.locator("#examples button").first.wait_for()
            page.fill("#seed", "3")
            page.fill("#prompt", prompt)
            page.press("#prompt", "Enter")
            page.locator(".caption:not(:empty)").wait_for(timeout=120_000)
            token = page.locator(".token[data-origin=draft]").nth(4)
            if size == "phone":
                token.click()
            else:
                token.hover()
            page.wait_for_timeout(300)
            page.screenshot(path=folder / f"playground-{size}.png")
            if size == "desktop":
                page.fill("#prompt", prompt)
                page.click("#compare")
                page.locator(".comparison:is(.same, .different)").wait_for(timeout=240_000)
                page.screenshot(path=folder / "playground-compare.png")
                page.click("#tab-acceptance")
                page.get_by_role("button", name="Draw 1,000").click()
                page.wait_for_timeout(300)
                page.screenshot(path=folder / "playground-acceptance.png", full_page=True)
            context.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("url: missing: name the address of a server, as http://127.0.0.1:8000/")
    take(*sys.argv[1:3])
