"""Adds and reads the options of ``Model``, ``Engine`` and ``SamplingParams`` for all commands, and opens both objects.

Options have the names of the arguments, with dashes instead of underscores.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe import _options
from llamapipe._options import MTP_CHOICES, Option
from llamapipe._sampling_table import BY_NAME, OPTIONS, Kind, SamplingOption
from llamapipe.arguments import path_of
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.parser import UsageError, usage_errors
from llamapipe.engine import with_tuning
from llamapipe.host.cores import usable_cores
from llamapipe.hub import PREFIX, hub_name, model_file, parse
from llamapipe.ollama_models import PREFIX as OLLAMA
from llamapipe.ollama_models import model_of, short_names


def _number_or_none(text: str) -> int | None:
    try:
        return None if text in ("none", "-1") else int(text)  # -1: as in llama.cpp
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor 'none'") from None


def number_or_automatic(text: str) -> int | None:
    """Read a number; None for -1, which in llama.cpp's programs means an automatic choice."""
    try:
        return None if text == "-1" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def byte_count(text: str) -> int:
    """Read a number of bytes, such as ``6GiB`` or ``500M``. Raises ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    n = 0 if match is None else int(float(match[1]) * _UNITS[match[2].lower()])
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or 500MiB, or 6GiB")
    return n


def byte_count_or_zero(text: str) -> int:
    """Read a number of bytes, as ``byte_count`` reads it, or 0."""
    return 0 if text.strip() == "0" else byte_count(text)


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    try:
        if equals:
            return int(token), float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not of the form ID=NUMBER, as in 17=-2.5")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def text_or_file(text: str) -> str:
    """Return the text, or for ``@FILE`` the file's text. Raises ArgumentTypeError."""
    if not text.startswith("@"):
        return text
    try:
        return path_of(text[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise argparse.ArgumentTypeError(f"{text[1:]} cannot be read: {e}") from None


MODEL_HELP = (
    "a GGUF file, hf:OWNER/REPO[/FILE] or hf:OWNER/REPO:QUANT of the Hugging Face Hub, ollama:NAME that Ollama has "
    "downloaded, or demo, the bundled model (default)"
)


def draft_source(text: str) -> str | Path:
    """Return the value of ``--draft``: a model's path, or ``auto`` or ``mtp``. Raises as ``model_path`` does."""
    if text.isdecimal() and not path_of(text).exists():  # llama.cpp's option was a number of tokens
        raise argparse.ArgumentTypeError(
            f"{text} is not a model: --draft takes a file, auto or mtp; how many tokens are guessed follows from "
            "measured times"
        )
    return text if text in MTP_CHOICES else model_path(text)


def model_path(text: str) -> Path:
    """Return the path for ``--model``: a file, downloaded from the Hugging Face Hub if needed, or ``ollama:NAME``.

    Raises ArgumentTypeError for a name that cannot be a model's, ModelLoadError and ImportError if there is no such
    model.
    """
    if text.startswith(PREFIX):
        try:
            return model_file(*parse(text))
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None
    try:
        if model_of(text) is not None:
            return Path(text)  # the model keeps this name
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    path = path_of(text)
    if text == "demo" and not path.is_file():
        return lp.demo_model_path()
    if path.exists():
        return path
    if (name := hub_name(text)) is not None:
        raise argparse.ArgumentTypeError(f"{text} is an address, not a file; write {name}")
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is an address; download the file and give its path")
    if path.name == text and path.suffix != ".gguf":  # could be a name in Ollama's library
        raise lp.errors.ModelLoadError(
            f"{text} does not exist; Ollama has a model of this name: write {OLLAMA}{text}"
            if text in short_names()
            else f"{text} does not exist, nor has Ollama downloaded a model of this name; give a GGUF file, "
            "hf:OWNER/REPO/FILE or hf:OWNER/REPO:QUANT of the Hugging Face Hub, or demo for the bundled model"
        )
    return path


def template_file(text: str) -> str:
    """Return the value of ``--chat-template``: a file or Jinja source. Raises ArgumentTypeError if it is neither."""
    if "{" not in text and "\n" not in text and not path_of(text).is_file():
        raise argparse.ArgumentTypeError(
            f"there is no file {text}; give a Jinja file (llama.cpp's names of templates are unknown here)"
        )
    return text


def mmproj_file(text: str) -> str | Path:
    """Return the value of ``--mmproj`` in the form for ``Model``. Raises ArgumentTypeError."""
    if not text.startswith("hf:"):
        return text if text in ("auto", "off") else path_of(text)
    try:
        parse(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text


def _read_placement(text: str) -> tuple[str, str]:
    pattern, equals, device = text.rpartition("=")
    if not (equals and pattern and device):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form PATTERN=DEVICE, as in exps=CPU")
    return pattern, device


_BOOLS = {"true": True, "false": False}
_READ_VALUE: dict[str, Callable[[str], bool | int | float | str]] = {
    "int": int,
    "float": float,
    "bool": _BOOLS.__getitem__,
    "str": str,
}


def _kv_override(text: str) -> tuple[str, bool | int | float | str]:
    key, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    if key and equals and colon and kind in _READ_VALUE:
        try:
            return key, _READ_VALUE[kind](value)
        except (ValueError, KeyError):
            pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is not of the form KEY=TYPE:VALUE, as in qwen3moe.expert_used_count=int:4 (TYPE: int, float, bool "
        "or str)"
    )


def _reciprocal(text: str) -> float:
    try:
        return 1 / float(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0") from None


def _layers(text: str) -> int:
    try:
        return -1 if text == "all" else int(text)
    except ValueError:  # "auto" of llama.cpp, too
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a number of layers, or all (llamapipe doctor -m FILE shows what fits)"
        ) from None


# The functions that read an option's text, by the option's kind or by its name.
_READ: dict[Kind, Callable[[str], Any]] = {
    Kind.INT: int,
    Kind.SIZE: byte_count,
    Kind.FLOAT: float,
    Kind.FLAG: bool,
    Kind.TEXT: str,
    Kind.TEXTS: str,
    Kind.TEXT_LIST: str,
    Kind.TOKENS: int,
    Kind.BIASES: _bias,
    Kind.SAMPLERS: _names,
    Kind.CONSTRAINT: text_or_file,
}
_READ_OTHERWISE: dict[str, Callable[[str], Any]] = {
    "max_tokens": _number_or_none,
    "seed": number_or_automatic,
    "regex": str,
    "choice": str,
    "n_seq_max": number_or_automatic,
    "n_gpu_layers": _layers,
    "n_threads": number_or_automatic,
    "n_threads_batch": number_or_automatic,
    "cache_bytes": byte_count_or_zero,
    "draft": draft_source,
    "mmproj": mmproj_file,
    "tensor_placement": _read_placement,
    "kv_overrides": _kv_override,
}
_REPEATED = (Kind.TEXTS, Kind.TEXT_LIST, Kind.TOKENS, Kind.BIASES)
_SEVERAL_TEXTS = ("n", "logprobs")


def reader_of(option: Option) -> Callable[[str], Any]:
    """Return the function that reads an option's text."""
    return _READ_OTHERWISE.get(option.name, _READ[option.kind])


def _from_table(option: SamplingOption) -> Option:
    """Convert an option of ``SamplingParams`` to an option of a command."""
    row = Option(option.kind, option.name, metavar=option.metavar, aliases=option.flags)
    repeats = option.kind in _REPEATED or option.name == "choice"
    note = " (repeatable)" if repeats else "; @FILE reads a file" if reader_of(row) is text_or_file else ""
    return replace(row, help=option.help + note, repeats=repeats)


SAMPLING = [
    _from_table(option)
    for option in OPTIONS
    if option.metavar is not None and option.name not in _SEVERAL_TEXTS
]
# For commands that can show several texts and log-probabilities.
TEXTS = [_from_table(BY_NAME[name]) for name in _SEVERAL_TEXTS]
_MAPPINGS = ("logit_bias", "tensor_placement", "kv_overrides")


def for_commands(*options: Option) -> list[Option]:
    """Return the options that commands accept."""
    return [option for option in options if option.metavar is not None]


ENGINE = for_commands(*_options.ENGINE, *_options.TUNING)
MODEL = for_commands(*_options.MODEL)
EMBEDDER = for_commands(*_options.EMBEDDER)


def _default_note(option: Option, default: Any) -> str:
    """Return the help's note about the default."""
    if option.repeats or (default is None and not option.none):
        return ""
    text = option.none if default is None else default
    if reader_of(option) is byte_count:
        text = f"{default // 2**20}MiB"
    elif isinstance(default, float):
        text = f"{default:g}"
    return f" (default: {text})"


def add_options(
    parser: argparse.ArgumentParser, title: str, options: list[Option], defaults: Mapping[str, Any]
) -> None:
    """Add ``options`` as a group of the help, with the library's ``defaults`` in the help texts."""
    add_to_group(parser.add_argument_group(title), options, defaults)


def add_to_group(group: argparse._ArgumentGroup, options: list[Option], defaults: Mapping[str, Any]) -> None:
    """Add ``options`` to a group of the help."""
    for option in options:
        # An option that was not given leaves no attribute, so the library's own default applies.
        add = partial(group.add_argument, *option.flags, dest=option.name, default=argparse.SUPPRESS)
        if option.kind is Kind.FLAG:
            add(action="store_false" if option.is_off else "store_true", help=option.help)
            continue
        add(
            type=reader_of(option),
            metavar=option.metavar or None,
            choices=None if option.metavar else option.choices or None,
            action="append" if option.repeats else "store",
            help=option.help + _default_note(option, defaults.get(option.name)),
        )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``Engine`` and of ``Model``."""
    add_options(parser, "engine", ENGINE, defaults_of(lp.Engine) | defaults_of(lp.EngineTuning))
    add_options(parser, "model", MODEL, defaults_of(lp.Model))
    # llama.cpp's other flags for two of the options.
    parser.add_argument(
        "--cpu-moe",
        "-cmoe",
        dest="n_cpu_moe",
        action="store_const",
        const=2**31 - 1,
        default=argparse.SUPPRESS,
        help="keep the experts of all layers on the CPU",
    )
    parser.add_argument(
        "--rope-scale",
        dest="rope_freq_scale",
        type=_reciprocal,
        metavar="N",
        default=argparse.SUPPRESS,
        help="the same as --rope-freq-scale 1/N",
    )


def defaults_of(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a callable's arguments."""
    return {name: parameter.default for name, parameter in inspect.signature(call).parameters.items()}


def read_options(args: argparse.Namespace, options: list[Option]) -> dict[str, Any]:
    """Return the options that were given, as keyword arguments."""
    values: dict[str, Any] = {}
    if options is MODEL and getattr(args, "draft", None) in MTP_CHOICES:
        values["load_mtp"] = True
    for option in options:
        if hasattr(args, option.name):
            value = getattr(args, option.name)
            if value is None and reader_of(option) is number_or_automatic:
                continue  # the library's default
            values[option.name] = tuple(value) if option.repeats else value
    for name in _MAPPINGS:
        if name in values:
            values[name] = dict(values[name])
    return values


# ---- opening models and engines
_QUICK_LOAD_S = 1.0  # shorter loads show no progress


def open_model(
    path: Path | None,
    options: dict[str, Any],
    show_progress: bool = True,
    report: Callable[[float], None] | None = None,
) -> lp.Model:
    """Load a model; None: the bundled one. ``report``: called with the fraction loaded, instead of showing it.

    Raises UsageError for wrong options, ModelLoadError.
    """
    terminal = Terminal(sys.stderr)
    start = time.perf_counter()
    shown = ""

    def progress(fraction: float) -> None:
        nonlocal shown
        line = f"loading {fraction:.0%}"
        if line != shown and time.perf_counter() - start > _QUICK_LOAD_S:
            shown = line
            terminal.redraw(line)

    try:
        file = lp.demo_model_path() if path is None else path
        shows = progress if show_progress and terminal.redraws else None
        with usage_errors():
            return lp.Model(file, **options, progress=report or shows)
    finally:
        if shown:
            terminal.redraw()


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``."""
    parser.add_argument("-m", "--model", type=model_path, metavar="FILE", help=MODEL_HELP)


def add_files(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--file``, which may be repeated."""
    parser.add_argument("-f", "--file", type=path_of, action="append", default=[], metavar="FILE", help=text)


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add ``--chat-template``."""
    parser.add_argument(
        "--chat-template",
        type=template_file,
        metavar="FILE",
        help="a Jinja file, instead of the model's template",
    )


def add_adapters(parser: argparse.ArgumentParser, more: str) -> None:
    """Add ``--lora`` and ``--control-vector``. ``more``: help text about how they are used."""
    for option, what in (("--lora", "a LoRA"), ("--control-vector", "a control vector")):
        parser.add_argument(
            option,
            type=_read_named_file,
            action="append",
            default=[],
            metavar="NAME=FILE",
            help=f"load {what} of the model from a GGUF file; {more} (repeatable)",
        )


def _read_named_file(text: str) -> tuple[str, Path | str]:
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FILE")
    return name, file if file.startswith("hf:") else path_of(file)


def load_adapters(model: lp.Model, args: argparse.Namespace) -> list[lp.Adapter | lp.ControlVector]:
    """Load the files of ``--lora`` and ``--control-vector``. Raises UsageError for a bad name, ModelLoadError."""
    with usage_errors("--lora: "):
        loras = [model.load_adapter(file, name) for name, file in args.lora]
    with usage_errors("--control-vector: "):
        return [*loras, *(model.load_control_vector(file, name=name) for name, file in args.control_vector)]


def open_engine(model: lp.Model, options: dict[str, Any]) -> lp.Engine:
    """Create an engine. An ``n_ctx`` of 0 means the model's context. Raises UsageError for wrong options."""
    if options.get("n_ctx") == 0:
        options = {**options, "n_ctx": model.n_ctx_train}
    n_cores = usable_cores()
    for name in ("n_threads", "n_threads_batch"):
        if (n := options.get(name)) is not None and n > n_cores:
            logging.getLogger("llamapipe").warning(
                "--%s is %d, but this process may use %s: more threads than free cores make each step many times "
                "slower; leave it out",
                name.replace("_", "-"),
                n,
                "1 core" if n_cores == 1 else f"{n_cores} cores",
            )
    with usage_errors():
        return lp.Engine(model, **with_tuning(options))


@contextmanager
def open_model_and_engine(args: argparse.Namespace, defaults: Mapping[str, Any] = {}) -> Iterator[lp.Engine]:
    """Open the model and the engine of a command. ``defaults``: values for engine options that were not given."""
    with (
        open_model(args.model, read_options(args, MODEL)) as model,
        open_engine(model, {**defaults, **read_options(args, ENGINE)}) as engine,
    ):
        yield engine


def template_problem(model: lp.Model, file: str | None = None) -> str | None:
    """Return why the model cannot chat (it has no template, or a broken one); None if it can.

    ``file``: the value of ``--chat-template``. Raises UsageError if it is given and broken.
    """
    problem = f"{model.path.name} has no chat template"
    if model.chat_template:
        try:
            model.render_chat([{"role": "user", "content": "Hello"}])
            return None
        except lp.errors.InvalidRequestError as error:
            problem = str(error)
    if file is not None:
        raise UsageError(f"--chat-template: {problem}")
    return problem
