"""Tests that run without Dynamo: conversion of its requests and of our deltas, and the command line."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.run_script import run_script

import llamapipe as lp
from llamapipe.cli.parser import UsageError
from llamapipe.dynamo._arguments import _address, default_folder, parser, worker_options
from llamapipe.dynamo._requests import chunk, last_chunk, sampling_params
from llamapipe.errors import InvalidRequestError


def request(**sections: Any) -> dict[str, Any]:
    """A request as the frontend sends it, with an entry for every option."""
    options = {
        "sampling_options": dict.fromkeys(
            "n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p "
            "use_beam_search length_penalty seed guided_decoding".split()
        )
        | {"include_stop_str_in_output": False},
        "stop_conditions": dict.fromkeys(
            "max_tokens stop stop_token_ids stop_token_ids_hidden min_tokens ignore_eos max_thinking_tokens".split()
        ),
        "output_options": dict.fromkeys("logprobs prompt_logprobs skip_special_tokens".split()),
    }
    for name, values in sections.items():
        options[name] = options.get(name, {}) | values if isinstance(values, dict) else values
    return {"token_ids": [1, 2], "model": "story", **options}


class TestOptions:
    def test_an_option_that_is_not_given_has_our_default(self) -> None:
        assert sampling_params(request()) == lp.SamplingParams(max_tokens=None)
        assert sampling_params({"token_ids": [1]}) == lp.SamplingParams(max_tokens=None)

    def test_each_is_mapped(self) -> None:
        dynamo_request = request(
            sampling_options={
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": -1,
                "min_p": 0.1,
                "presence_penalty": 0.2,
                "frequency_penalty": 0.3,
                "repetition_penalty": 1.1,
                "seed": -7,
            },
            stop_conditions={
                "max_tokens": 9,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop": ["x"],
                "stop_token_ids": [5],
                "stop_token_ids_hidden": [6],
            },
            output_options={"logprobs": 2, "skip_special_tokens": True},
        )
        params, expected = (
            sampling_params(dynamo_request),
            lp.SamplingParams(
                temperature=0.5,
                top_p=0.9,
                top_k=-1,
                min_p=0.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                repeat_penalty=1.1,
                seed=2**64 - 7,
                max_tokens=9,
                min_tokens=2,
                ignore_eos=True,
                stop_token_ids=[5, 6],
                logprobs=2,
            ),
        )
        assert params == expected and vars(params) == vars(expected)

    def test_an_adapter_is_named_as_the_model(self) -> None:
        for name, adapter in (("letters", "letters"), ("story", None)):
            params = sampling_params(request(model=name), ["letters"])
            assert params == lp.SamplingParams(max_tokens=None, adapter=adapter)

    @pytest.mark.parametrize(
        ("guided", "expected"),
        [
            ({"json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
            ({"regex": "a+", "choice": None}, {"regex": "a+"}),
            ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
            ({"choice": ["yes", 'n"o']}, {"lark": 'start: "yes" | "n\\"o"'}),
        ],
    )
    def test_constraints(self, guided: dict[str, Any], expected: dict[str, str]) -> None:
        params = sampling_params(request(sampling_options={"guided_decoding": guided}))
        assert {name: getattr(params, name) for name in expected} == expected

    @pytest.mark.parametrize(
        ("sections", "message"),
        [
            ({"sampling_options": {"n": 2}}, "n is 2"),
            ({"sampling_options": {"best_of": 3}}, "best_of is 3"),
            ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
            ({"sampling_options": {"new_option": 1}}, "new_option is 1"),
            ({"sampling_options": {"temperature": -1}}, "temperature"),
            ({"sampling_options": {"guided_decoding": {"structural_tag": "x"}}}, "structural_tag"),
            ({"sampling_options": {"guided_decoding": {"json": {}, "regex": "a"}}}, "both given"),
            ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens is 5"),
            ({"stop_conditions": {"stop_token_ids_visible": [3]}}, "stop_token_ids_visible"),
            ({"stop_conditions": {"max_tokens": 0}}, "max_tokens"),
            ({"output_options": {"prompt_logprobs": 0}}, "prompt_logprobs is 0"),
            ({"prefill_result": {"x": 1}}, "disaggregated serving"),
            ({"multi_modal_data": {"image_url": ["x"]}}, "images"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(self, sections: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            sampling_params(request(**sections))

    def test_a_constraint_does_not_survive_its_worker(self) -> None:
        constrained = {
            "sampling_options": {"guided_decoding": {"regex": "a+"}},
            "migration_link": {"span_id": "1"},
        }
        with pytest.raises(InvalidRequestError, match="lost its worker"):
            sampling_params(request(**constrained))
        assert sampling_params(request(migration_link={"span_id": "1"})) == lp.SamplingParams(max_tokens=None)


class TestChunks:
    def test_the_chunks_of_a_stream(self) -> None:
        params = lp.SamplingParams(temperature=0, max_tokens=6, logprobs=2)
        chunks, n = [], 0
        with lp.Model.demo() as model, lp.Engine(model, n_ctx=64, n_threads=1) as engine:
            completion = engine.generate("Once upon", params)
            for delta in engine.stream("Once upon", params):
                n += len(delta.token_ids)
                chunks.append(chunk(delta, 3, n, True))
        assert [token for piece in chunks for token in piece["token_ids"]] == completion.token_ids
        assert [piece.get("finish_reason") for piece in chunks] == [*[None] * (len(chunks) - 1), "length"]
        assert chunks[-1]["completion_usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
        }
        logprobs = [value for piece in chunks for value in piece.get("log_probs", ())]
        assert completion.logprobs is not None and logprobs == [
            entry.logprob for entry in completion.logprobs
        ]
        for piece in chunks:
            for token, ranked in zip(piece["token_ids"], piece.get("top_logprobs", ()), strict=True):
                assert [entry["rank"] for entry in ranked] == list(range(1, len(ranked) + 1))
                assert token in [entry["token_id"] for entry in ranked] and ranked[0]["bytes"]

    def test_the_end_of_a_cancelled_request(self) -> None:
        assert last_chunk("cancelled", 3, 2) == {
            "token_ids": [],
            "index": 0,
            "finish_reason": "cancelled",
            "completion_usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }


class TestCommandLine:
    def test_variables_of_dynamo_set_its_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DYN_NAMESPACE", "blue")
        monkeypatch.setenv("DYN_EVENT_PLANE", "zmq")
        args = parser().parse_args(["--n-ctx", "128"])
        assert (args.namespace, args.event_plane, args.discovery_backend, args.n_ctx) == (
            "blue",
            "zmq",
            "etcd",
            128,
        )
        assert _address(args) == ("blue", "backend", "generate")
        assert _address(parser().parse_args(["--endpoint", "dyn://a.b.c"])) == ("a", "b", "c")
        with pytest.raises(UsageError, match="dyn://NAMESPACE"):
            _address(parser().parse_args(["--endpoint", "dyn://a.b"]))

    def test_adapters_are_loaded(self) -> None:
        file = lp.demo_model_path().with_name("letters.gguf")
        options = worker_options(parser().parse_args(["--lora", f"letters={file}", "--n-ctx", "64"]))
        with ExitStack() as undo:
            assert [adapter.name for adapter in options.open_engine(undo).adapters] == ["letters"]
        with pytest.raises(UsageError, match="'story' is also the name of the model"):
            worker_options(parser().parse_args(["--served-model-name", "story", "--lora", f"story={file}"]))

    def test_workers_of_a_model_share_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("LLAMAPIPE_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        template = tmp_path / "template.jinja"
        template.write_text("{{ messages }}")
        plain = default_folder(lp.demo_model_path(), None)
        assert plain == default_folder(lp.demo_model_path(), None) and plain.is_relative_to(tmp_path)
        assert plain != default_folder(lp.demo_model_path(), str(template))

    def test_without_a_home_the_folder_is_a_temporary_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("LLAMAPIPE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # a user without a name
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        folder = default_folder(lp.demo_model_path(), None)
        assert folder.is_relative_to(tmp_path) and folder.parent.is_dir()
        assert "give --tokenizer-dir, or set LLAMAPIPE_CACHE_DIR" in caplog.text

    def test_without_dynamo_the_error_names_the_extra(self) -> None:
        program = """
import sys
sys.modules["dynamo"] = None
from llamapipe.dynamo.__main__ import main
sys.stderr = sys.stdout
print(main([]))
"""
        assert "pip install 'llamapipe[dynamo]'" in (out := run_script(program)) and out.endswith("1\n")


def test_least_tokens_of_a_migrated_request() -> None:
    """The frontend reduces max_tokens by what the lost worker generated, and leaves min_tokens."""
    request = {"token_ids": [1], "stop_conditions": {"max_tokens": 30, "min_tokens": 50}}
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        sampling_params(request)
    assert sampling_params({**request, "migration_link": {}}).min_tokens == 30
