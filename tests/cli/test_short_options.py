"""llama.cpp's options: those with the same meaning work in every command, and no other is read as something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamapipe.cli import main

# What every command that has the option calls it; `-n` and `--temp` where text is generated.
SAME = {
    "generate": "-n --temp -s -c -t -tb -b -ub -np -ngl -ctk -ctv",
    "chat": "-n --temp -s -c -t -tb -b -ub -np -ngl -ctk -ctv",
    "batch": "-n --temp -s -c -t -tb -b -ub -np -ngl -ctk -ctv",
    "serve": "-c -t -tb -b -ub -np -ngl -ctk -ctv",
    "score": "-c -t -tb -b -ub -np -ngl -ctk -ctv",
    "bench": "-n -c -t -tb -b -ub -np -ngl -ctk -ctv",
    "trace": "-n -c -t -tb -b -ub -np -ngl -ctk -ctv",
    "tune": "-n -c -ngl",
    "embed": "-c -t -ngl",
}
LONG = {
    "-n": "--max-tokens",
    "--temp": "--temperature",
    "-s": "--seed",
    "-c": "--n-ctx",
    "-t": "--n-threads",
    "-tb": "--n-threads-batch",
    "-b": "--n-batch",
    "-ub": "--n-ubatch",
    "-np": "--n-seq-max",
    "-ngl": "--n-gpu-layers",
    "-ctk": "--type-k",
    "-ctv": "--type-v",
}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", SAME)
def test_short_options_mean_the_long_ones(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    text = capsys.readouterr().out
    for short in SAME[command].split():
        line = next(line for line in text.splitlines() if line.lstrip().startswith(f"{short} "))
        assert f" {LONG[short]} " in f"{line} ", line


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_texts_and_logprobs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    text = capsys.readouterr().out
    assert "--n N" in text and "--logprobs N" in text


@pytest.mark.parametrize("command", SAME)
@pytest.mark.parametrize("option", ["-fa", "-sm", "-hf", "-cnv", "-mg", "-nkvo"])
def test_no_other_short_option_is_read_as_two(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Argparse would read ``-fa on`` as ``-f a``, and ``-hf`` as a wish for help."""
    assert f"unrecognized arguments: {option}" in said(capsys, command, option, "on")


def test_options_that_have_another_name_here_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "; use --max-tokens" in said(capsys, "generate", "--n-predict", "3", "hello")
    assert "; use -m hf:OWNER/REPO/FILE" in said(capsys, "chat", "-hf", "owner/repo")
    assert "; pass the prompt as an argument" in said(capsys, "generate", "-p", "hello")
    assert "did you mean" not in said(capsys, "chat", "--n", "2")  # -n is another option


def test_minus_one_token_is_no_limit(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-n", "-1", "--temp", "0", "-t", "1", "-c", "64", "1, 2, 3,"]) == 0
    assert len(capfd.readouterr().out.split(",")) > 10


def test_a_misspelt_command_or_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no command 'genrate'; did you mean generate?" in said(capsys, "genrate", "hello")
    assert "commands: demo, generate" in said(capsys, "frobnicate")
    monkeypatch.setenv("LLAMAPIPE_APIKEYS", "secret")
    assert "did you mean LLAMAPIPE_API_KEYS?" in said(capsys, "serve")
    monkeypatch.delenv("LLAMAPIPE_APIKEYS")
    for name in ("LLAMAPIPE_CACHE_DIR", "LLAMAPIPE_TEST_BACKEND"):  # known elsewhere
        monkeypatch.setenv(name, "cpu")
    assert "LLAMAPIPE_" not in said(capsys, "serve", "--max-n", "0")


def test_the_key_of_clients_is_not_taken_for_the_servers_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAPIPE_API_KEY", "secret")
    assert "this server has no keys; put them into LLAMAPIPE_API_KEYS or" in said(capsys, "serve")
    monkeypatch.setenv("LLAMAPIPE_API_KEYS", "secret")
    assert "LLAMAPIPE_" not in said(capsys, "serve", "--max-n", "0")


@pytest.mark.parametrize("value", ["", ",", " , ,", "\n"])
def test_a_variable_without_a_key(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unset variables that were joined must not open the server to all, not even beside a file with keys."""
    monkeypatch.setenv("LLAMAPIPE_API_KEYS", value)
    assert "LLAMAPIPE_API_KEYS holds no key; unset the variable" in said(capsys, "serve")
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    assert "LLAMAPIPE_API_KEYS holds no key" in said(capsys, "serve", "--api-key-file", str(keys))
    monkeypatch.setenv("LLAMAPIPE_API_KEYS", f"{value},secret")
    assert "LLAMAPIPE_" not in said(capsys, "serve", "--max-n", "0")


@pytest.mark.parametrize("text", ["", "\n \n", "# a comment\n"])
def test_a_key_file_without_a_key(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(text)
    assert "holds no key" in said(capsys, "serve", "--api-key-file", str(keys))


def test_key_files_of_windows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A byte order mark is not part of the first key; what is not UTF-8 is told with the file's name."""
    keys = tmp_path / "keys"
    keys.write_bytes(b"\xef\xbb\xbfsecret\r\n")
    assert "api-key" not in said(capsys, "serve", "--api-key-file", str(keys), "--max-n", "0")
    keys.write_bytes("secret\r\n".encode("utf-16"))
    assert f"--api-key-file: {keys} is not UTF-8 text" in said(capsys, "serve", "--api-key-file", str(keys))


def test_wrong_engine_options_are_wrong_usage_in_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean shift?" in said(capsys, "trace", "--overflow", "shft")


@pytest.mark.parametrize("command", [*SAME, "doctor", "models", "demo"])
def test_help_breaks_prose_between_words_at_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 80 and not line.startswith("  llamapipe ")]
