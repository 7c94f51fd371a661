"""What the command line says to people who know llama.cpp's programs or Ollama."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import llamapipe as lp
from llamapipe._messages import GIVE_PROJECTOR, ON_COMMAND_LINE, with_flags
from llamapipe.cli import _parser, main
from llamapipe.cli._models_file import entries_of
from llamapipe.cli.chat import Conversation
from llamapipe.cli.options import ENGINE, MODEL, read_options, text_or_file
from llamapipe.cli.parser import read_texts
from llamapipe.compat import LlamaGrammar
from llamapipe.host.cores import usable_cores
from llamapipe.server import ServerSettings, serve


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 2) -> str:
    assert main(list(map(str, arguments))) == status
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("serve --jinja", "--jinja; it is always on; leave the option out (see"),
        ("serve -cb", "-cb; it is always on"),
        ("serve --cont-batching", "--cont-batching; it is always on"),
        ("serve --metrics", "--metrics; it is always on"),
        ("serve --ssl-key-file key.pem", "key.pem; the server speaks plain HTTP; use a proxy for TLS"),
        ("serve --chat-template-file x.j", "; use --chat-template (see"),
        ("serve --context-shift", "; use --overflow shift (see"),
        ("serve --max-model-len 4096", "; use --n-ctx (see"),
        ("serve --max-num-seqs 4", "; use --n-seq-max (see"),
        ("serve --served-model-name a", "; use --alias (see"),
        ("serve --ping -1", "llamapipe: --ping is -1.0; it must be from 0 to"),
        ("serve --allow-host http://a", "llamapipe: --allow-host: 'http://a' is not a host;"),
        ("serve --max-n 0", "llamapipe: --max-n is 0; it must be from 1"),
        ("serve --max-queue 0", "llamapipe: --max-queue is 0; it must be from 1"),
        ("serve --cache-bytes 2048x", "--cache-bytes: '2048x' is not a size; write bytes, or 500MiB"),
        ("serve --max-body-bytes 0", "--max-body-bytes: '0' is not a size; write bytes, or 500MiB"),
        ("serve -n 5", "unrecognized arguments: -n; each request sets it: the field max_tokens (see"),
        ("serve --predict 5", "; each request sets it: the field max_tokens (see"),
        ("serve --ignore-eos", "; each request sets it: the field ignore_eos (see"),
        ("serve --seed 1", "; each request sets it: the field seed (see"),
        ("serve --no-jinja", "; templates are always Jinja; leave the option out (see"),
        ("serve -nocb", "; requests always share batches; -np 1 computes one at a time (see"),
        ("serve --no-slots", "; /slots, /props and /metrics are always on"),
        ("serve --list-devices", "; llamapipe doctor lists them (see"),
        ("serve --spec-draft-model a", "; use --draft (see"),
        ("serve --spec-draft-hf a/b", "; use --draft hf:OWNER/REPO/FILE or"),
        ("serve --spec-draft-ngl 9", "; the draft model has the context and the devices of the model"),
        ("serve -mm x", "-mm; use --mmproj (see"),
        ("serve -mmu x", "; download the file, or use --mmproj hf:OWNER/REPO/FILE (see"),
        ("serve --cors-methods GET", "; pages of the origins of --cors may use every method and header"),
        ("serve --cors-credentials", "; keys are sent in a header, not in cookies"),
        ("serve --sse-ping-interval 3", "; use --ping (see"),
        ("serve --prefill-assistant", "; each request sets it: the field continue_final_message (see"),
        ("serve --grammar-file f", "; each request sets it: the field grammar (see"),
        ("serve --fim-qwen-7b-default", "; there are no presets of models; use -m hf:OWNER/REPO:QUANT (see"),
        ("generate --grammar-file f a", "; use --grammar @FILE (see"),
        (
            "serve -ngl auto",
            "'auto' must be a number of layers, or all (llamapipe doctor -m FILE shows what fits)",
        ),
        ("serve -ngl all -m nowhere.gguf --no-jinja", "; templates are always Jinja"),
        ("serve --override-kv a=1", "'a=1' is not of the form KEY=TYPE:VALUE"),
        ("serve -ot exps", "'exps' is not of the form PATTERN=DEVICE"),
        ("serve --rope-scale 0", "'0' is not a number above 0"),
        ("serve model.gguf", "unrecognized arguments: model.gguf; pass a model with -m (see"),
        ("serve llama3.2", "unrecognized arguments: llama3.2; pass a model with -m (see"),
        ("serve --models nowhere", "--models: nowhere does not exist; give a folder"),
        ("chat model.gguf", "model.gguf names a model: pass it with -m (see"),
        ("generate dir/Model.GGUF hello", "dir/Model.GGUF names a model: pass it with -m (see"),
        ("serve --strcit", "; did you mean --strict? (see"),
        ("generate -sm row", "-sm; only Python has it: lp.Model(path, split_mode=...) (see"),
        ("generate --predict 5 a", "; use --max-tokens (see"),
        ("generate -hf a/b a", "; use -m hf:OWNER/REPO/FILE or -m hf:OWNER/REPO:QUANT (see"),
        ("bench -p 512", "; use --prompt-tokens (see"),
        ("serve -p 8080", "; use --port (see"),
        ("ps --port 8080", "; use --url http://HOST:PORT (see"),
        ("run -m a.gguf", "; name the model without an option: llamapipe run MODEL (see"),
        ("run demo --format json hello", "--format json hello; use --json-schema (see"),
        ("run demo --think=false hello", "--think=false hello; --no-thinking turns reasoning off (see"),
        ("run demo --keepalive 5m hello", "; leave it out: the model is loaded for this command (see"),
        ("chat -i", "; it is always on; leave the option out (see"),
        ("run demo hello --num-predict 5", "; use --max-tokens (see"),
        ("run demo hello --num_ctx 64", "; use --n-ctx (see"),
        ("ps --api-key a", "; put the key into the variable LLAMAPIPE_API_KEY (see"),
        ("serve --slots", "--slots; /slots, /props and /metrics are always on; leave the option out (see"),
        ("serve --pooling mean", "; the embedding model's file determines it;"),
        ("serve --dtype float16", "; the file determines it; leave the option out (see"),
        (
            "serve --api-key a",
            "; put the key into the variable LLAMAPIPE_API_KEYS, or into a file: --api-key-file FILE",
        ),
        ("serve --ssl-keyfile key.pem", "key.pem; the server speaks plain HTTP; use a proxy for TLS (see"),
        ("serve --no-mmproj", "; use --mmproj off (see"),
        ("serve --reasoning-budget 0", "; use --reasoning N (see"),
        (
            "serve --swa-full",
            "; it is the default, and --no-swa-full turns it off; leave the option out (see",
        ),
        (
            "serve --cache-reuse 256",
            "; the longest common prefix is always reused; leave the option out (see",
        ),
        ("serve --draft 8", "8 is not a model: --draft takes a file, auto or mtp; how many tokens"),
        (
            "serve --draft-max 8",
            "; how many tokens are guessed follows from measured times; leave the option out (see",
        ),
        ("serve --tools all", "; --mcp FILE gives /v1/responses the tools of MCP servers (see"),
        ("serve --no-perf", "; nothing here needs it; leave the option out (see"),
        (
            "serve --cpu-strict 1",
            "; start the process under taskset or numactl; --n-threads limits the threads (see",
        ),
        ("serve --lora-init-without-apply", "; use --lora NAME=FILE; a request names it as its model (see"),
        ("serve --enable-prefix-caching", "; it is always on; leave the option out (see"),
        ("serve --pipeline-parallel-size 2", "; --rpc HOST:PORT places layers on other machines (see"),
        ("serve --root-path /llm", "; a proxy can rewrite paths; or mount llamapipe.server.app(engine)"),
        (
            "serve --uvicorn-log-level info",
            "; requests and errors are logged on stderr; -v adds llama.cpp's log (see",
        ),
        (
            "serve --enforce-eager --dtype auto",
            "; --enforce-eager: nothing here needs it; leave the option out; --dtype: the",
        ),
        (
            "serve --frobnicate --max-num-seqs 4",
            "--frobnicate --max-num-seqs 4; --max-num-seqs: use --n-seq-max (see",
        ),
        ("serve --tool-call-parser hermes", "; the chat template determines it; leave the option out (see"),
        ("serve --model-dir models", "; use --models DIR (see"),
        ("chat --image a.png", "; type /image FILE in the conversation (see"),
        ("run demo --save a.json", "; type /save FILE in the conversation (see"),
        ("serve --model_alias a", "; use --alias (see"),
        ("serve --reasoning-format none", "; each request sets it: the field reasoning_format (see"),
        ("serve --gpu-memory-utilization 0.9", "; use --n-cells (see"),
        ("generate --no-display-prompt a", "does not repeat the prompt; leave the option out (see"),
        ("generate -j {} a", "; use --json-schema (see"),
        ("embed --predict 5 a", "unrecognized arguments: --predict (see"),
    ],
)
def test_a_wrong_option_gets_a_hint(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in said(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "name", "expected"),
    [
        ("run demo -n 5 hello", "message", "hello"),
        ("run -c 64 demo -n 5 -", "message", "-"),
        ("run demo -n 5", "message", None),
        ("generate a b -n 5 c", "prompts", ["a", "b", "c"]),
        ("score a -c 64 b", "texts", ["a", "b"]),
    ],
)
def test_texts_may_come_after_options(arguments: str, name: str, expected: object) -> None:
    assert getattr(_parser().parse_args(arguments.split()), name) == expected


def test_more_threads_than_cores_are_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    n = usable_cores()
    command = ("generate", "-n", "1", "-c", "32", "--temp", "0", "Once", "-t")
    said(capsys, *command, str(n), status=0)
    assert not caplog.messages
    said(capsys, *command, str(n + 1), status=0)
    cores = "1 core" if n == 1 else f"{n} cores"
    (message,) = caplog.messages
    assert message.startswith(
        f"--n-threads is {n + 1}, but this process may use {cores}: more threads than free"
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a thread cannot be kept on a core")
def test_one_core_is_told_as_one(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        said(capsys, "generate", "-n", "1", "-c", "32", "--temp", "0", "Once", "-t", "2", status=0)
    finally:
        os.sched_setaffinity(0, before)
    assert "--n-threads is 2, but this process may use 1 core: more" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('path = "a.gguf"', "models.a.path is unknown; use file (see"),
        ("ctx_size = 64", "models.a.ctx_size is unknown; use n_ctx (see"),
        ("n-ctxx = 64", "models.a.n_ctxx is unknown; did you mean n_ctx? (see"),
        (
            "temperature = 0.5",
            "models.a.temperature is unknown; it is no option of one model: serve's options set it",
        ),
        ("zzz = 1", "models.a.zzz is unknown; there is aliases, "),
    ],
)
def test_an_unknown_key_of_a_models_file_gets_a_hint(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.toml").write_text(f'[models.a]\nfile = "a.gguf"\n{line}\n')
    assert message in said(capsys, "serve", "--models", tmp_path / "models.toml")


def test_a_missing_key_names_the_variable(
    demo: lp.Model, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(api_keys=("right",))
    with lp.Engine(demo, n_ctx=64) as engine, serve(engine, settings=settings) as server:
        advice = "; put the key into the variable LLAMAPIPE_API_KEY\n"
        assert f"this server asks for an API key{advice}" in said(capsys, "ps", "--url", server.url, status=1)
        monkeypatch.setenv("LLAMAPIPE_API_KEY", "wrong")
        assert f"is not one of this server's{advice}" in said(capsys, "ps", "--url", server.url, status=1)
        monkeypatch.setenv("LLAMAPIPE_API_KEY", "right")
        assert said(capsys, "ps", "--url", server.url, status=0) == ""


def test_no_text_is_taken_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: there (see" in said(capsys, "run", "demo", "hello", "-n", "5", "there")
    assert "arguments: b --n-ct 5; did you mean --n-ctx?" in said(
        capsys, "generate", "a", "-n", "5", "b", "--n-ct", "5"
    )


def test_errors_name_the_options_that_the_command_line_has() -> None:
    names = {option.name for option in (*ENGINE, *MODEL) if not option.flag}
    of_serve = {"max_queue", "chat_template", "grammar_timeout"}
    assert {name for name in names if "_" in name} | of_serve == ON_COMMAND_LINE
    serve = _parser().parse_args(["serve"]).parser._option_string_actions
    assert {f"--{name.replace('_', '-')}" for name in ON_COMMAND_LINE} <= serve.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n_ctx is 9: shorten it, or raise n_ctx", "n_ctx is 9: shorten it, or raise n_ctx (--n-ctx)"),
        ("a smaller n_ctx, n_cells or type_k", "a smaller n_ctx (--n-ctx), n_cells (--n-cells) or type_k (--type-k)"),
        ("set n_ctx to at most 9", "set n_ctx (--n-ctx) to at most 9"),
        ("raise --memory, or a smaller n_ctx", "raise --memory, or a smaller n_ctx (--n-ctx)"),
        ("leave n_cells and kv_unified out", "leave n_cells (--n-cells) and kv_unified out"),
        ("give one with chat_template, as text", "give one with chat_template (--chat-template), as text"),
        ("give chat_template_kwargs, or image_max_tokens",
         "give chat_template_kwargs, or image_max_tokens (--image-max-tokens)"),
        (f"x.gguf has no projector: {GIVE_PROJECTOR}",
         "x.gguf has no projector: start with --mmproj FILE, the model's second file, if it has one"),
        *((text, text) for text in ("n_ctx is 9: shorten it, or set truncate to cut it", "unknown field 'n_ctx'",
                                    "raise 'n_ctx' or type_k='f16' or max_tokens or my_n_ctx", "raise")),
    ],
)  # fmt: skip
def test_advice_names_the_option(text: str, expected: str) -> None:
    assert with_flags(text) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate -np 0 a", "llamapipe: --n-seq-max is 0; it must be from 1"),
        ("generate --overflow no a", "llamapipe: --overflow is 'no'; it must be one of"),
        ("generate --temp -1 a", "llamapipe: --temperature is -1.0; it must be from 0"),
        ("generate -c 64 --overflow shift --n-keep 63 a", "llamapipe: --n-keep is 63 and --n-ctx 64; that leaves"),
        ("embed -c -5 a", "llamapipe: --n-ctx is -5; it must be"),
    ],
)  # fmt: skip
def test_errors_about_values_name_what_was_typed(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(capsys, *arguments.split())


def test_a_system_prompt_that_a_template_drops_is_text_of_the_user(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """So there is nothing to warn of, and no option to name."""
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    assert main(["chat", "--chat-template", str(file), *"--system Brief. -n 1 -c 64 Hi".split()]) == 0
    assert "leaves out" not in caplog.text


def test_a_command_names_only_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_flags("raise n_ctx or n_batch", {"--n-batch"}) == "raise n_ctx or n_batch (--n-batch)"
    text = said(capsys, "generate", "-m", "demo", "-c", "60000000", "-np", "8", "hello", status=1)
    assert "use a smaller n_ctx (--n-ctx), n_seq_max (--n-seq-max) or n_cells (--n-cells)" in text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("list", "use llamapipe models"),
        ("show", "use llamapipe doctor -m FILE"),
        ("help", "use llamapipe --help"),
        ("cp", "serve --alias NAME gives a model another name"),
        ("push", "upload files with the program of the Hugging Face Hub"),
        ("version", "use llamapipe --version"),
        ("rpc_worker", "did you mean rpc-worker?"),
        ("frobnicate", "serve, rpc-worker, batch"),
    ],
)
def test_an_unknown_command_gets_a_hint(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, command, "llama3.2")
    assert f"there is no command {command!r}; " in text and message in text
    assert text.startswith("usage: llamapipe ")


@pytest.mark.parametrize(
    "arguments", [("-m", "a", "-m", "b"), ("--model=a", "-m", "b"), ("-m", "a", "--model", "b")]
)
@pytest.mark.parametrize("command", ["generate", "serve", "batch"])
def test_a_second_model_is_refused(
    command: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "-m/--model is given twice; give one file" in said(capsys, command, *arguments)


@pytest.mark.parametrize(
    ("name", "message", "status"),
    [
        ("llama3.2", "nor has Ollama downloaded a model of this name; give a GGUF file, hf:OWNER", 1),
        ("nowhere.gguf", "nowhere.gguf does not exist", 1),
        ("https://huggingface.co/a/b/resolve/main/c.gguf?download=true", "write hf:a/b/c.gguf", 2),
        ("https://huggingface.co/a/b/c.gguf", "write hf:a/b/c.gguf", 2),
        ("hf.co/a/b:Q4_K_M", "write hf:a/b:Q4_K_M", 2),
        ("https://huggingface.co/a/b/tree/main", "write hf:a/b\n", 2),
        ("https://example.org/c.gguf", "download the file and give its path", 2),
        ("hf:a/b:", "write hf:OWNER/REPO, hf:OWNER/REPO/FILE.gguf or hf:OWNER/REPO:QUANT", 2),
    ],
)
def test_names_that_are_no_files(
    name: str, message: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "generate", "-m", name, "a", status=status)
    assert message in text and name in text
    assert len(text.splitlines()) == status  # with the usage if it is wrong


def test_demo_is_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["generate", "-n", "2", "-c", "32", "-m", "demo", "a"]
    (tmp_path / "demo").mkdir()
    assert main(words) == 0
    (tmp_path / "demo").rmdir()
    (tmp_path / "demo").write_bytes(b"a file of this name is meant")
    assert main(words) == 1
    assert "demo" in capfd.readouterr().err


def test_zero_and_minus_one_have_llama_cpps_meaning(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--temp", "0", "-n", "4", "--ignore-eos", "1, 2,"]
    assert main(["generate", *words]) == 0
    expected = capfd.readouterr().out
    options = ["-c", "0", "-t", "-1", "-tb", "-1", "-np", "-1", "-s", "-1", "--no-mmap"]
    assert main(["generate", *options, *words]) == 0
    assert capfd.readouterr().out == expected
    # The bundled model's context, less the prompt.
    assert main(["generate", "--json", "-n", "-1", "--ignore-eos", "-c", "0", "1, 2,"]) == 0
    assert '"n_completion_tokens": 10' in capfd.readouterr().out
    assert main(["bench", "-c", "0", "-t", "-1", "--requests", "1", "-n", "2", "--json"]) == 0
    assert main(["score", "-c", "0", "A cow says", " moo"]) == 0
    assert main(["generate", "-t", "0", "a"]) == 2
    assert "--n-threads is 0" in capfd.readouterr().err


def test_only_the_end_of_a_line_ends_a_text(tmp_path: Path) -> None:
    """Text from the web has other separators inside its lines: rows of vectors must match the file's lines."""
    inside = "a\x0bb\x0cc\x1cd\x1ee\x85f\u2028g\u2029h"
    file = tmp_path / "texts.txt"
    file.write_bytes(f"{inside}\r\n\n i \nj\rk".encode())
    assert read_texts([], [file], True) == [inside, " i ", "j", "k"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Programs on Windows begin files with one."""

    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        return tmp_path / name

    assert read_texts([], [written("prompt.txt", "Once")], False) == ["Once"]
    assert text_or_file(f"@{written('grammar.gbnf', 'root ::= [a]')}") == "root ::= [a]"
    assert LlamaGrammar.from_file(tmp_path / "grammar.gbnf").gbnf == "root ::= [a]"
    conversation = Conversation()
    conversation.load(written("chat.json", '[{"role": "user", "content": "Hi"}]'))
    assert len(conversation) == 1
    models = written("models.toml", f"[models.a]\nfile = '{lp.demo_model_path()}'\n")
    assert [entry.name for entry in entries_of([str(models)])] == ["a"]
    template = written("chat.jinja", "{{ messages[0].content }}")
    with lp.Model(lp.demo_model_path(), vocab_only=True, chat_template=template) as model:
        assert model.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"


def test_a_list_of_models_takes_words_for_drafts_as_the_option_does(tmp_path: Path) -> None:
    """They were read as names of files beside the list."""
    models = tmp_path / "models.toml"
    drafts = {"a": "mtp", "b": "auto", "c": "small.gguf", "d": "hf:owner/repo/f.gguf"}
    models.write_text("".join(f"[models.{k}]\nfile = 'm.gguf'\ndraft = '{v}'\n" for k, v in drafts.items()))
    read = {entry.name: entry.options["draft"] for entry in entries_of([str(models)])}
    assert read == {**drafts, "c": str(tmp_path / "small.gguf")}


def test_paths_in_a_list_of_models_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    keys = {"draft": "", "mmproj": "", "chat_template": "", "cache_dir": "", "system": "@"}
    models = tmp_path / "models.toml"
    models.write_text(
        "[models.a]\nfile = '~/m'\nlora = { l = '~/m' }\n"
        + "".join(f"{k} = '{at}~/m'\n" for k, at in keys.items())
    )
    (entry,) = entries_of([str(models)])
    place = str(tmp_path / "home" / "m")
    assert entry.file == place
    assert entry.options == {"lora": [("l", place)], **{key: at + place for key, at in keys.items()}}


def test_a_name_for_no_model_of_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients would get 404 for it."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    for words in (("serve",), ("batch", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")):
        assert "--embeddings-alias needs --embeddings FILE" in said(capsys, *words, "--embeddings-alias", "e")


def test_no_mmap_is_use_mmap_false() -> None:
    args = _parser().parse_args(["serve", "--no-mmap"])
    assert read_options(args, MODEL) == {"use_mmap": False}
    assert read_options(_parser().parse_args(["serve"]), MODEL) == {}


def test_errors_of_the_system_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "generate", "-f", tmp_path / "none", status=1)
    assert text == f"llamapipe: {tmp_path}/none: No such file or directory\n"
