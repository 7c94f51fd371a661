"""`llamapipe doctor -m FILE`: what it says about files, as a process and for other machines."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.assistant_models import assistant, assistant_target
from support.bert_model import bert_model
from support.dflash_models import dflash_draft
from support.eagle3_models import eagle3_draft, eagle3_target
from support.gguf_models import (
    damaged_model,
    encoder_decoder_model,
    recurrent_model,
    tiny_architecture,
    tiny_model,
    with_templates,
)
from support.mtp_models import mtp_model
from support.run_script import command, environment

import llamapipe as lp
from llamapipe.cli._model_file import Finding, findings_of, look_at, suggestion
from llamapipe.llama.kv_memory import kv_bytes

CLI = "import sys; from llamapipe.cli import main; sys.exit(main())"
GIB = 2**30
TOOLS = """{%- if tools %}Tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>{% endfor %}</s>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""  # noqa: E501


def doctor(*words: object, status: int = 0) -> str:
    done = subprocess.run(
        command(CLI, "doctor", *map(str, words)),
        env=environment(),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def words_of(facts: dict[str, Any], name: str = "model.gguf") -> dict[str, Finding]:
    return {finding.name: finding for finding in findings_of(facts, name)}


class TestCommand:
    def test_the_bundled_model(self) -> None:
        said = doctor("-m", "demo")
        lines = said[said.index("✓ model ") :].splitlines()
        names = [line[2:].partition("  ")[0] for line in lines if line.startswith("✓")]
        assert names[:4] == ["model", "context", "weights", "chat"]
        assert names[-1] == "serve it with"
        assert "llamapipe serve -m demo -c 1024 -np 8" in said
        assert said.endswith("No problems found.\n")

    def test_json(self) -> None:
        report = json.loads(doctor("-m", "demo", "--json"))
        assert report["ok"]
        assert report["model"]["architecture"] == "llama"
        assert report["model"]["chat"] is True
        assert report["model"]["command"].startswith("llamapipe serve -m demo -c ")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        said = doctor("-m", tmp_path / "none.gguf", status=1)
        assert f"■ model            {tmp_path / 'none.gguf'} does not exist" in said
        assert said.endswith("Problems found: model\n")

    def test_an_encoder_decoder_is_a_problem(self, tmp_path: Path) -> None:
        said = doctor("-m", encoder_decoder_model(tmp_path / "t5.gguf"), status=1)
        assert "an encoder-decoder model, which llamapipe does not serve" in said
        assert "llamapipe serve" not in said.replace("which llamapipe does not serve", "")
        assert said.endswith("Problems found: use\n")

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        path = tmp_path / "cut.gguf"
        path.write_bytes(lp.demo_model_path().read_bytes()[:-1000])
        assert "it is truncated, download or convert it again" in doctor("-m", path, status=1)
        report = json.loads(doctor("-m", damaged_model(tmp_path / "damaged.gguf"), "--json"))
        assert report["ok"], "damage inside tensor data cannot be seen without loading it"

    def test_a_name_of_no_model(self) -> None:
        done = subprocess.run(
            command(CLI, "doctor", "-m", "hf:nothing"),
            env=environment(),
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 2
        assert "names no model on the hub" in done.stderr

    def test_without_a_model_nothing_is_said_about_one(self) -> None:
        assert "serve it with" not in doctor()


class TestFacts:
    """What is told without loading weights is what a loaded model has."""

    @pytest.mark.parametrize("kind", ["demo", "f16"])
    def test_a_loaded_model_agrees(self, kind: str, tmp_path: Path) -> None:
        path = lp.demo_model_path() if kind == "demo" else tiny_model(tmp_path / "tiny.gguf")
        facts = look_at(path)
        with lp.Model(path) as model:
            assert (
                sum(entry["n_tensors"] for entry in facts["weights"] if entry["packed"])
                == model.n_packed_tensors
            )
            assert facts["n_params"] == model.n_params
            assert facts["n_ctx_train"] == model.n_ctx_train
            assert facts["n_vocab"] == model.n_vocab
            assert facts["kv_bytes_per_token"] == kv_bytes(model, 1, "f16", "f16")

    def test_tools(self, tmp_path: Path) -> None:
        assert look_at(lp.demo_model_path())["tools"] is False
        assert look_at(with_templates(tmp_path / "tools.gguf", TOOLS))["tools"] is True

    def test_a_broken_template(self, tmp_path: Path) -> None:
        facts = look_at(with_templates(tmp_path / "broken.gguf", "{% if %}"))
        assert facts["chat"] is False
        assert words_of(facts)["chat"].detail.startswith("no: ")

    def test_a_model_without_a_template(self, tmp_path: Path) -> None:
        assert "has no chat template" in words_of(look_at(tiny_model(tmp_path / "tiny.gguf")))["chat"].detail

    @pytest.mark.parametrize("architecture", ["t5", "t5encoder"])
    def test_an_encoder_decoder_is_not_served(self, architecture: str, tmp_path: Path) -> None:
        facts = look_at(encoder_decoder_model(tmp_path / "t5.gguf", architecture))
        assert not facts["generates"]
        words = words_of(facts)
        assert "chat" not in words
        if architecture == "t5":
            assert not words["use"].ok and "does not serve: its engine" in words["use"].detail
            assert "serve it with" not in words and suggestion(facts, "t5.gguf") is None
        else:
            assert words["use"].ok and "--embeddings" in words["serve it with"].detail

    def test_mtp_layers(self, tmp_path: Path) -> None:
        path = mtp_model(tmp_path / "one.gguf", None)
        facts = look_at(path)
        assert facts["n_mtp_layers"] == 1
        with lp.Model(path) as model:
            sizes = [
                4 * math.prod(tensor.dims)
                for name, tensor in model.tensors.items()
                if name.startswith("blk.4.")
            ]
            assert model.n_layer == 4 and facts["mtp_bytes"] == sum(sizes) > 0
        assert words_of(facts)["MTP"].detail.endswith(
            "and 256.0 KiB for 1024 tokens of context, loaded on demand; --draft mtp guesses with it"
        )
        two = look_at(mtp_model(tmp_path / "two.gguf", None, n_layers=2))
        detail = words_of(two)["MTP"].detail
        assert detail.startswith("2 layers that predict the token after the next, ")
        assert "llamapipe cannot guess with them: the file has 2 MTP layers" in detail
        assert "MTP" not in words_of(look_at(tiny_architecture(tmp_path / "no.gguf", "qwen3.5-0.8b")))

    def test_a_draft_file(self, tmp_path: Path) -> None:
        target = eagle3_target(tmp_path / "model.gguf")
        facts = look_at(eagle3_draft(tmp_path / "draft.gguf", target))
        assert facts["drafts_for_layers"] == [1, 2, 3]
        words = words_of(facts)
        assert words["use"].ok and words["use"].detail.startswith("an EAGLE-3 draft: it drafts for the model")
        assert "serve it with" not in words and "memory" not in words
        assert words["KV cells"].detail.startswith("512 bytes for each token")

    def test_a_dflash_file(self, tmp_path: Path) -> None:
        target = eagle3_target(tmp_path / "model.gguf")
        words = words_of(look_at(dflash_draft(tmp_path / "draft.gguf", target, None)))
        assert words["use"].ok and words["use"].detail.startswith("a DFlash draft: it drafts for the model")
        # Two layers have two heads of 32 keys and values, in 16 bits.
        assert words["KV cells"].detail.startswith("512 bytes for each token")
        words = words_of(look_at(dflash_draft(tmp_path / "large.gguf", target, None, block=100)))
        assert not words["use"].ok and "its blocks have 100 tokens" in str(words["use"])

    def test_an_assistant(self, tmp_path: Path) -> None:
        """It has no cells, and is no MTP layer."""
        words = words_of(look_at(assistant(tmp_path / "a.gguf", assistant_target(tmp_path / "model.gguf"))))
        assert words["use"].ok and words["use"].detail.startswith(
            "a Gemma 4 assistant: it drafts for the model"
        )
        assert all(finding.ok for finding in words.values())
        assert words.keys().isdisjoint({"MTP", "KV cells", "KV cache", "memory", "serve it with"})

    def test_a_recurrent_model(self, tmp_path: Path) -> None:
        facts = look_at(recurrent_model(tmp_path / "mamba.gguf"))
        assert facts["is_recurrent"]
        assert facts["kv_bytes_per_token"] == 0
        assert facts["state_bytes"] == 2 * 4 * 64 * (3 + 4)  # layers, bytes, channels: convolution and state
        assert {entry["kv_bytes_per_slot"] for entry in facts["slots"]} == {facts["state_bytes"]}
        words = words_of(facts)
        assert "KV cells" not in words
        assert words["state"].detail == "3.5 KiB for each request, whatever its length"
        assert suggestion(facts, "m.gguf") == "llamapipe serve -m m.gguf -c 256 -np 8"

    @pytest.mark.parametrize(
        ("name", "cells", "state"),
        [
            ("gemma3-270m", "(f16), 640 bytes of them in layers that see 64 tokens", None),
            ("qwen3.5-0.8b", "256 bytes for each token of a context (f16)", "57.0 KiB"),
            ("glm-4.7-flash", "480 bytes for each token of a context (f16)", None),
        ],
    )  # fmt: skip
    def test_windows_states_and_compressed_keys(
        self, name: str, cells: str, state: str | None, tmp_path: Path
    ) -> None:
        facts = look_at(tiny_architecture(tmp_path / "m.gguf", name))
        words = words_of(facts)
        assert cells in words["KV cells"].detail
        assert ("state" in words) == (state is not None)
        assert state is None or state in words["state"].detail
        per_slot = {entry["kv_bytes_per_slot"] - facts["state_bytes"] for entry in facts["slots"]}
        assert per_slot == {facts["kv_bytes_per_token"] * entry["n_ctx"] for entry in facts["slots"]}

    def test_a_model_of_embeddings(self, tmp_path: Path) -> None:
        facts = look_at(bert_model(tmp_path / "bert.gguf")[0])
        assert not facts["generates"]
        assert suggestion(facts, "my model.gguf") == "llamapipe serve --embeddings 'my model.gguf'"
        assert "requests" not in words_of(facts)


class TestMemory:
    """A model of 4 GiB, whose KV cells take 128 KiB each, on machines of several sizes."""

    @staticmethod
    def on(free: int, contexts: dict[int, int]) -> dict[str, Any]:
        slots = [{"n_ctx": n_ctx, "kv_bytes_per_slot": 0, "n_slots": n} for n_ctx, n in contexts.items()]
        sizes = {"size_bytes": 4 * GIB, "memory_free": free, "kv_bytes_per_token": 131072.0, "slots": slots}
        return look_at(lp.demo_model_path()) | sizes

    @pytest.mark.parametrize(
        ("contexts", "options"),
        [
            ({2048: 90, 8192: 22, 16384: 11}, "-c 8192 -np 8"),
            ({2048: 30, 4096: 15, 8192: 7}, "-c 4096 -np 8"),
            ({2048: 5, 4096: 2}, "-c 2048 -np 4"),
            ({2048: 1, 4096: 0}, "-c 2048 -np 1"),
            ({1024: 3}, "-c 1024 -np 2"),
        ],
    )
    def test_the_command_keeps_slots_before_context(self, contexts: dict[int, int], options: str) -> None:
        facts = self.on(16 * GIB, contexts)
        assert suggestion(facts, "m.gguf") == f"llamapipe serve -m m.gguf {options}"
        shown = words_of(facts, "m.gguf")
        assert shown["memory"].ok
        assert shlex.split(shown["serve it with"].detail)[-4:] == options.split()

    def test_a_model_that_does_not_fit(self) -> None:
        shown = words_of(self.on(2 * GIB, {2048: 0}))
        assert not shown["memory"].ok
        assert "2.0 GiB free" in shown["memory"].detail
        assert "smaller quantization" in shown["memory"].fix
        assert "serve it with" not in shown

    def test_weights_without_kernels_are_called_slow(self) -> None:
        slow = {"type": "Q3_K", "n_tensors": 3, "size_bytes": 3000, "packed": False}
        fast = {"type": "Q6_K", "n_tensors": 1, "size_bytes": 1000, "packed": True}
        facts = self.on(16 * GIB, {2048: 90}) | {"kernels": "avx2", "memory": "host"}
        shown = words_of(facts | {"weights": [slow, fast]})["weights"]
        assert shown.detail == "Q6_K 25 % with llamapipe's kernels for avx2; Q3_K 75 % with ggml's kernels"
        assert "slow on this CPU" in shown.fix
        assert not words_of(facts | {"weights": [fast]})["weights"].fix
        assert not words_of(facts | {"weights": [slow], "kernels": None})["weights"].fix
        assert not words_of(facts | {"weights": [slow], "memory": "gpu"})["weights"].fix


def test_bench_tells_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamapipe.cli import bench

    monkeypatch.setattr(bench, "usable_cores", lambda: 4)
    for free, is_busy in ((4.0, False), (3.7, False), (3.2, True), (0.0, True), (None, False)):
        monkeypatch.setattr(bench, "free_cores", lambda seconds, free=free: free)
        note = bench.busy_note()
        assert (note is not None) is is_busy
        assert note is None or f"{free:.1f} of 4 cores are free" in note
