"""The page in a headless Chromium: chats, Markdown, streams side by side, the timeline, keyboard, dark and light."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from support.bert_model import bert_model
from support.browser import chromium, page_at
from support.control import PATIENCE_S, Gate
from support.fleet_servers import PoolServer, pool_server
from support.mcp_agent import Agent

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

pytest.importorskip("playwright", reason="needs a browser: nox -s page")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
SHOTS = os.environ.get("LLAMAPIPE_SCREENSHOTS")  # a folder to write pictures of the page to


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


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
    with page_at(browser, url) as page:
        yield page


def say(page: Page, text: str) -> None:
    """Sends a message and waits for the end of its answer."""
    page.fill("#message", text)
    page.locator("#message").press("Enter")
    page.locator("#stop").wait_for(state="hidden")


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
        page.locator("#stop").wait_for(state="hidden")
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
    page.locator("#side-stop").wait_for(state="hidden")
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
    keep(
        page,
        [
            ("user", "x" * 500),
            ("assistant", f"```\n{'long ' * 100}\n```\n|{'y' * 200}|b|\n|-|-|\n|1|2|\n\n{'z' * 500}"),
        ],
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
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 760})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.getElementById('log').scrollWidth") <= width
        shot(page, f"{width}-{scheme}")
    for text, back in (
        ("text", "panel"),
        ("text", "code"),
        ("dim", "panel"),
        ("dim", "code"),
        ("dim", "back"),
        ("error", "panel"),
        ("accent", "panel"),
        ("on-accent", "accent"),
        ("text", "own"),
    ):
        assert page.evaluate(CONTRAST, [f"--{text}", f"--{back}"]) >= 4.5, (text, back)
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


def test_the_times_of_requests_are_listed(page: Page) -> None:
    say(page, "Hello")
    page.locator("#tab-times").click()
    row = page.locator("#times-rows tr").first
    row.wait_for()
    assert "/v1/chat/completions" in row.inner_text() and "200" in row.inner_text()


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


# ---- the conversation


def keep(page: Page, messages: list[tuple[str, str]]) -> None:
    """The page finds a conversation in the browser's store when it is opened."""
    entries = [{"role": role, "content": content, "facts": ""} for role, content in messages]
    page.add_init_script(
        "if (!sessionStorage.getItem('conversation')) "
        f"sessionStorage.setItem('conversation', {json.dumps(json.dumps(entries))})"
    )


def answer_with(page: Page, *deltas: dict[str, str], is_whole: bool = True) -> None:
    """The next answers have these parts, which the bundled model does not write."""
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n" * is_whole
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, headers={"content-type": "text/event-stream"}),
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolServer]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        shutil.copy(lp.demo_model_path(), folder / f"{name}.gguf")
    bert_model(folder / "vectors.gguf")
    with pool_server(folder, "-c", "512", "-np", "4", "--memory", "1GiB", log=folder / "log") as server:
        yield server


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 390])
def test_a_server_with_several_models(browser: Browser, several: PoolServer, scheme: str, width: int) -> None:
    """One is chosen, and loaded and ended with the keyboard; the page shows what each takes."""
    page = browser.new_page(viewport={"width": width, "height": 760}, color_scheme=scheme)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(several.url)
    page.locator("#models option").nth(1).wait_for(state="attached")
    assert page.locator("#models option").all_text_contents() == [
        "first",
        "second",
    ]  # not the one that embeds
    page.select_option("#models", "second")
    say(page, "Hello")
    assert several.loaded() == ["second"]
    page.locator("#figures", has_text="KV cells").wait_for()
    page.reload()
    page.locator("#models option").nth(1).wait_for(state="attached")
    assert page.locator("#models").input_value() == "second"
    page.locator("#tab-chat").focus()
    page.keyboard.press("End")  # the last tab
    rows = page.locator("#rows tr")
    rows.nth(2).wait_for()
    assert [cell.split(",")[0] for cell in page.locator("#rows tr td:nth-of-type(1)").all_text_contents()] == [
        "unloaded", "loaded", "unloaded",
    ]  # fmt: skip
    assert "of 1 GiB" in page.locator("#memory").text_content()
    shot(page, f"models-{scheme}-{width}")
    page.locator("#rows button").nth(1).focus()
    page.keyboard.press("Enter")
    page.locator("#rows tr", has_text="second").get_by_text("unloaded").wait_for()
    assert page.evaluate("document.activeElement.dataset.model") == "second"  # the focus stays
    assert several.loaded() == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()
    assert not problems


def test_enter_sends_in_both_tabs_and_shift_enter_begins_a_line(page: Page) -> None:
    for tab, area, form in (("#tab-chat", "#message", "#chat"), ("#tab-side", "#prompt", "#side")):
        page.click(tab)
        page.fill(area, "one")
        page.locator(area).press("Shift+Enter")
        page.keyboard.type("two")
        assert page.input_value(area) == "one\ntwo"
        page.locator(area).press("Enter")
        page.locator(f"{form} .facts", has_text="first after").first.wait_for()
        page.locator(f"{form} .stop").wait_for(state="hidden")
    assert page.locator(".message.user").all_inner_texts() == ["one\ntwo"]


def test_enter_that_an_input_method_uses_sends_nothing(page: Page) -> None:
    page.locator("#message").focus()
    keyboard = page.context.new_cdp_session(page)
    keyboard.send("Input.imeSetComposition", {"text": "かな", "selectionStart": 2, "selectionEnd": 2})
    page.keyboard.press("Enter")
    keyboard.send("Input.insertText", {"text": "仮名"})
    assert page.locator(".message").count() == 0
    page.keyboard.press("Enter")
    page.locator(".message.user", has_text="仮名").wait_for()
    page.locator("#stop").wait_for(state="hidden")


def test_the_conversation_and_the_settings_survive_a_reload(page: Page) -> None:
    page.locator(".settings summary").click()
    page.fill("#max-tokens", "20")
    page.fill("#system", "Be brief.")
    page.keyboard.press("Escape")
    say(page, "Tell me a story about a fox.")
    before = page.locator(".message").all_inner_texts()
    assert "ended by the limit of 20 tokens" in before[1]
    page.reload()
    assert page.locator(".message").all_inner_texts() == before
    assert (page.input_value("#max-tokens"), page.input_value("#system")) == ("20", "Be brief.")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "And then?")
    assert [
        message["role"] for message in sent.value.post_data_json["messages"]
    ] == "system user assistant user".split()
    page.click("#reset")
    page.reload()
    assert page.locator(".message").count() == 0
    page.locator(".empty").wait_for()


def test_a_conversation_that_is_longer_than_the_context(page: Page) -> None:
    """The oldest turns are dropped."""
    page.locator(".settings summary").click()
    page.fill("#max-tokens", "4")
    page.keyboard.press("Escape")
    for _ in range(3):
        say(page, "once upon a time " * 50)
    assert page.locator(".message.assistant .facts", has_text="4 tokens").count() == 3
    assert page.locator("[role=alert]").count() == 0


# The answer stops after its first text and ends only with its connection, however fast the model is.
HOLD_THE_ANSWER = """() => {
    const fetched = window.fetch;
    window.fetch = async (...request) => {
        const response = await fetched(...request);
        if (!request[0].endsWith("completions")) return response;
        const reader = response.body.getReader();
        const decoder = new TextDecoder(), encoder = new TextEncoder();
        let text = "";
        const held = new ReadableStream({ async start(answer) {
            let first;
            while (!(first = /^[^]*?"content":"[^"][^]*?\\n\\n/.exec(text)))
                text += decoder.decode((await reader.read()).value, { stream: true });
            answer.enqueue(encoder.encode(first[0]));
            reader.closed.catch((error) => answer.error(error));
        } });
        return new Response(held, response);
    };
}"""


def test_a_reload_while_an_answer_is_written(page: Page, engine: lp.Engine) -> None:
    page.evaluate(HOLD_THE_ANSWER)
    page.fill("#message", "Tell me a story about a fox.")
    page.locator("#message").press("Enter")
    page.locator(".markdown p").wait_for()
    page.reload()
    page.locator(".message.assistant .facts", has_text="interrupted by a reload").wait_for()
    assert page.locator(".markdown").inner_text()
    say(page, "And then?")


def test_a_conversation_that_the_browser_does_not_keep_says_so(page: Page) -> None:
    page.evaluate(
        "for (let n = 2 ** 22; n > 0; n = n >> 1)"
        " try { sessionStorage.setItem('x' + n, 'x'.repeat(n)); } catch {}"
    )
    say(page, "Hello")
    page.locator("#note", has_text="does not keep this conversation").wait_for()
    assert page.locator(".message.assistant .facts", has_text="token").count() == 1
    page.reload()
    assert page.locator(".message").count() == 0


@pytest.mark.parametrize("kept", ["{", "3", '[{"role": "user"}]', "[null]"])
def test_a_store_that_others_wrote_to(page: Page, kept: str) -> None:
    page.evaluate(
        "(kept) => { for (const name of ['conversation', 'settings']) sessionStorage.setItem(name, kept); }",
        kept,
    )
    page.evaluate("window.addEventListener('pagehide', (event) => event.stopImmediatePropagation(), true)")
    page.reload()
    page.locator(".empty").wait_for()
    say(page, "Hello")


def test_a_failed_answer_is_shown_in_place_and_asked_for_again(browser: Browser, engine: lp.Engine) -> None:
    page = browser.new_page()
    with serve(engine) as server:
        page.goto(server.url)
        say(page, "one")
    say(page, "two")
    failed = page.locator(".message.assistant").nth(1)
    assert "The server cannot be reached." in failed.inner_text()
    page.locator("#figures", has_text="cannot be reached").wait_for()
    answer_with(page, {"content": "yes"})
    with page.expect_request("**/v1/chat/completions") as sent:
        failed.locator("button.again").click()
    assert [message["content"] for message in sent.value.post_data_json["messages"]][::2] == ["one", "two"]
    page.locator(".message.assistant").nth(1).locator(".markdown", has_text="yes").wait_for()
    assert page.locator(".message").count() == 4
    page.close()


def test_a_lost_connection_says_so_and_keeps_what_came(page: Page) -> None:
    answer_with(page, {"content": "The half of"}, is_whole=False)
    say(page, "Hello")
    assert page.locator(".markdown").inner_text() == "The half of"
    assert "connection to the server was lost" in page.locator("[role=alert]").inner_text()


def test_reasoning_is_folded(page: Page) -> None:
    answer_with(page, {"reasoning_content": "I think <b>so</b>."}, {"content": "Yes."})
    say(page, "Hello")
    assert not page.locator(".thoughts").is_visible()
    page.locator(".reasoning summary").click()
    assert page.locator(".thoughts").inner_text() == "I think <b>so</b>."
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Why?")
    assert sent.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_who_reads_upward_is_left_there(page: Page) -> None:
    answer_with(page, *({"content": f"line {n}\n\n"} for n in range(60)))
    say(page, "Hello")
    log = page.locator("#log")
    below = "log => Math.round(log.scrollHeight - log.scrollTop - log.clientHeight)"
    assert log.evaluate(below) == 0
    log.evaluate("log => { log.scrollTop = 0; }")
    page.locator("#latest").wait_for()
    page.unroute_all()
    # A word may arrive before the event that tells of the reader's scrolling.
    page.evaluate("addEventListener('scroll', event => event.stopPropagation(), { capture: true })")
    # From the first word of the next answer on, the reader is at the beginning.
    log.evaluate(
        """log => { const watch = new MutationObserver(() => {
        if (!log.querySelectorAll(".message")[3]?.querySelector(".markdown p")) return;
        watch.disconnect(); log.scrollTop = 0; });
        watch.observe(log, { childList: true, subtree: true, characterData: true }); }"""
    )
    say(page, "Tell me a story about a fox.")
    assert log.evaluate("log => log.scrollTop") == 0
    page.locator("#latest").click()
    assert log.evaluate(below) == 0


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_code_and_answers_are_copied(browser: Browser, url: str, has_clipboard: bool) -> None:
    context = browser.new_context()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    if not has_clipboard:  # as on a page from another machine over plain HTTP
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    code = "if a < b:\n\tprint('</textarea>')\n"
    answer = f"See:\n```python\n{code}\n```"
    keep(page, [("user", "Hello"), ("assistant", answer)])
    page.goto(url)
    for button, copied in ((".bar .copy", code), (".foot .copy", answer)):
        page.locator(button).click()
        page.locator(button, has_text="Copied").wait_for()
        page.locator("#message").focus()
        page.keyboard.press("Control+V")
        assert page.input_value("#message") == copied
        page.fill("#message", "")
    context.close()


def test_every_control_has_a_name_and_motion_can_be_reduced(browser: Browser, url: str) -> None:
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(url)
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    page.locator("#figures b").first.wait_for()
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, textarea, [tabindex], [role]")].filter((one) =>
        !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.labels?.length
        || one.textContent.trim() || one.matches("main, [role=status]"))).map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    context.close()


# ---- Markdown

LIGHT = """
  const light = (name) => { const probe = document.createElement("i"); probe.style.color = `var(${name})`;
    document.body.append(probe); const parts = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3);
    probe.remove(); const [r, g, b] = parts.map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
"""
CONTRAST = f"""(names) => {{ {LIGHT}
  const [a, b] = names.map(light).sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); }}"""
RENDER = """async ([text, step]) => {
  const { Markdown } = await import("/page/markdown.js");
  const root = document.createElement("div"), markdown = new Markdown(root);
  for (let i = 0; i < text.length; i += step) markdown.write(text.slice(i, i + step));
  markdown.end();
  root.normalize();
  return root.innerHTML
    .replaceAll(/ (title|target|rel|tabindex|type)="[^"]*"/g, "")
    .replaceAll('<button class="copy">Copy</button>', "");
}"""
ELEMENTS = """a blockquote button code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre span strong
    table tbody td th thead tr ul""".split()


def box(language: str, code: str) -> str:
    return f'<div class="code"><div class="bar"><span>{language}</span></div><pre><code>{code}</code></pre></div>'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b** *c* `d` ~~e~~\nf", "<p>a <strong>b</strong> <em>c</em> <code>d</code> <del>e</del>\nf</p>"),
        ("***a*** __b__ a_b_c 2*3*4", "<p><em><strong>a</strong></em> <strong>b</strong> a_b_c 2*3*4</p>"),
        ("**a *b", "<p>**a *b</p>"),
        ("a `b **c** d", "<p>a `b <strong>c</strong> d</p>"),
        ("`` a ` b `` \\*c\\*", "<p><code>a ` b</code> *c*</p>"),
        ("# A\n### B `c`\nD\n===\nE\n---\n", "<h1>A</h1><h3>B <code>c</code></h3><h1>D</h1><h2>E</h2>"),
        ("a\n\n---\n***\n#b", "<p>a</p><hr><hr><p>#b</p>"),
        (
            "- a\n  - b\n    c\n- d",
            "<ul><li><p>a</p><ul><li><p>b\nc</p></li></ul></li><li><p>d</p></li></ul>",
        ),
        (
            "1. a\n   - b\n\n2) c",
            '<ol><li><p>a</p><ul><li><p>b</p></li></ul></li></ol><ol start="2"><li><p>c</p></li></ol>',
        ),
        ("3. a\n4. b\n\n   c", '<ol start="3"><li><p>a</p></li><li><p>b</p><p>c</p></li></ol>'),
        ("> a\nb\n> - c\n\nd", "<blockquote><p>a\nb</p><ul><li><p>c</p></li></ul></blockquote><p>d</p>"),
        ("```py\na <b>\n\n  c\n```\nd", box("py", "a &lt;b&gt;\n\n  c") + "<p>d</p>"),
        ("~~~\n```\n\ta", box("", "```\n\ta")),
        (
            "1. a\n   ```\n   b\nc\n   ```\n2. d",
            "<ol><li><p>a</p>" + box("", "b\nc") + "</li><li><p>d</p></li></ol>",
        ),
        (
            "a\n|b|c|\n|-|:-:|\n|`d`|e\\|f|\ng",
            (
                '<p>a</p><div class="table"><table><thead><tr><th>b</th><th class="center">c</th></tr></thead>'
                '<tbody><tr><td><code>d</code></td><td class="center">e|f</td></tr></tbody></table></div><p>g</p>'
            ),
        ),
        (
            "[a *b*](https://x.y/(z)) <https://x.y>.",
            '<p><a href="https://x.y/(z)">a <em>b</em></a> &lt;<a href="https://x.y/">https://x.y</a>&gt;.</p>',
        ),
        (
            "(see http://a.b/c_d), mailto [m](mailto:a@b.c)",
            '<p>(see <a href="http://a.b/c_d">http://a.b/c_d</a>), mailto <a href="mailto:a@b.c">m</a></p>',
        ),
        ("![pic](https://x.y/p.png)", '<p><a href="https://x.y/p.png">pic</a></p>'),
        ("    a\n      b", "<p>    a\n      b</p>"),
        ("", ""),
    ],
)
def test_markdown_whatever_pieces_it_arrives_in(page: Page, text: str, html: str) -> None:
    for step in (1, 2, 3, 5, 1000):
        assert page.evaluate(RENDER, [text, step]) == html


HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1>",
    "</div></textarea></script><iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](java\tscript:window.hit=1)",
    "[a](data:text/html,<script>window.hit=1</script>) ![b](data:image/svg+xml,x) [c](vbscript:x) [d](//e.x) [e](/v1)",
    "[a](<javascript:window.hit=1>) <javascript:window.hit=1> [b](\x01javascript:window.hit=1)",
    '[a](https://x.y/"onmouseover="window.hit=1)',
    "```<img src=x onerror=window.hit=1>\n<script>window.hit=1</script>\n```",
    "|<img src=x onerror=window.hit=1>|b|\n|-|-|\n|<script>window.hit=1</script>|`<b>`|",
    "# <a href='javascript:window.hit=1'>x</a>\n> <style>*{display:none}</style>\n- <form action=https://x.y><button>",
    "\u202eabc\u2066 \u200b\u200d\ufeff \0 \ud800 &lt;b&gt; &#60;b&#62;",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_model_writes_is_parsed_as_html(page: Page, text: str) -> None:
    answer_with(page, *({"content": delta} for delta in text))
    say(page, text)
    shown = page.locator(".message.assistant .markdown")
    wrong = shown.evaluate(
        """(root, allowed) => [...root.querySelectorAll("*")].filter((one) =>
        !allowed.includes(one.localName)
        || one.getAttributeNames().some((name) => /^on|^style$|^src/.test(name))
        || (one.localName === "a" && !["http:", "https:", "mailto:"].includes(one.protocol))
        || (one.localName === "a" && !one.rel.includes("noopener"))).map((one) => one.outerHTML)""",
        ELEMENTS,
    )
    assert wrong == []
    assert page.evaluate("window.hit") is None
    written = "<script>" in text or "<img" in text or "javascript:" in text
    assert not written or any(part in shown.inner_text() for part in ("<script>", "<img", "javascript:"))
    assert page.locator(".message.user").evaluate("one => one.childElementCount") == 0


def test_the_browser_refuses_innerhtml(browser: Browser, url: str) -> None:
    page = browser.new_page()
    page.goto(url)
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.createElement('div').innerHTML = '<b>x</b>'")
    page.close()


def test_random_marks_in_random_pieces(page: Page) -> None:
    parts = (
        "* ** _ ` ``` ~~ [ ]( ) https://a.b ! \\ >  -  1. # | |-|-| --- a é 字 😀 <b> : . -. 1) ===".split()
    )
    parts += ["\n", "\n\n", "> ", "- ", "1. ", "# ", " ", "    ", "\t", "b c", ' "']
    parts += [
        "](",
        "[a](",
        "(",
        ")",
        '"',
        "'",
        "[a](https://x.y",
        "https://x.y/(",
        '[a](<https://x.y> "t")',
        "))",
    ]
    draw = random.Random(33)
    texts = ["".join(draw.choices(parts, k=draw.randint(1, 60))) for _ in range(400)]
    differ = page.evaluate(
        f"""async (texts) => {{ const render = {RENDER}; const wrong = [];
        for (const text of texts) {{ const whole = await render([text, 1e9]);
          for (const step of [1, 2, 3, 7]) if (await render([text, step]) !== whole) wrong.push([text, step]); }}
        return wrong; }}""",
        texts,
    )
    assert differ == []


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "word ",
            "x",
            "*",
            "**a ",
            "*a **b ",
            "_",
            "`",
            "` `` ",
            "~~a",
            "[",
            "[a](",
            "![",
            "](",
            "\\",
            "> ",
            ">",
            "- ",
        ),
        *(
            "1. ",
            "#",
            "|",
            "|a",
            "-",
            "~",
            "```",
            "<",
            "https://",
            "https://)",
            "\n",
            "> \n",
            "- a\n",
            "|a|b|\n",
            "a\n",
        ),
        *("```\n", "\t", " ", "字", "\u202e", "\u200b"),
    ],
)
def test_the_work_is_linear_in_the_length(page: Page, unit: str) -> None:
    """Each piece changes little on the page, and the elements stay shallow, whatever repeats for 100,000 characters."""
    text = (unit * 100_000)[:100_000]
    records, depth, seconds = page.evaluate(
        """async (text) => {
        const { Markdown } = await import("/page/markdown.js");
        const root = document.createElement("div"), markdown = new Markdown(root);
        const watch = new MutationObserver(() => {});
        watch.observe(root, { childList: true, characterData: true, subtree: true });
        const began = performance.now();
        let records = 0;
        const write = (part) => { markdown.write(part); records += watch.takeRecords().length; };
        for (let i = 0; i < text.length; i += 5) write(text.slice(i, i + 5));
        markdown.end();
        records += watch.takeRecords().length;
        let depth = 0;
        for (const one of root.querySelectorAll("*")) {
          let n = 0;
          for (let at = one; at !== root; at = at.parentNode) n++;
          depth = Math.max(depth, n);
        }
        return [records, depth, (performance.now() - began) / 1000];
        }""",
        text,
    )
    assert records < 3 * len(text)
    assert depth < 80
    assert seconds < 20


READS = """async (text) => {
  const { Markdown } = await import("/page/markdown.js");
  const { exec } = RegExp.prototype;
  let n = 0;
  RegExp.prototype.exec = function (s) {
    const from = this.global ? this.lastIndex : 0, found = exec.call(this, s);
    n += this.sticky ? 1 : (found ? found.index + found[0].length : s.length) - from;
    return found;
  };
  try {
    const markdown = new Markdown(document.createElement("div"));
    for (const c of text) markdown.write(c);
    markdown.end();
  } finally {
    RegExp.prototype.exec = exec;
  }
  return n / text.length;
}"""


@pytest.mark.parametrize(
    "unit",
    [
        *("word ", " ", "\t", "`", "`" * 15 + " ", "[a](", "](", "- ", "#", "1" * 9 + ". ", "|a"),
        *("[a](" + " " * 2040, "[a](" + "(" * 500, "[a](b" * 500, "[a](" + "b" * 2040, "[a](<" + "b" * 2040),
        *(
            '[a](b "' + "c" * 2040,
            '[a](b "' + " " * 2040,
            "[a](b 'c",
            "![a](b" + " " * 600,
            "https://" + "a" * 2040,
        ),
        *(
            "https://" + ")" * 2040,
            "- " * 500 + "\n",
            "- " * 500 + "a\n",
            "a\n" + "=" * 1000 + "\n",
            "~~~" + "a" * 700 + "\n",
        ),
        *(
            "```\n" + " " * 600 + "`" * 300 + "\n",
            "|a" * 300 + "\n" + "|-" * 300 + "\n",
            "1. " * 300 + "\n",
            "> " * 300 + "\n",
        ),
    ],
)
def test_every_character_is_read_a_bounded_number_of_times(page: Page, unit: str) -> None:
    """By what regular expressions read of 20,000 characters that arrive one by one; 20 and less in most cases."""
    assert page.evaluate(READS, (unit * 20_000)[:20_000]) < 60


def test_a_long_answer_is_shown_while_it_arrives(page: Page) -> None:
    line = "A sentence with **bold** words, `code` and a [link](https://example.org/).\n"
    answer_with(page, *({"content": piece} for piece in [line[:20], line[20:], "\n"] * 6000))
    say(page, "Hello")
    assert page.locator(".message.assistant .markdown strong").count() == 6000


# ---- pages of other sites


class OtherSite(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>Cat pictures</title>")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def other_site(browser: Browser) -> Iterator[Page]:
    """A page of a site whose name leads to this machine, as after DNS rebinding."""
    site = ThreadingHTTPServer(("127.0.0.1", 0), OtherSite)
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    rules = "--host-resolver-rules=MAP cats.example 127.0.0.1"
    other = browser.browser_type.launch(
        executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
        args=["--no-sandbox", rules],
    )
    try:
        page = other.new_page()
        page.goto(f"http://cats.example:{site.server_port}/")
        assert page.title() == "Cat pictures"
        yield page
    finally:
        other.close()
        site.shutdown()
        site.server_close()
        thread.join()


SEND = """async ([url, type, mode]) => {
    const body = JSON.stringify({model: "demo", prompt: "My secret", max_tokens: 4});
    try {
        const answer = await fetch(url, {method: "POST", mode, headers: {"content-type": type}, body});
        return [answer.type, answer.status];
    } catch (error) {
        return ["error", 0];
    }
}"""


def test_a_page_of_another_site_computes_and_reads_nothing(
    other_site: Page, engine: lp.Engine, url: str
) -> None:
    before = engine.stats().n_prompt_tokens
    completions = f"{url}/v1/completions"
    assert other_site.evaluate(SEND, [completions, "text/plain", "no-cors"]) == ["opaque", 0]
    assert other_site.evaluate(SEND, [completions, "application/json", "cors"]) == ["error", 0]
    port = url.rpartition(":")[2]
    answer = other_site.goto(f"http://cats.example:{port}/")
    assert answer is not None and answer.status == 403
    assert other_site.evaluate(SEND, ["/v1/completions", "application/json", "cors"]) == ["basic", 403]
    assert engine.stats().n_prompt_tokens == before


# ---- jobs and tools


def test_jobs_are_listed_and_cancelled(browser: Browser, engine: lp.Engine, tmp_path: Path) -> None:
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 4}}
    lines = "".join(json.dumps({**line, "custom_id": f"{i}"}) + "\n" for i in range(5))
    with (
        serve(engine, settings=ServerSettings(store=tmp_path / "answers.db")) as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=PATIENCE_S) as client,
    ):
        page = browser.new_page(viewport={"width": 1100, "height": 760})
        page.goto(server.url)
        page.locator("#tab-jobs").click()
        page.locator("#jobs-problem", has_text="There are no batches").wait_for()
        with Gate(engine) as gate:
            form = {"purpose": "batch"}
            file = client.post("/files", data=form, files={"file": lines.encode()}).json()["id"]
            asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            first, second = (client.post("/batches", json=asked).json()["id"] for _ in range(2))
            later = {"input": "Hello", "max_output_tokens": 4, "background": True}
            answers = [client.post("/responses", json=later).json()["id"] for _ in range(2)]
            gate.wait()
            page.locator("#answers tr").nth(1).wait_for()
            assert page.locator("#answers th").all_text_contents() == answers[::-1]
            page.locator("#batches tr").nth(1).get_by_text("0 of 5").wait_for()
            shot(page, "jobs")
            page.get_by_label(f"Cancel {answers[1]}").click()
            page.get_by_label(f"Cancel {second}").click()
            page.locator("#batches tr", has_text=second).get_by_text("cancelled").wait_for()
            gate.open()
        page.locator("#batches tr", has_text=first).get_by_text("5 of 5").wait_for()
        page.locator("#answers").wait_for(state="hidden")
        assert client.get(f"/responses/{answers[1]}").json()["status"] == "cancelled"
        assert client.get(f"/responses/{answers[0]}").json()["status"] == "incomplete"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


def test_without_a_store_there_are_no_jobs(page: Page) -> None:
    page.locator("#figures b").first.wait_for()
    assert page.locator("#tab-jobs").is_hidden() and page.locator("#tools").is_hidden()


@pytest.fixture
def tools_page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The model calls ``add``, then ``fail``, then says that it is done."""
    with Agent(tmp_path, [("add", {"a": 2, "b": 3}), ("fail", {})]) as agent:
        page = browser.new_page(viewport={"width": 1100, "height": 760})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(agent.server.url)
        page.locator(".settings summary").click()
        page.fill("#temperature", "0")
        page.get_by_label("good", exact=True).check()
        page.keyboard.press("Escape")
        yield page
        page.close()
        assert not problems


def test_tools_run_when_the_reader_allows_them(tools_page: Page) -> None:
    page = tools_page
    say(page, "Go.")
    call = page.locator(".call", has_text="asks to call add")
    assert '{"a":2,"b":3}' in call.inner_text().replace(" ", "")
    shot(page, "tools-question")
    page.reload()  # the question is kept
    page.locator(".call button", has_text="Always allow add").click()
    page.locator(".call", has_text="asks to call fail").wait_for()
    page.locator("#stop").wait_for(state="hidden")
    done = page.locator(".call summary", has_text="good · add")
    done.click()
    assert page.locator(".call pre", has_text="5").count() >= 1
    page.locator(".call button", has_text="Refuse").click()
    page.locator(".message.assistant", has_text="DONE.").wait_for()
    assert page.locator(".call button").count() == 0
    assert page.locator(".call", has_text="was allowed to call add").is_visible()
    assert page.locator(".call", has_text="was not allowed to call fail").is_visible()
    shot(page, "tools")
    with page.expect_request("**/v1/responses") as sent:
        say(page, "Again.")
    body = sent.value.post_data_json
    assert body["tools"][0]["require_approval"] == {"never": {"tool_names": ["add"]}}
    kinds = [item.get("type") for item in body["input"]]
    assert kinds.count("mcp_approval_response") == 2 and kinds.count("mcp_call") == 1
    before = page.locator(".message").all_inner_texts()
    page.reload()
    assert page.locator(".message").all_inner_texts() == before


def test_a_conversation_continues_without_tools(tools_page: Page) -> None:
    page = tools_page
    say(page, "Go.")
    page.locator(".call button", has_text="Refuse").wait_for()
    page.locator(".settings summary").click()
    page.get_by_label("good", exact=True).uncheck()
    page.keyboard.press("Escape")
    say(page, "Never mind.")
    assert page.locator(".call button").count() == 0
    assert (
        page.locator(".message.assistant").nth(1).inner_text() and not page.locator(".message .error").count()
    )
