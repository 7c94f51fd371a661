"""The check of a GGUF file that comes before llama.cpp's loader: what passes, what does not and why."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gguf_document import ARRAY, STRING, Document, Tensor, unpack
from support.gguf_models import find_source, tiny_model, tiny_variant

import llamapipe as lp
from llamapipe.errors import LlamapipeError, ModelLoadError
from llamapipe.gguf.check import check_gguf

Edit = Callable[[Document], object]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("models")
    names = {"spm": "builtin-spm", "bpe": "builtin-bpe"}
    files = {name: tiny_model(folder / f"{name}.gguf", vocab).read_bytes() for name, vocab in names.items()}
    for name in ("bert", "t5", "rwkv", "plamo2", "gemma4"):
        files[name] = tiny_variant(folder / f"{name}.gguf", name).read_bytes()
    return files


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check_gguf(path)
    assert isinstance(caught.value, LlamapipeError)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message


# ---- what must pass


def test_a_check_tells_names_and_sizes(tmp_path: Path, models: dict[str, bytes]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(models["spm"])
    info = check_gguf(str(path))
    assert (info.path, info.version, info.architecture, info.tokenizer) == (path, 3, "llama", "llama")
    assert (info.n_vocab, info.n_layer, info.n_embd, info.n_ctx_train) == (512, 2, 64, 512)
    assert (info.n_entries, info.n_tensors, info.n_parts) == (22, 20, 1)
    assert info.size_bytes == len(models["spm"])
    assert info.is_causal
    assert not info.is_vocab_only


def test_vocabularies_of_the_pinned_tree() -> None:
    paths = sorted((find_source() / "models").glob("ggml-vocab-*.gguf"))
    assert len(paths) >= 19
    infos = [check_gguf(path) for path in paths]
    assert all(info.is_vocab_only and info.n_tensors == 0 and info.n_vocab > 30_000 for info in infos)
    assert {info.tokenizer for info in infos} == {"llama", "gpt2", "bert", "t5", "gemma4"}
    assert {info.architecture for info in infos if not info.is_causal} == {"bert", "nomic-bert-moe"}
    assert {info.version for info in infos} == {2, 3}


def _set(key: str, kind: int, value: object, item: int = 0) -> Edit:
    return lambda doc: doc.put(key, kind, value, item)


def _text_of(key: str, i: int, text: bytes) -> Edit:
    def edit(doc: Document) -> None:
        doc.entry(f"tokenizer.ggml.{key}").value[i] = text

    return edit


def _all(*edits: Edit) -> Edit:
    return lambda doc: [edit(doc) for edit in edits]


def _rwkv7(head_size: int) -> Edit:
    """The keys of an RWKV 7 of 64 values a token."""
    keys = {"block_count": 2, "embedding_length": 64, "context_length": 512, "wkv.head_size": head_size}
    return _all(
        _set("general.architecture", STRING, b"rwkv7"),
        *(_set(f"rwkv7.{key}", 4, value) for key, value in keys.items()),
    )


def _tensor(which: str, **values: object) -> Edit:
    def edit(doc: Document) -> None:
        tensor = next(t for t in doc.tensors if t.name == which.encode())
        for field, value in values.items():
            setattr(tensor, field, value)

    return edit


def _more(name: str, dims: list[int], kind: int) -> Edit:
    return lambda doc: doc.tensors.append(Tensor(name.encode(), dims, kind))


def _heads(*numbers: int) -> Edit:
    return _set("llama.attention.head_count", ARRAY, list(numbers), 4)


def _remove(*keys: str) -> Edit:
    def edit(doc: Document) -> None:
        for key in keys:
            doc.remove(key)

    return edit


@pytest.mark.parametrize(
    ("model", "edit"),
    [
        pytest.param("spm", _set("general.architecture", STRING, b"next-years"), id="unknown architecture"),
        pytest.param("spm", _set("general.alignment", 4, 64), id="alignment 64"),
        pytest.param("spm", _set("tokenizer.ggml.padding_token_id", 4, 512), id="padding beyond the vocabulary"),
        pytest.param("spm", _set("tokenizer.ggml.bos_token_id", 4, 0xFFFFFFFF), id="no BOS, said as -1"),
        pytest.param("spm", _all(*(_text_of("tokens", i, b"") for i in (400, 401, 402))), id="several empty pieces"),
        pytest.param("spm", _set("custom.empty", ARRAY, [], STRING), id="an empty array of strings"),
        pytest.param("spm", _set("custom.numbers", ARRAY, [1.0, math.nan], 12), id="numbers of no concern"),
        pytest.param("spm", _set("llama.attention.head_count", ARRAY, [4, 4], 5), id="heads for each layer"),
        pytest.param("spm", _set("llama.rope.scaling.type", STRING, b"yarn"), id="a scaling of RoPE"),
        pytest.param("spm", _all(_set("llama.kda.head_dim", 4, 8), _heads(4, 0)),
                     id="linear attention has matrices without heads"),
        pytest.param("spm", _set("llama.attention.causal", 7, 0), id="not causal"),
        pytest.param("spm", _set("split.count", 2, 1), id="split into one"),
        pytest.param("spm", _more("cls.output.weight", [64, 1], 1), id="a matrix of one row in F16"),
        pytest.param("spm", _more("blk.0.ffn_gate_tid2eid.weight", [2, 64], 26), id="a table of ids"),
        pytest.param("bpe", _remove("tokenizer.ggml.merges"), id="no merges: llama.cpp's to say"),
        pytest.param("bpe", _remove("tokenizer.ggml.scores", "tokenizer.ggml.token_type"), id="pieces alone"),
        pytest.param("bert", _remove("tokenizer.ggml.seperator_token_id"), id="the default separator"),
        pytest.param("t5", _remove("tokenizer.ggml.precompiled_charsmap"), id="t5"),
        pytest.param("rwkv", _remove("tokenizer.ggml.unknown_token_id"), id="rwkv"),
        pytest.param("plamo2", _set("tokenizer.ggml.add_bos_token", 7, 0), id="plamo2"),
        pytest.param("gemma4", _set("tokenizer.ggml.add_bos_token", 7, 0), id="gemma4"),
    ],
)  # fmt: skip
def test_harmless_edits_are_accepted(
    tmp_path: Path, models: dict[str, bytes], model: str, edit: Edit
) -> None:
    document, _ = unpack(models[model])
    edit(document)
    if model == "spm" and document.entry("general.architecture").value != b"llama":
        for name in ("block_count", "embedding_length", "context_length"):
            document.put(f"next-years.{name}", 4, 77)
    path = tmp_path / "m.gguf"
    document.write(path)
    assert check_gguf(path).n_vocab == len(document.entry("tokenizer.ggml.tokens").value)


def test_tensor_type_of_the_future(tmp_path: Path, models: dict[str, bytes]) -> None:
    data = bytearray(models["spm"])
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (1,)
    struct.pack_into("<I", data, at, 99)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert check_gguf(path).n_tensors == 20


# ---- what must not


@pytest.mark.parametrize(
    ("model", "edit", "message"),
    [
        # header and layout
        ("spm", lambda d: setattr(d, "version", 1), "GGUF version 1, which llama.cpp no longer reads"),
        ("spm", lambda d: setattr(d, "version", 4), "GGUF version 4, this llama.cpp reads up to 3"),
        ("spm", lambda d: setattr(d, "version", 0x03000000), "it is big-endian"),
        ("spm", lambda d: d.entries.append(d.entries[3]), "the key '.*' occurs twice"),
        ("spm", lambda d: setattr(d.entries[2], "key", b""), "key 2 of the metadata is empty"),
        ("spm", lambda d: setattr(d.entries[2], "key", b"a\0b"), "key 2 of the metadata is b'a"),
        ("spm", _set("general.alignment", 4, 48), "general.alignment is 48; it must be a u32 and a power of two"),
        ("spm", _set("general.alignment", 4, 0), "general.alignment is 0"),
        ("spm", _set("general.alignment", 10, 64), "it must be a u32"),
        # architecture and sizes
        ("spm", _remove("general.architecture"), "general.architecture is missing"),
        ("spm", _set("general.architecture", 4, 1), "general.architecture must be a string"),
        ("spm", _set("general.type", STRING, b"adapter"), "it is a LoRA adapter; give the file of the model"),
        ("spm", _set("general.architecture", STRING, b"clip"), r"\(mmproj\); give the file of the language model"),
        ("spm", _remove("llama.block_count"), "llama.block_count is missing"),
        ("spm", _set("llama.block_count", 5, 2), "llama.block_count must be u32, it is i32"),
        ("spm", _set("llama.block_count", 4, 0), "llama.block_count is 0; it must be 1 to 512"),
        ("spm", _set("llama.block_count", 4, 513), "llama.block_count is 513; it must be 1 to 512"),
        ("spm", _set("llama.context_length", 4, 0), "llama.context_length is 0; it must be 1 to 2147483647"),
        ("spm", _set("llama.context_length", 4, 1 << 31), "llama.context_length is 2147483648"),
        ("spm", _set("llama.embedding_length", 4, 0), "llama.embedding_length is 0"),
        ("spm", _set("llama.attention.head_count", 4, 3), "layer 0 has 3 attention heads, not a multiple of its 2"),
        ("spm", _set("llama.attention.head_count", ARRAY, [4], 4), "head_count has 1 elements, but the model has 2"),
        ("spm", _set("llama.attention.head_count", ARRAY, [4, -4], 5), "head_count holds -4"),
        ("spm", _set("llama.attention.head_count_kv", ARRAY, [2, 4], 4), "32 rows, which does not fit 4 heads and 4"),
        ("spm", _set("llama.attention.head_count_kv", ARRAY, [2, 0], 4), "4 heads and 0 key-value heads"),
        ("spm", _set("llama.rope.dimension_count", 4, 15), "is 15; it must be even"),
        ("spm", _set("llama.attention.value_length", 4, 8), "blk.0.attn_v.weight has 32 rows, .* values of 16 and 8"),
        ("spm", _set("llama.rope.dimension_count", 4, 8), "positions rotate 8 .* of a head's 16 values"),
        ("spm", _set("llama.rope.dimension_count_swa", 4, 0), "rope.dimension_count_swa is 0; it must be positive"),
        ("spm", _all(_set("llama.rope.dimension_count_swa", 4, 32), _set("llama.attention.sliding_window", 4, 64)),
         "rope.dimension_count_swa is 32, heads have 16 values"),
        ("spm", _set("llama.rope.dimension_sections", ARRAY, [8, 8, 8, 0], 5), "is .8, 8, 8, 0., heads have 16 values"),
        ("spm", _set("llama.rope.dimension_sections", ARRAY, [2**62] * 4, 10), "heads have 16 values"),
        ("spm", _set("llama.rope.dimension_sections", 10, 2**63), "heads have 16 values"),
        ("spm", _set("llama.rope.scaling.type", STRING, b"magic"), "is 'magic'; llama.cpp knows none, linear"),
        ("spm", _set("llama.rope.freq_base", 6, 0.0), "llama.rope.freq_base is 0.0; it must be positive"),
        ("spm", _set("llama.attention.scale", 6, math.nan), "llama.attention.scale is not a number"),
        ("spm", _set("llama.attention.layer_norm_rms_epsilon", 6, -1.0), "must not be negative or infinite"),
        ("spm", _set("llama.pooling_type", 4, 9), "llama.pooling_type is 9; it must be 0 to 4"),
        ("spm", _set("llama.nextn_predict_layers", 4, 3), "nextn_predict_layers is 3; it must be 0 to 2"),
        ("spm", _set("llama.expert_used_count", 4, 2), "it uses 2 of 0 experts"),
        ("spm", _set("llama.expert_count", 4, 2), "it uses 0 of 2 experts"),
        ("spm", _set("llama.expert_count", 4, 9999), "expert_count is 9999; it must be 0 to 1024"),
        ("spm", _all(_set("llama.expert_count", 4, 2), _set("llama.expert_used_count", 4, 1),
                     _set("llama.expert_gating_func", 4, 5)), "expert_gating_func is 5; it must be 0 to 4"),
        ("spm", _all(_set("llama.expert_count", 4, 6), _set("llama.expert_used_count", 4, 2),
                     _set("llama.expert_group_count", 4, 4)), "its 6 experts do not divide into 4 groups"),
        ("spm", _rwkv7(0), "rwkv7.wkv.head_size is 0; it must be 1 to"),
        ("spm", _rwkv7(32), "head_size is 32; it must divide the embedding_length 64 and be a multiple of 64"),
        ("spm", _rwkv7(128), "head_size is 128; it must divide the embedding_length 64"),
        # vocabulary
        ("spm", _set("tokenizer.ggml.model", STRING, b"no_vocab"), "it has no vocabulary"),
        ("spm", _set("tokenizer.ggml.model", 4, 7), "tokenizer.ggml.model must be a string"),
        ("spm", _remove("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
        ("spm", _set("tokenizer.ggml.tokens", ARRAY, [], STRING), "its vocabulary is empty"),
        ("spm", _set("tokenizer.ggml.tokens", ARRAY, [1, 2], 4), "tokens must be an array of strings"),
        ("spm", _text_of("tokens", 300, b"the"), "the pieces 300 and 332 of the vocabulary are the same: b'the'"),
        ("spm", _text_of("tokens", 300, b"the\0x"), "are the same: b'the'"),
        ("spm", _all(_text_of("tokens", 300, b""), _text_of("tokens", 301, b"[EMPTY_300]")), "and an empty piece that"),
        ("spm", _text_of("tokens", 300, b"x" * 9000), "has 9000 bytes; the limit is 8192"),
        ("spm", _text_of("tokens", 20, b"<0xZZ>"), "piece 20 is a byte but is written b'<0xZZ>'"),
        ("spm", _all(_text_of("tokens", 20, b"none"), _set("tokenizer.ggml.token_type", ARRAY, [1] * 512, 5)),
         "1 of the 256 byte pieces are missing from the vocabulary, such as '<0x11>'"),
        ("spm", _set("tokenizer.ggml.scores", ARRAY, [0.0] * 511, 6), "scores has 511 elements for 512 pieces"),
        ("spm", _set("tokenizer.ggml.scores", ARRAY, [0.0, math.nan] * 256, 6), "the score of piece 1 is not a number"),
        ("spm", _set("tokenizer.ggml.scores", ARRAY, [0] * 512, 4), "scores must be an array of f32 or i32"),
        ("spm", _set("tokenizer.ggml.token_type", ARRAY, [1] * 511 + [7], 5), "piece 511 has the token type 7"),
        ("spm", _set("tokenizer.ggml.bos_token_id", 4, 512), "bos_token_id is 512; the vocabulary has 512 pieces"),
        ("spm", _set("tokenizer.ggml.eos_token_id", 5, 2), "eos_token_id must be a u32"),
        ("bpe", _set("tokenizer.ggml.merges", ARRAY, [b"t h", b"he"], STRING), "merge 1 of the .* b'he', is not"),
        ("bpe", _set("tokenizer.ggml.merges", ARRAY, [b"t h", b""], STRING), "merge 1 of the vocabulary, b'', is not"),
        ("bpe", _set("tokenizer.ggml.pre", STRING, b"whitespace"), "does not go with the tokenizer 'gpt2'"),
        ("bpe", _all(_set("tokenizer.ggml.pre", STRING, b"chatglm-bpe"), _remove("tokenizer.ggml.bos_token_id")),
         "its gpt2 tokenizer needs the BOS token"),
        ("gemma4", _remove("tokenizer.ggml.bos_token_id"), "its gemma4 tokenizer needs the BOS token"),
        ("bert", _set("tokenizer.ggml.token_type", ARRAY, [1, 6] * 256, 5), "piece 1 is a byte, which a WordPiece"),
        ("t5", _all(_set("tokenizer.ggml.add_bos_token", 7, 1), _remove("tokenizer.ggml.bos_token_id")),
         "its t5 tokenizer needs the BOS token"),
        ("rwkv", _text_of("tokens", 3 + ord("z"), b"zz"), "but not its first byte alone"),
        ("plamo2", _all(*(_text_of("tokens", i, b"%d" % i * 2000) for i in range(400, 420))), "too long for llama.cpp"),
        # tensors
        ("spm", _tensor("token_embd.weight", dims=[64, 0]), "token_embd.weight' has the impossible shape 64 × 0"),
        ("spm", _tensor("token_embd.weight", dims=[1 << 62, 512]), "has the impossible shape"),
        ("spm", _tensor("token_embd.weight", dims=[33, 512], kind=8), "rows of 33, not a multiple of Q8_0's 32"),
        ("spm", _tensor("token_embd.weight", dims=[64] * 5), "has 5 dimensions; llama.cpp reads 1 to 4"),
        ("spm", _tensor("output_norm.weight", kind=1), "'output_norm.weight' has the type F16; llama.cpp reads such"),
        ("spm", _tensor("output_norm.weight", kind=1, dims=[64, 1]), "has the type F16; llama.cpp reads such"),
        ("spm", _tensor("blk.0.attn_q.weight", kind=26), "has the type I32, which is not one of weights"),
        ("spm", _tensor("blk.0.attn_q.weight", name=b"blk.1.attn_q.weight"), "'blk.1.attn_q.weight' occurs twice"),
        ("spm", _tensor("blk.0.attn_q.weight", name=b""), "is named b''"),
        ("spm", _tensor("blk.0.attn_q.weight", name=b"n" * 64), "claims 64 bytes; the limit is 63"),
        # parts
        ("spm", _set("split.count", 2, 2), "it is one of 2 parts, but does not say which: split.no is missing"),
        ("spm", _all(_set("split.count", 2, 3), _set("split.no", 2, 1)), "it is part 2 of 3; give the first part"),
        ("spm", _all(_set("split.count", 2, 3), _set("split.no", 2, 0)), "it must be called NAME-00001-of-00003.gguf"),
        ("spm", _set("split.count", 4, 3), "split.count must be a u16"),
    ],
)  # fmt: skip
def test_harmful_edits_are_refused(
    tmp_path: Path, models: dict[str, bytes], model: str, edit: Edit, message: str
) -> None:
    document, _ = unpack(models[model])
    edit(document)
    path = tmp_path / "m.gguf"
    document.write(path)
    with pytest.raises(ModelLoadError, match=message):
        check_gguf(path)


def test_bert_defaults_beyond_a_small_vocabulary(tmp_path: Path, models: dict[str, bytes]) -> None:
    document, _ = unpack(models["bert"])
    for key in ("tokens", "scores", "token_type"):
        del document.entry(f"tokenizer.ggml.{key}").value[102:]
    document.remove("tokenizer.ggml.seperator_token_id")
    path = tmp_path / "m.gguf"
    document.write(path)
    assert "its bert tokenizer needs the SEP token" in refusal(path)


def test_tensors_must_lie_where_they_can_be_mapped(tmp_path: Path, models: dict[str, bytes]) -> None:
    document, _ = unpack(models["spm"])
    document.put("general.alignment", 4, 8)
    path = tmp_path / "m.gguf"
    seen = set()
    for n in range(4):
        document.put("pad", STRING, bytes(8 * n))
        document.write(path)
        if path.read_bytes().index(document.tensors[0].data) % 32:
            assert "which is not a multiple of 32" in refusal(path)
            seen.add("refused")
        else:
            check_gguf(path)
            seen.add("accepted")
    assert seen == {"accepted", "refused"}


@pytest.mark.parametrize("kind", [4, 31, 36])
def test_removed_tensor_types(tmp_path: Path, models: dict[str, bytes], kind: int) -> None:
    data = bytearray(models["spm"])
    struct.pack_into("<I", data, data.index(b"token_embd.weight") + len(b"token_embd.weight") + 20, kind)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert f"has the type {kind}, which llama.cpp removed; quantize again" in refusal(path)


def test_a_wrong_offset_is_named(tmp_path: Path, models: dict[str, bytes]) -> None:
    data = bytearray(models["spm"])
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 24
    struct.pack_into("<Q", data, at, 1 << 60)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert "'blk.0.attn_q.weight' is at offset 1152921504606846976, but 65792 comes next" in refusal(path)


# ---- files that are none


def test_a_missing_file_is_refused_with_its_neighbours(tmp_path: Path) -> None:
    assert "does not exist; check the path" in refusal(tmp_path / "m.gguf")
    (tmp_path / "other.gguf").touch()
    assert "does not exist; its folder has other.gguf" in refusal(tmp_path / "m.gguf")
    assert f"nor does its folder {tmp_path / 'no'}" in refusal(tmp_path / "no" / "m.gguf")
    assert refusal(Path("no-model")).endswith(
        "check the path, or write ollama:no-model for a model of Ollama"
    )
    assert refusal(Path("owner/no-model")).endswith(
        "check the path, or write hf:owner/no-model for a model of the Hub"
    )
    assert "cannot be read" in refusal(tmp_path / "other.gguf" / "m.gguf")
    assert "cannot be read" in refusal(Path(f"{tmp_path}/nul\0.gguf"))
    assert "cannot be read" in refusal(tmp_path / ("n" * 300))


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("https://huggingface.co/o/r", "write hf:o/r"),
        ("hf.co/o/r:Q4_K_M", "write hf:o/r:Q4_K_M"),
        ("https://example.com/a.gguf", "download the file and give its path"),
        ("https://\0", "download the file and give its path"),
        (f"https://{'a' * 5000}", "download the file and give its path"),
    ],
)
def test_an_address_is_no_file(address: str, fix: str) -> None:
    for use in (lp.Model, lambda path: lp.Model(lp.demo_model_path(), mmproj=path)):
        with pytest.raises(ModelLoadError, match="is an address, not a file; ") as refused:
            use(address)
        assert str(refused.value).endswith(fix)


def test_a_directory_is_refused_with_its_files(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("is a directory; give the path of a .gguf file")
    (tmp_path / "model.safetensors").touch()  # what vLLM and transformers load
    assert (
        "is a directory; it holds safetensors: convert it with llama.cpp's convert_hf_to_gguf.py"
        in refusal(tmp_path)
    )
    (tmp_path / "a.gguf").touch()
    assert refusal(tmp_path).endswith("is a directory; give one of its files: a.gguf")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it would wait for ever
    assert "is not a regular file" in refusal(tmp_path / "pipe.gguf")
    assert "is not a regular file" in refusal(Path("/dev/null"))


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, models: dict[str, bytes]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(models["spm"])
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read anything
    try:
        assert "cannot be read: no permission; change its mode or owner" in refusal(path)
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; download or convert it again"),
        (b"GGUF", "the file has 4 bytes, less than a GGUF header of 24"),
        (b"GGUF" + bytes(3), "the file has 7 bytes"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "claims 18446744073709551615 metadata entries"),
        (b'\x40\0\0\0\0\0\0\0{"__metadata__": {}}', "looks like a safetensors file; convert it"),
        (b"PK\x03\x04archive/data.pkl", "looks like a PyTorch checkpoint"),
        (b"\x80\x02}q\0", "looks like a PyTorch checkpoint"),
        (b"tjgg\x03\0\0\0" + bytes(40), "the format before GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
        (b"\n<!DOCTYPE html><html>", "looks like a web page"),
        (b"\x1f\x8b\x08\0", "compressed archive; unpack it"),
        (b'{"error": "Repository not found"}', "looks like a JSON file"),
        (b"# mine\nFROM llama3.2\nPARAMETER temperature 1\n", "looks like a Modelfile of Ollama"),
        (b"FUGG\0\0\0\x03", "with its bytes swapped"),
        (b"GGUF\0\0\0\x03" + bytes(30), "it is big-endian"),
        (b"MZ\x90\0", "it begins with b'MZ"),
    ],
)
def test_files_of_other_formats_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert message in refusal(path)


# ---- parts


def _split_in_two(folder: Path, data: bytes) -> tuple[Path, Path]:
    document, _ = unpack(data)
    tensors, entries = document.tensors, document.entries
    document.put("split.count", 2, 2)
    document.put("split.tensors.count", 5, len(tensors))
    document.put("split.no", 2, 0)
    document.tensors = tensors[:9]
    first, second = folder / "m-00001-of-00002.gguf", folder / "m-00002-of-00002.gguf"
    document.write(first)
    document.entries = [e for e in entries if e.key.startswith(b"split.")]
    document.put("split.no", 2, 1)
    document.tensors = tensors[9:]
    document.write(second)
    return first, second


def test_parts_are_checked_as_one_model(tmp_path: Path, models: dict[str, bytes]) -> None:
    first, second = _split_in_two(tmp_path, models["spm"])
    info = check_gguf(first)
    assert (info.n_parts, info.n_tensors) == (2, 20)
    assert info.size_bytes == first.stat().st_size + second.stat().st_size
    assert "it is part 2 of 2; give the first part, m-00001-of-00002.gguf" in refusal(second)
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002.gguf: the data of .* is missing"):
        check_gguf(first)
    document, _ = unpack(whole)
    document.put("split.no", 4, 1)  # llama.cpp reads this one without looking at its type
    document.write(second)
    with pytest.raises(ModelLoadError, match=r"split.no must be a u16"):
        check_gguf(first)
    document.put("split.no", 2, 5)
    document.write(second)
    with pytest.raises(ModelLoadError, match="does not say that it is part 2 of the model"):
        check_gguf(first)
    document.put("split.no", 2, 1)
    document.tensors[0].name = b"token_embd.weight"
    document.write(second)
    with pytest.raises(ModelLoadError, match=r"'token_embd.weight' occurs in an earlier part too"):
        check_gguf(first)
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002.gguf does not exist"):
        check_gguf(first)
    first.rename(tmp_path / "renamed.gguf")
    assert "must be called NAME-00001-of-00002.gguf" in refusal(tmp_path / "renamed.gguf")
