"""Images and sounds through the engine, beside llama.cpp's way to evaluate the same prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.control import PATIENCE_S, Worker, wait_until
from support.media_models import (
    gemma3_projector,
    idefics3_projector,
    model_with_grids,
    model_with_tile_tokens,
    picture,
    png,
    qwen2vl_projector,
    ultravox_projector,
)
from support.mtmd_reference import MARKER, Reference

import llamapipe as lp
from llamapipe.errors import EngineClosedError, InvalidRequestError, ModelLoadError
from llamapipe.host.cpu_load import process_budget
from llamapipe.llama.projector import Projector
from llamapipe.media.decode import Given

PROJECTORS: dict[str, Callable[[Path], Path]] = {
    "gemma3": gemma3_projector,
    "idefics3": idefics3_projector,
    "qwen2vl": qwen2vl_projector,
    "ultravox": ultravox_projector,
}
ONE = lp.SamplingParams(max_tokens=1, logprobs=20, temperature=0)
FEW = lp.SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_tile_tokens(tmp_path_factory.mktemp("media") / "text.gguf")


def model_of(kind: str, folder: Path, text: Path) -> lp.Model:
    """A model with a projector of this kind."""
    if kind == "qwen2vl":
        text = model_with_grids(folder / "text.gguf")
    return lp.Model(text, mmproj=PROJECTORS[kind](folder / f"{kind}.gguf"))


@pytest.fixture(scope="module", params=PROJECTORS)
def model(
    request: pytest.FixtureRequest, text_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[lp.Model]:
    with model_of(request.param, tmp_path_factory.mktemp("media"), text_model) as model:
        yield model


@pytest.fixture(scope="module", params=["idefics3", "qwen2vl"])
def tiles(
    request: pytest.FixtureRequest, text_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[lp.Model]:
    """One whose images are several parts with tokens between them, and one whose rows have a height and a width."""
    with model_of(request.param, tmp_path_factory.mktemp("media"), text_model) as model:
        yield model


def n_parts(model: lp.Model) -> int:
    """How many parts of an image are encoded: four tiles and the whole image, or one."""
    assert model.projector is not None
    return 5 if model.projector.name == "idefics3" else 1


def tone(seed: int = 0, seconds: float = 2.0) -> Any:
    return np.sin(np.arange(int(16000 * seconds)) / (7 + seed)).astype(np.float32)


def part(model: lp.Model, seed: int = 0) -> dict[str, Any]:
    if model.supports_images:
        return {"type": "image", "image": picture(200, 120, seed)}
    return {"type": "audio", "audio": tone(seed)}


def question(*parts: Any, text: str = "What is this?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [text, *parts, "and why?"]}]


def probabilities(completion: lp.ChatCompletion) -> dict[int, float]:
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    return {entry.id: entry.logprob for entry in logprobs[0].top}


def furthest(expected: Any, logprobs: dict[int, float]) -> float:
    return max(abs(float(expected[token]) - logprob) for token, logprob in logprobs.items())


class TestLikeLlamaCpp:
    """The reference varies with the size of its batches; an engine's batches are others, and vary as much."""

    def test_the_next_token_has_the_same_probabilities(self, model: lp.Model) -> None:
        assert model.projector is not None
        parts = [part(model), part(model, 1)]
        media = [next(iter(v for k, v in p.items() if k != "type")) for p in parts]
        text = model.render_chat(question(MARKER, MARKER))
        references = []
        for n_batch in (512, 16):
            reference = Reference(model, model.projector.path, n_batch=n_batch)
            n_tokens, expected = reference.logprobs(text, media)
            references.append(expected)
            reference.close()
        spread = float(np.abs(references[0] - references[1]).max())
        # A second thread would only wait, and spin while it does, as in the reference.
        with lp.Engine(model, n_ctx=1024, n_seq_max=4, n_threads=1) as engine:
            alone = engine.chat(question(*parts), ONE)
            assert alone.n_prompt_tokens == n_tokens
            assert furthest(references[0], probabilities(alone)) <= 4 * max(spread, 0.06)
            with engine.stream(
                "One, two, three,", lp.SamplingParams(max_tokens=200, ignore_eos=True)
            ) as beside:
                next(beside)
                again = engine.chat(
                    question(*parts), lp.SamplingParams(max_tokens=1, logprobs=20, cache=False, temperature=0)
                )
            assert again.n_cached_tokens == 0
            assert furthest(references[0], probabilities(again)) <= 4 * max(spread, 0.06)
            other = engine.chat(question(part(model, 2), part(model, 3)), ONE)
            assert furthest(references[0], probabilities(other)) > furthest(
                references[0], probabilities(alone)
            )
            engine.check_integrity()

    def test_an_image_whose_rows_see_each_other_is_computed_exactly_so(
        self, text_model: Path, tmp_path: Path
    ) -> None:
        path = gemma3_projector(tmp_path / "gemma3.gguf")
        with lp.Model(text_model, mmproj=path, kernels="ggml") as model:
            reference = Reference(model, path)
            _, expected = reference.logprobs(model.render_chat(question(MARKER)), [picture(200, 120)])
            reference.close()
            with lp.Engine(model, n_ctx=512, n_seq_max=1, n_threads=1) as engine:
                completion = engine.chat(question(part(model)), ONE)
        assert furthest(expected, probabilities(completion)) < 1e-4


class TestCaches:
    def test_a_second_question_about_an_image_computes_only_its_text(self, model: lp.Model) -> None:
        with lp.Engine(model, n_ctx=1024, n_seq_max=2, batch_invariant=True) as engine:
            first = engine.chat(question(part(model, 4)), FEW)
            n = engine.stats().n_encoded_media
            second = engine.chat(question(part(model, 4)), FEW)
            assert second.n_cached_tokens == first.n_prompt_tokens - 1
            assert second.content == first.content
            third = engine.chat(question(part(model, 4), text="Where was that?"), FEW)
            assert third.n_cached_tokens < first.n_prompt_tokens - 1
            assert engine.stats().n_encoded_media == n > 0
            engine.chat(question(part(model, 5)), FEW)
            assert engine.stats().n_encoded_media == 2 * n
            engine.check_integrity()

    def test_others_cannot_tell_that_an_image_was_shown(self, tiles: lp.Model) -> None:
        with lp.Engine(tiles, n_ctx=512, n_seq_max=2) as engine:
            before = 0
            for salt in (None, "a", "b"):
                for again in (False, True):
                    engine.chat(question(part(tiles, 9)), lp.SamplingParams(max_tokens=1, cache_salt=salt))
                    n, before = engine.stats().n_encoded_media - before, engine.stats().n_encoded_media
                    assert n == (0 if again else n_parts(tiles))

    def test_equal_images_that_come_at_once_are_encoded_once(self, tiles: lp.Model) -> None:
        with lp.Engine(tiles, n_ctx=512, n_seq_max=4) as engine:
            engine.chat([question(part(tiles, 6), text=f"Text {i}.") for i in range(6)], FEW)
            assert engine.stats().n_encoded_media == n_parts(tiles)

    def test_other_tokens_never_stand_for_an_image(self, tiles: lp.Model) -> None:
        with lp.Engine(tiles, n_ctx=512, n_seq_max=2) as engine:
            first = engine.chat(question(part(tiles, 7)), ONE)
            other = engine.chat(question(part(tiles, 8)), ONE)
            assert other.n_cached_tokens < 32
            assert probabilities(first) != probabilities(other)

    def test_requests_that_are_preempted_keep_their_images(self, tiles: lp.Model) -> None:
        alone = []
        with lp.Engine(tiles, n_ctx=256, n_seq_max=1, prefix_cache=False) as engine:
            alone = [engine.chat(question(part(tiles, 20 + i)), FEW).content for i in range(4)]
        with lp.Engine(tiles, n_ctx=256, n_seq_max=4, n_cells=300, prefix_cache=False) as engine:
            asked = [question(part(tiles, 20 + i)) for i in range(4)]
            longer = lp.SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
            answers = engine.chat(asked, longer)
            assert engine.stats().n_preempted > 0
            engine.check_integrity()
        same = sum(c.content.startswith(a[:8]) for c, a in zip(answers, alone, strict=True))
        assert same >= 3  # batches of other sizes may tip a near tie


class TestRequests:
    def test_streams_and_choices(self, tiles: lp.Model) -> None:
        with lp.Engine(tiles, n_ctx=512, n_seq_max=4) as engine:
            whole = engine.chat(question(part(tiles)), FEW).content
            with engine.stream_chat(question(part(tiles)), FEW) as stream:
                assert "".join(delta.content for delta in stream) == whole
            several = engine.chat(question(part(tiles)), lp.SamplingParams(max_tokens=5, n=3, seed=1))
            assert len(several.choices) == 3

    def test_tasks_and_streams_say_the_same(self, tiles: lp.Model) -> None:
        async def ask(engine: lp.Engine) -> tuple[str, str]:
            answer = await engine.achat(question(part(tiles)), FEW)
            stream = engine.astream_chat(question(part(tiles)), FEW)
            return "".join([delta.content async for delta in stream]), answer.content

        with lp.Engine(tiles, n_ctx=512, n_seq_max=4) as engine:
            streamed, whole = asyncio.run(ask(engine))
            assert streamed == whole

    def test_every_form_of_an_image_is_the_same_image(self, tiles: lp.Model, tmp_path: Path) -> None:
        import base64

        from PIL import Image

        data = png(200, 120)
        (tmp_path / "a.png").write_bytes(data)
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        forms: list[dict[str, Any]] = [
            {"type": "image", "image": picture(200, 120)},
            {"type": "image", "image": data},
            {"type": "image", "image": tmp_path / "a.png"},
            {"type": "image", "image": str(tmp_path / "a.png")},
            {"type": "image", "image": Image.fromarray(picture(200, 120))},
            {"type": "image", "image": url},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
        ]
        with lp.Engine(tiles, n_ctx=512, n_seq_max=2) as engine:
            answers = {engine.chat(question(form), FEW).content for form in forms}
        assert len(answers) == 1

    def test_encoding_takes_its_cores_from_the_steps(
        self, tiles: lp.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All cores while no engine computes, else half of them; the rows are the same."""
        budget = process_budget()
        encode, taken, rows = Projector.encode, [], []

        def watched(projector: Projector, chunk: Any, n_threads: int) -> bool:
            assert n_threads in [member.n_fixed for member in budget.computing]
            taken.append(n_threads)
            done = encode(projector, chunk, n_threads)
            rows.append(chunk.rows)
            return done

        monkeypatch.setattr(Projector, "encode", watched)
        monkeypatch.setattr(budget, "n_cores", 4)
        with lp.Engine(tiles, n_ctx=512, n_seq_max=2) as engine:
            engine.generate("Once", FEW)
            wait_until(lambda: not budget.computing)
            engine.chat(question(part(tiles, 70)), FEW)
            n = len(taken)
            assert taken == [4] * n
            assert tiles.projector is not None
            tiles.projector._cache.clear()
            other = budget.member()
            other.enter()
            engine.chat(question(part(tiles, 70)), FEW)
            other.leave()
            assert taken[n:] == [2] * n
            assert all(np.array_equal(a, b) for a, b in zip(rows[:n], rows[n:], strict=True))
            wait_until(lambda: not budget.computing)

    def test_closing_waits_for_an_image_that_is_prepared(
        self, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = model_of("idefics3", tmp_path, text_model)
        assert model.projector is not None
        projector, pixels = model.projector, Given.pixels
        begun, gate = threading.Event(), threading.Event()

        def slow(media: Given) -> Any:
            begun.set()
            assert gate.wait(PATIENCE_S)
            return pixels(media)

        monkeypatch.setattr(Given, "pixels", slow)
        caller = Worker(projector.media, Given("image", picture(), "an image"))
        assert begun.wait(PATIENCE_S)
        closing = Worker(model.close)
        assert projector._handle is not None
        gate.set()
        assert caller.result().parts
        closing.result()
        with pytest.raises(EngineClosedError, match="closed"):
            projector.media(Given("image", picture(seed=1), "an image"))

    def test_cancelling_while_images_are_encoded_harms_no_other(self, tiles: lp.Model) -> None:
        with lp.Engine(tiles, n_ctx=512, n_seq_max=2, batch_invariant=True) as engine:
            expected = engine.chat(question(part(tiles, 30)), FEW).content
            streams = [engine.stream_chat(question(part(tiles, 31 + i)), FEW) for i in range(8)]
            for stream in streams:
                stream.close()
            assert engine.chat(question(part(tiles, 30)), FEW).content == expected
            with pytest.raises(TimeoutError):
                engine.chat(question(part(tiles, 50)), FEW, timeout=0)
            engine.check_integrity()
            assert engine.stats().n_queued == 0

    def test_closing_the_engine_finishes_what_waits_for_its_images(self, tiles: lp.Model) -> None:
        engine = lp.Engine(tiles, n_ctx=512, n_seq_max=2)
        answers: list[str] = []
        asked = [question(part(tiles, 60 + i)) for i in range(6)]
        thread = threading.Thread(target=lambda: answers.extend(c.content for c in engine.chat(asked, FEW)))
        thread.start()
        while not engine.stats().n_queued and thread.is_alive():
            pass
        engine.close()
        thread.join()
        assert len(answers) == 6

    def test_dropping_old_tokens_keeps_images_whole(self, tiles: lp.Model) -> None:
        params = lp.SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
        modes: list[Literal["recompute", "shift"]] = ["recompute"]
        for overflow in modes if tiles.has_mrope else [*modes, "shift"]:
            with lp.Engine(tiles, n_ctx=128, n_seq_max=2, overflow=overflow, n_keep=25) as engine:
                answer = engine.chat(question(part(tiles)), params)
                assert answer.n_completion_tokens == 300
                engine.check_integrity()

    def test_turns_are_dropped_with_their_images(self, tiles: lp.Model) -> None:
        chat: list[dict[str, Any]] = []
        with lp.Engine(tiles, n_ctx=256, n_seq_max=2) as engine:
            least = engine.chat(question(part(tiles, 70)), ONE).n_prompt_tokens
            for i in range(10):
                chat += question(part(tiles, 70 + i))
                answer = engine.chat(chat, lp.SamplingParams(max_tokens=8), truncation="auto")
                assert least <= answer.n_prompt_tokens < 256
                chat.append({"role": "assistant", "content": answer.content})

    def test_penalties_guesses_and_schemas_take_no_notice_of_images(self, tiles: lp.Model) -> None:
        params = [
            lp.SamplingParams(max_tokens=8, repeat_penalty=1.2, repeat_last_n=-1),
            lp.SamplingParams(max_tokens=8, speculate="ngram"),
            lp.SamplingParams(max_tokens=20, json_schema={"type": "object"}),
            lp.SamplingParams(max_tokens=8, logits_processors=[lambda tokens, row: row]),
        ]
        with lp.Engine(tiles, n_ctx=512, n_seq_max=2) as engine:
            for sampling in params:
                assert engine.chat(question(part(tiles)), sampling).n_completion_tokens


class TestRefusals:
    def test_a_model_without_a_projector(self, text_model: Path) -> None:
        with lp.Model(text_model) as model, lp.Engine(model, n_ctx=256, n_seq_max=1) as engine:
            assert not model.supports_images
            with pytest.raises(InvalidRequestError, match=r"only text is supported.*mmproj=FILE"):
                engine.chat(question({"type": "image", "image": picture()}))

    def test_parts_of_another_kind_are_refused(self, model: lp.Model) -> None:
        wrong = (
            {"type": "audio", "audio": tone()}
            if model.supports_images
            else {"type": "image", "image": picture()}
        )
        with (
            lp.Engine(model, n_ctx=512, n_seq_max=1) as engine,
            pytest.raises(InvalidRequestError, match="takes no"),
        ):
            engine.chat(question(wrong))

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (b"no image", "cannot be decoded .it is none.; give PNG"),
            (b"", "cannot be decoded"),
            ("/nowhere/a.png", "/nowhere/a.png cannot be read: No such file"),
            ("data:image/png,abc", "is not a data URL"),
            ("data:image/png;base64,a", "is not base64"),
            (np.zeros((4, 4, 3), np.float32), "is an array of float32 with shape"),
            (np.zeros((0, 4, 3), np.uint8), "has 4 × 0 pixels"),
            (np.zeros((1, 1000, 3), np.uint8), "a side may be at most 200 times the other"),
            (np.broadcast_to(np.uint8(1), (6000, 6000, 3)), "has 6000 × 6000 pixels; at most 33554432"),
        ],
    )
    def test_wrong_images_are_refused(self, tiles: lp.Model, value: Any, message: str) -> None:
        with lp.Engine(tiles, n_ctx=512, n_seq_max=1) as engine:
            with pytest.raises(InvalidRequestError, match=message):
                engine.chat(question({"type": "image", "image": value}))
            with pytest.raises(
                TypeError, match="must be a path, bytes, a Pillow image, or a numpy array, not int"
            ):
                engine.chat(question({"type": "image", "image": 3}))

    def test_other_addresses_are_not_fetched(self, tiles: lp.Model) -> None:
        with lp.Engine(tiles, n_ctx=512, n_seq_max=1) as engine:
            for url in ("http://127.0.0.1/a.png", "file:///etc/hostname", "/etc/hostname"):
                with pytest.raises(InvalidRequestError, match="no address is fetched"):
                    engine.chat(question({"type": "image_url", "image_url": {"url": url}}))

    def test_a_bomb_is_refused_by_its_head(self, tiles: lp.Model) -> None:
        import zlib

        def chunk(name: bytes, data: bytes) -> bytes:
            return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

        for side in (8000, 10_000, 60_000):
            size = side.to_bytes(4, "big")
            bomb = (
                b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + size + b"\x08\x02\0\0\0") + chunk(b"IEND", b"")
            )
            with (
                lp.Engine(tiles, n_ctx=512, n_seq_max=1) as engine,
                pytest.raises(InvalidRequestError, match="pixels"),
            ):
                engine.chat(question({"type": "image", "image": bomb}))

    def test_many_images_stop_at_the_context(self, tiles: lp.Model) -> None:
        with lp.Engine(tiles, n_ctx=512, n_seq_max=1) as engine:
            many = [{"type": "image", "image": picture(seed=i)} for i in range(1000)]
            with pytest.raises(InvalidRequestError, match="n_ctx is 512: give fewer or smaller ones"):
                engine.chat(question(*many))

    def test_a_template_that_leaves_images_out(self, text_model: Path, tmp_path: Path) -> None:
        path = idefics3_projector(tmp_path / "p.gguf")
        with (
            lp.Model(text_model, mmproj=path, chat_template="{{ messages[-1]['role'] }}:") as model,
            lp.Engine(model, n_ctx=512, n_seq_max=1) as engine,
            pytest.raises(InvalidRequestError, match="shows 0 of the 1 images"),
        ):
            engine.chat(question({"type": "image", "image": picture()}))

    def test_an_image_larger_than_a_ubatch(self, text_model: Path, tmp_path: Path) -> None:
        path = gemma3_projector(tmp_path / "p.gguf")
        tuning = lp.EngineTuning(n_batch=2, n_ubatch=2)
        with (
            lp.Model(text_model, mmproj=path) as model,
            lp.Engine(model, n_ctx=512, n_seq_max=1, tuning=tuning) as engine,
            pytest.raises(InvalidRequestError, match="has 4 tokens, which this model computes at once"),
        ):
            engine.chat(question({"type": "image", "image": picture()}))

    def test_files_that_do_not_fit_are_refused(self, text_model: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="not a projector; mmproj is the second file"):
            lp.Model(text_model, mmproj=text_model)
        with pytest.raises(ModelLoadError, match="does not exist"):
            lp.Model(text_model, mmproj=tmp_path / "none.gguf")
        wide = gemma3_projector(tmp_path / "wide.gguf", n_embd=256)
        with pytest.raises(ModelLoadError, match="mismatch between text model"):
            lp.Model(text_model, mmproj=wide)
        path = idefics3_projector(tmp_path / "p.gguf")
        with (
            lp.Model(lp.demo_model_path(), mmproj=path) as model,
            lp.Engine(model, n_ctx=512, n_seq_max=1) as engine,
            pytest.raises(InvalidRequestError, match="lacks tokens that the projector idefics3"),
        ):
            engine.chat(question({"type": "image", "image": picture()}))
        with pytest.raises(ValueError, match="vocab_only"):
            lp.Model(text_model, mmproj=path, vocab_only=True)


def test_images_that_are_not_encoded_yet_count_with_their_pixels(tiles: lp.Model) -> None:
    from llamapipe.media.decode import Given

    assert tiles.projector is not None
    first = tiles.projector.media(Given("image", picture(200, 120, 900), "here"))
    assert tiles.projector.media(Given("image", picture(200, 120, 900), "here")) is first
    for seed in range(100 // n_parts(tiles)):  # at least 4 MiB a part: over 256 MiB together
        tiles.projector.media(Given("image", picture(200, 120, 901 + seed), "here"))
    assert tiles.projector.media(Given("image", picture(200, 120, 900), "here")) is not first
