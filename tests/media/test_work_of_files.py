"""Files that ask for much work: how much of them is decoded, whose image comes next, and what ends the work."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import perf_counter, thread_time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image, ImageOps
from support.control import PATIENCE_S, until, wait_until
from support.hostile_media import IMAGES, SOUNDS, jpeg_of_scans
from support.media_models import idefics3_projector, model_with_tile_tokens, picture
from support.media_mutants import mutant, wav, whole

import llamapipe as lp
from llamapipe._engine.policy.core import State
from llamapipe._engine.runtime.encoder import MediaEncoder
from llamapipe.chat.media import with_paths_below
from llamapipe.errors import EngineClosedError, InvalidRequestError
from llamapipe.media import _containers as containers
from llamapipe.media.decode import Given, media_in
from llamapipe.media.turns import Turns
from llamapipe.wanted import Limit, check_wanted, deadline, limited
from llamapipe.work.tenant import Tenant, tenant

MOST_S = 3.0  # of processor time; without limits several of the files take 6 to 13 s, others 1 s and more a megabyte


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", IMAGES)
def test_images_that_ask_for_much_work(name: str) -> None:
    is_read, make = IMAGES[name]
    data = make()
    began_s = thread_time()
    if is_read:
        assert Given("image", data, "here").pixels().shape == (32, 48, 3)
        contained = containers.picture_in(data)
        assert (
            contained is not None and len(contained.data) < 10_000
        )  # of its megabytes, the decoder gets the picture
    else:
        with pytest.raises(InvalidRequestError, match="here: the image cannot be decoded"):
            Given("image", data, "here").pixels()
    assert thread_time() - began_s < MOST_S


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds_that_ask_for_much_work(name: str) -> None:
    is_read, make = SOUNDS[name]
    data = make()
    began_s = thread_time()
    if is_read:
        assert np.isfinite(Given("sound", data, "here").samples(16000)).all()
    else:
        with pytest.raises(InvalidRequestError, match="here: the"):
            Given("sound", data, "here").samples(16000)
    assert thread_time() - began_s < MOST_S


def test_as_many_scans_as_are_allowed() -> None:
    """The limit is one of work: small images may have more scans than large ones."""
    for side, most in ((5792, 16), (2000, 134), (500, 256)):
        n = most - 1  # beside the first
        assert Given("image", jpeg_of_scans(n, side, side), "here").pixels().shape == (side, side, 3)
        with pytest.raises(InvalidRequestError, match=f"more than {most} scans for its size"):
            Given("image", jpeg_of_scans(n + 1, side, side), "here").pixels()


def pixels_of_pillow(data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "I;16":
            return np.repeat(np.asarray(upright)[:, :, None] >> 8, 3, 2)
        return np.asarray(upright.convert("RGB"))


def turned(kind: str, orientation: int, order: bytes) -> bytes:
    exif = order + (b"*\0\x08\0\0\0" if order == b"II" else b"\0*\0\0\0\x08")
    little = "little" if order == b"II" else "big"
    numbers = ((1, 2), (0x112, 2), (3, 2), (1, 4), (orientation, 2), (0, 2), (0, 4))
    exif += b"".join(value.to_bytes(n, little) for value, n in numbers)  # type: ignore[arg-type]
    file = io.BytesIO()
    Image.fromarray(picture(48, 32)).save(file, kind, exif=b"Exif\0\0" + exif)
    return file.getvalue()


def test_what_is_left_out_changes_no_pixel() -> None:
    """What decoders get gives the pixels that the whole files give, as Pillow turns them upright."""
    files = [data for name, data in whole().items() if not name.startswith("sound")]
    files += [
        turned(kind, orientation, order)
        for kind in ("JPEG", "PNG", "WEBP")
        for orientation in range(9)
        for order in (b"II", b"MM")
    ]
    for data in files:
        assert (Given("image", data, "here").pixels() == pixels_of_pillow(data)).all()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0", "HEIC"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x1cftypisom\0\0\0\0", "a video"),
        (b"II*\0\x08\0\0\0", "TIFF"),
        (b"MM\0*\0\0\0\x08", "TIFF"),
        (b"%PDF-1.7\n", "PDF"),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"<svg/>", "SVG"),
        (b"\xff\x0a\xfa", "JPEG XL"),
        (b"<html>", "none"),
        (b"", "none"),
    ],
)
def test_an_image_of_another_format_is_named(data: bytes, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"decoded \(it is {name}\); give PNG, JPEG, WebP, GIF or"):
        Given("image", data, "here").pixels()


def test_grey_of_16_bits_is_not_cut_off_at_8() -> None:
    """Pillow's conversion to RGB cuts values off at 255, of 65,535, and so shows a white image."""
    grey = np.arange(48 * 32, dtype=np.uint16).reshape(32, 48) * 40
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x112] = 3
    Image.fromarray(grey).save(file, "PNG", exif=exif)
    expected = np.repeat((grey >> 8).astype(np.uint8)[:, :, None], 3, 2)
    assert (Given("image", file.getvalue(), "here").pixels() == expected[::-1, ::-1]).all()
    for order in ("<", ">"):
        image = Image.fromarray(grey.astype(f"{order}u2"))
        assert (Given("image", image, "here").pixels() == expected).all()


@pytest.mark.filterwarnings("ignore")  # Pillow warns of damage
def test_damaged_files_give_the_same_pixels_or_none() -> None:
    n_same = 0
    for number in range(400):
        name, data = mutant(number)
        if name.startswith("sound"):
            continue
        try:
            pixels = Given("image", data, "here").pixels()
            expected = pixels_of_pillow(data)
        except Exception:
            continue
        assert pixels.shape == expected.shape
        n_same += bool((pixels == expected).all())
    assert n_same > 50


def test_resampling_in_blocks() -> None:
    for rate, own in ((16000, 44100), (16000, 8000), (16000, 16001), (24000, 11025)):
        samples = np.random.default_rng(own).uniform(-1, 1, 600_000).astype(np.float32)
        resampled = Given("sound", samples, "here", own).samples(rate)
        at = np.arange(round(len(samples) * rate / own)) * (own / rate)
        assert (resampled == np.interp(at, np.arange(len(samples)), samples).astype(np.float32)).all()
    with pytest.raises(InvalidRequestError, match=r"more than|cannot be decoded"):
        Given("sound", wav()[:20], "here").samples(16000)


# ---- turns
class Caller(threading.Thread):
    """Takes a turn, and leaves when it is told to."""

    numbers = count()

    def __init__(self, turns: Turns, share: object) -> None:
        super().__init__(daemon=True)
        self.share = share
        self.entered, self.leave = threading.Event(), threading.Event()
        self.number = -1
        self._turns = turns
        self.start()

    def run(self) -> None:
        with self._turns.turn(self.share):
            self.number = next(self.numbers)
            self.entered.set()
            assert self.leave.wait(PATIENCE_S)

    def end(self) -> None:
        self.leave.set()
        self.join(PATIENCE_S)


def test_shares_take_turns() -> None:
    turns = Turns()
    many = [Caller(turns, "a")]
    assert many[0].entered.wait(PATIENCE_S)
    many += [Caller(turns, "a") for _ in range(6)]
    wait_until(lambda: "n_waiting=6" in repr(turns))
    second = Caller(turns, "b")
    assert second.entered.wait(PATIENCE_S)  # beside that of the other share
    assert not any(caller.entered.is_set() for caller in many[1:])
    third = Caller(turns, "c")
    wait_until(lambda: "n_waiting=7" in repr(turns))
    many[0].end()
    assert third.entered.wait(PATIENCE_S)  # before the six of "a"
    for caller in (second, third):
        caller.end()
    waiting = set(many[1:])
    while waiting:
        wait_until(lambda: any(caller.entered.is_set() for caller in waiting))
        inside = [caller for caller in waiting if caller.entered.is_set()]
        assert len(inside) == 1  # of one share one at a time
        inside[0].end()
        waiting.remove(inside[0])
    assert repr(turns) == "<Turns n_inside=0 n_waiting=0>"


def test_who_waits_for_a_turn_can_leave() -> None:
    turns = Turns()
    holder = Caller(turns, "a")
    assert holder.entered.wait(PATIENCE_S)

    def refuse() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError), limited(Limit(refuse)), turns.turn("a"):
        raise AssertionError
    assert repr(turns) == "<Turns n_inside=1 n_waiting=0>"
    holder.end()
    with turns.turn("a"):
        assert repr(turns) == "<Turns n_inside=1 n_waiting=0>"


def test_limits_inside_each_other() -> None:
    now = perf_counter()
    check_wanted()
    with limited(Limit(lambda: None, now + 5)):
        with limited(Limit(lambda: None, now + 3)), limited(Limit(lambda: None)):
            assert deadline() == now + 3
        assert deadline() == now + 5
    assert deadline() is None


class SlowEncoder:
    """Encodes nothing, and notes the order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.has_begun, self.release = threading.Event(), threading.Event()

    def encode(self, media: Any, n_threads: int) -> bool:
        self.order.append(media)
        self.has_begun.set()
        assert self.release.wait(PATIENCE_S)
        return True


def request_of(share: str, name: str, n_parts: int, priority: int = 0) -> Any:
    spans = [SimpleNamespace(source=f"{name}{i}") for i in range(n_parts)]
    spec = SimpleNamespace(priority=priority, share=share)
    return SimpleNamespace(spec=spec, spans=spans, state=State.WAITING)


def test_images_of_shares_are_encoded_in_turn() -> None:
    slow = SlowEncoder()
    encoder = MediaEncoder(cast(Any, slow))
    done: list[tuple[Any, Exception | None]] = []
    requests = [
        request_of("a", "a", 3),
        request_of("a", "A", 2),
        request_of("b", "b", 2),
        request_of("c", "c", 1),
    ]
    encoder.put(requests[0], lambda *ended: done.append(ended))
    assert slow.has_begun.wait(PATIENCE_S)
    for request in (*requests[1:], request_of("d", "d", 1, priority=1)):
        encoder.put(request, lambda *ended: done.append(ended))
    slow.release.set()
    wait_until(lambda: len(done) == 5)
    encoder.close()
    assert slow.order == ["a0", "d0", "b0", "c0", "a1", "b1", "a2", "A0", "A1"]
    assert encoder.n_encoded == 9 and not any(error for _, error in done)


# ---- what ends it
@pytest.fixture(scope="module")
def large() -> bytes:
    """An image within the limits that takes a second."""
    return jpeg_of_scans(15, 5792, 5792)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[lp.Engine]:
    projector = idefics3_projector(tmp_path / "mmproj.gguf")
    with (
        lp.Model(model_with_tile_tokens(tmp_path / "text.gguf"), mmproj=projector) as model,
        lp.Engine(model, n_ctx=1024, n_seq_max=2) as engine,
    ):
        yield engine
        if not engine.closed:
            engine.check_integrity()


def asking(*images: bytes) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": ["What?", *parts, "Why?"]}]


def test_a_timeout_counts_decoding(engine: lp.Engine, large: bytes) -> None:
    few = lp.SamplingParams(max_tokens=2)
    messages = asking(*(large + bytes([i]) for i in range(4)))

    async def ask() -> None:
        with pytest.raises(TimeoutError, match=r"within the timeout of 0\.05 s"):
            await engine.achat(messages, few, timeout=0.05)
        with pytest.raises(TimeoutError, match=r"within the timeout of 0\.05 s"):
            async with engine.astream_chat(messages, few, timeout=0.05) as stream:
                await stream.submit()

    asyncio.run(ask())
    with pytest.raises(TimeoutError, match=r"within the timeout of 0\.05 s"):
        engine.chat(messages, few, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"within the timeout of 0\.05 s"):
        engine.stream_chat(messages, few, timeout=0.05)
    assert engine.stats().n_encoded_media == 0
    assert engine.chat(asking(large), few, timeout=PATIENCE_S).choices[0].token_ids


def test_closing_ends_what_is_decoded(
    engine: lp.Engine, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forty images that wait, none is decoded after the call of ``close``; who asked for them gets an error."""
    begun: list[Given] = []
    pixels = Given.pixels

    def decode_when_closed(self: Given) -> Any:
        begun.append(self)
        wait_until(lambda: engine.closed)
        return pixels(self)

    monkeypatch.setattr(Given, "pixels", decode_when_closed)

    async def ask() -> list[BaseException]:
        calls = [asyncio.ensure_future(engine.achat(asking(large + bytes([i])))) for i in range(40)]
        await until(lambda: begun)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[return-value]

    errors = asyncio.run(ask())
    assert {type(error) for error in errors} == {EngineClosedError}
    assert len(begun) == 1


def test_cancelled_tasks_end_what_is_decoded(engine: lp.Engine, large: bytes) -> None:
    async def ask() -> None:
        projector = engine.model.projector
        assert projector is not None
        tenant.set(Tenant("a"))
        calls = [asyncio.ensure_future(engine.achat(asking(large + bytes([i])))) for i in range(8)]
        await until(lambda: "n_inside=1" in repr(projector._turns))
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        tenant.set(Tenant("b"))
        answer = await engine.achat(asking(whole()["png"]), lp.SamplingParams(max_tokens=2))
        assert answer.choices[0].token_ids

    asyncio.run(ask())
    assert engine.stats().n_encoded_media == 5  # tiles of the small one


def test_ten_large_images_of_one_client_and_one_of_another(engine: lp.Engine, large: bytes) -> None:
    """The other client's image is prepared beside the first of them."""

    async def ask() -> list[str]:
        order: list[str] = []
        few = lp.SamplingParams(max_tokens=2)

        async def prepare(share: str, image: bytes) -> None:
            tenant.set(Tenant(share))
            await engine.achat(asking(image), few)
            order.append(share)

        projector = engine.model.projector
        assert projector is not None
        many = [asyncio.ensure_future(prepare("a", large + bytes([i]))) for i in range(10)]
        await until(lambda: "n_inside=1" in repr(projector._turns))
        await prepare("b", whole()["png"])
        ended = list(order)
        for call in many:
            call.cancel()
        await asyncio.wait(many)
        return ended

    assert asyncio.run(ask()).index("b") <= 2


@pytest.mark.parametrize("mode", ["I", "F", "La"])
def test_images_of_pillow_that_would_change_are_refused(mode: str) -> None:
    """Pillow makes all values above 255 white, and those from 0 to 1 black."""
    with pytest.raises(
        InvalidRequestError, match=f"here: the image has Pillow's mode {mode}, .*; give an image"
    ):
        Given("image", Image.new(mode, (4, 4)), "here").pixels()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_images_of_pillow_are_converted(mode: str) -> None:
    red = Image.new("RGB", (4, 4), (255, 0, 0)).convert("L" if mode == "LA" else "RGB").convert(mode)
    expected = np.asarray(red.convert("RGB"))
    assert np.array_equal(Given("image", red, "here").pixels(), expected)


def test_base64_may_have_lines() -> None:
    """As ``base64 FILE`` and Python's ``encodebytes`` write it."""
    file = io.BytesIO()
    Image.fromarray(picture(48, 32)).save(file, "PNG")
    text = base64.encodebytes(file.getvalue()).decode()
    assert "\n" in text.strip()
    for written in (text, text.replace("\n", "\r\n"), f" {text}"):
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{written}"}}
        medium = media_in(part, "here")
        assert medium is not None and medium.content() == file.getvalue()
    with pytest.raises(InvalidRequestError, match="here: the text is not base64"):
        media_in({"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ==\nYQ"}}, "here")


@pytest.mark.parametrize(
    "url", ["DATA:image/png;base64,YQ==", "data:IMAGE/PNG;Base64,YQ==", "Data:;BASE64,YQ=="]
)
def test_data_urls_in_upper_case(url: str) -> None:
    """RFC 2397 and RFC 3986: the names of schemes and types have no case."""
    for part in ({"type": "image_url", "image_url": url}, {"type": "image", "image": url}):
        medium = media_in(part, "here")
        assert medium is not None and medium.value == b"a"
        assert with_paths_below([{"role": "user", "content": [part]}], None)
