"""The page in a headless Chromium: chats, streams side by side, the timeline, keyboard, dark and light."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

pytest.importorskip("playwright", reason="needs a browser: nox -s page")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
SHOTS = os.environ.get("LLAMAPIPE_SCREENSHOTS")  # a folder to write pictures of the page to


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here; on Debian ci/setup_chromium_debian.sh installs it")
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: lp.Engine) -> Iterator[str]:
    with serve(engine) as server:
        yield server.url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1100, "height": 760})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    page.close()
    assert not problems


def shot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def test_a_conversation_with_the_keyboard_alone(page: Page, engine: lp.Engine) -> None:
    page.locator("#message").focus()
    page.keyboard.type("Tell me a story about a fox.")
    page.keyboard.press("Enter")
    answers = page.locator(".message.assistant")
    answers.locator(".facts", has_text="tokens").wait_for()
    page.keyboard.type("And then?")
    page.keyboard.press("Enter")
    answers.nth(1).locator(".facts", has_text="tokens").wait_for()
    assert page.locator(".message.user").all_inner_texts() == ["Tell me a story about a fox.", "And then?"]
    assert page.evaluate("document.activeElement.id") == "message"
    page.locator("#figures", has_text="first token").wait_for()
    shot(page, "chat-light")


def test_escape_stops_an_answer_and_the_next_one_works(page: Page, engine: lp.Engine) -> None:
    page.locator(".settings summary").click()
    page.fill("#max-tokens", "480")
    page.fill("#system", "Go on and on.")
    page.locator(".settings summary").click()
    for _ in range(3):
        page.fill("#message", "Tell me a story about a fox.")
        page.keyboard.press("Enter")
        page.keyboard.press("Escape")
        page.locator("#stop[disabled]").wait_for()
    page.fill("#message", "Hello")
    page.keyboard.press("Enter")
    page.locator(".message.assistant").nth(3).locator(".facts", has_text="tokens/s").wait_for()


def test_streams_side_by_side(page: Page) -> None:
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#side").is_visible() and not page.locator("#chat").is_visible()
    page.fill("#streams", "12")
    page.locator("#side-form button[type=submit]").click()
    page.locator("#side-total", has_text="together").wait_for()
    page.locator("#side-stop[disabled]").wait_for()
    cells = page.locator(".cell").all_inner_texts()
    assert len(cells) == 12
    assert len({text.partition("\n")[2] for text in cells}) > 1
    assert all(len(text) > 40 for text in cells)
    shot(page, "side-light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_and_a_narrow_window(browser: Browser, url: str, scheme: str) -> None:
    page = browser.new_page(
        viewport={"width": 390, "height": 760}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page.goto(url)
    page.locator("#figures b").first.wait_for()
    red, green, blue = (
        int(part)
        for part in page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3)"
        )
    )
    assert (red + green + blue > 600) == (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    shot(page, f"narrow-{scheme}")
    page.close()


def test_the_timeline_is_drawn_and_paused(page: Page) -> None:
    page.fill("#message", "Tell me a story about a fox.")
    page.keyboard.press("Enter")
    page.locator(".message.assistant .facts", has_text="tokens/s").wait_for()
    # Steps of the answer, and not only of its beginning.
    page.locator("#timeline").evaluate(
        """canvas => new Promise((done) => { const look = () =>
        Number(canvas.dataset.spans) > 50 ? done() : requestAnimationFrame(look); look(); })"""
    )
    page.locator("#pause").click()
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    colours = page.evaluate(
        """() => { const c = document.getElementById('timeline');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const found = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200)
        found.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]); return found.size; }"""
    )
    assert colours >= 3


def test_a_key_is_asked_for_and_used(browser: Browser, engine: lp.Engine) -> None:
    with serve(engine, settings=ServerSettings(api_keys=("secret",))) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.locator("#model", has_text="API key").wait_for()
        page.locator(".settings summary").click()
        page.fill("#key", "secret")
        page.locator("#key").blur()
        page.locator("#model", has_text="demo").wait_for()
        page.close()
