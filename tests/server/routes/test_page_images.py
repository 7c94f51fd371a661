"""Images on the page, in a headless Chromium: chosen, pasted, dropped, shown, removed, sent and kept."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import chromium, page_at
from support.media_models import idefics3_projector, model_with_tile_tokens, png

import llamapipe as lp
from llamapipe.server import serve

pytest.importorskip("playwright", reason="needs a browser: nox -s page")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
SHOTS = os.environ.get("LLAMAPIPE_SCREENSHOTS")  # a folder to write pictures of the page to
PNG = png(200, 120)
SEND = """([selector, kind, name, data, type]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  const target = document.querySelector(selector);
  const options = { bubbles: true, cancelable: true };
  if (kind === "paste") target.dispatchEvent(new ClipboardEvent(kind, { ...options, clipboardData: transfer }));
  else for (const one of ["dragenter", "dragover", kind])
    target.dispatchEvent(new DragEvent(one, { ...options, dataTransfer: transfer }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page")
    idefics3_projector(folder / "mmproj.gguf")
    with (
        lp.Model(model_with_tile_tokens(folder / "text.gguf")) as model,
        lp.Engine(model, n_ctx=512, n_seq_max=4) as engine,
        serve(engine) as server,
    ):
        yield server.url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with page_at(browser, url) as page:
        page.locator("#attach").wait_for()
        yield page


def give(page: Page, kind: str, data: bytes = PNG, name: str = "a.png", type_: str = "image/png") -> None:
    selector = "#message" if kind == "paste" else "#log"
    page.evaluate(SEND, [selector, kind, name, base64.b64encode(data).decode(), type_])


def sent(page: Page, press: str = "Enter") -> list[Any]:
    """Sends the message; what the request held, once its answer has ended."""
    with page.expect_request("**/v1/chat/completions") as request:
        page.locator("#message").press(press)
    page.locator(".message.assistant .facts", has_text="token").last.wait_for()
    page.locator("#stop").wait_for(state="hidden")
    body = json.loads(request.value.post_data or "")
    messages: list[Any] = body["messages"]
    return messages


def kinds(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    return [part["type"] for part in content] if isinstance(content, list) else ["text"]


def test_images_are_chosen_pasted_and_dropped_and_go_with_the_message(page: Page) -> None:
    thumbnails = page.locator("#images img")
    page.locator("#file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    thumbnails.nth(0).wait_for()
    give(page, "paste")
    thumbnails.nth(1).wait_for()
    give(page, "drop")
    thumbnails.nth(2).wait_for()
    page.fill("#message", "What is this?")
    messages = sent(page)
    assert kinds(messages[-1]) == ["image_url"] * 3 + ["text"]
    url = messages[-1]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.partition(",")[2]) == PNG
    assert page.locator(".message.user img").count() == 3
    assert page.locator(".message.user img").first.evaluate("image => image.naturalWidth") == 200
    assert thumbnails.count() == 0
    page.reload()
    assert page.locator(".message.user img").count() == 3
    page.fill("#message", "And why?")
    messages = sent(page)
    assert [kinds(message) for message in messages[::2]] == [["image_url"] * 3 + ["text"], ["text"]]


def test_the_keyboard_alone(page: Page) -> None:
    page.on("filechooser", lambda _: None)  # from now on no dialog is opened
    page.locator("#attach").focus()
    assert page.evaluate("document.activeElement.id") == "attach"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    two: Any = [{"name": f"{i}.png", "mimeType": "image/png", "buffer": png(200, 120, i)} for i in range(2)]
    chooser.value.set_files(two)
    page.locator("#images img").nth(1).wait_for()
    page.wait_for_function("document.activeElement.id === 'message'")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove Image 2"
    page.keyboard.press("Enter")
    assert page.locator("#images img").count() == 1
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove Image 1"
    page.locator("#message").focus()
    assert kinds(sent(page)[-1]) == ["image_url"]  # no text is needed


def test_large_and_unknown_images_are_drawn_again_and_other_files_refused(page: Page) -> None:
    give(
        page,
        "paste",
        b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "a.svg",
        "image/svg+xml",
    )
    page.locator("#note", has_text="a.svg is no image that this browser can read").wait_for()
    give(page, "drop", b"text", "notes.txt", "text/plain")
    page.locator("#note", has_text="notes.txt is no image").wait_for()
    large = png(1600, 900)
    assert len(large) > 2**20
    give(page, "drop", large)
    page.locator("#images img").wait_for()
    source = page.locator("#images img").get_attribute("src") or ""
    assert source.startswith("data:image/jpeg;base64,")
    assert page.locator("#images img").evaluate("image => image.naturalWidth") == 1536
    page.locator("#reset").click()
    assert page.locator("#images img").count() == 0


def test_a_model_without_images(browser: Browser, demo: lp.Model) -> None:
    with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine, serve(engine) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.locator("#model", has_text="demo").wait_for()
        assert not page.locator("#attach").is_visible()
        give(page, "paste")
        page.locator("#note", has_text="This model takes no images.").wait_for()
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_and_two_widths(browser: Browser, url: str, scheme: str) -> None:
    page = browser.new_page(
        viewport={"width": 390, "height": 760}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page.goto(url)
    page.locator("#attach").wait_for()
    for i in range(5):
        give(page, "paste", png(300, 200, i))
    page.locator("#images img").nth(4).wait_for()
    page.fill("#message", "What are these?")
    page.locator("#message").press("Enter")
    page.locator(".message.assistant .foot").wait_for()
    page.locator("#stop").wait_for(state="hidden")
    for i in range(5):
        give(page, "paste", png(300 if i % 2 else 100, 200, i))
    page.locator("#images img").nth(4).wait_for()
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 760})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.getElementById('log').scrollWidth") <= width
        assert page.locator("#message").is_visible()
        if SHOTS:
            page.screenshot(path=Path(SHOTS) / f"images-{width}-{scheme}.png")
    page.close()
