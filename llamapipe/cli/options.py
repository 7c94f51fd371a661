"""Command-line options that mirror `Model`, `Engine` and `SamplingParams`: same names, dashes for underscores."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """The command line asks for something that cannot be; the exit status is 2."""


@dataclass(frozen=True)
class Option:
    """One option: the argument it sets, how its text is read, and what it means."""

    name: str
    read: Callable[[str], Any]
    metavar: str
    help: str
    repeats: bool = False

    @property
    def flag(self) -> str:
        """How it is written on the command line."""
        return "--" + self.name.replace("_", "-")


def _number_or_none(text: str) -> int | None:
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor 'none'") from None


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


def _text_or_file(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise argparse.ArgumentTypeError(f"{text[1:]} cannot be read: {e}") from None


SAMPLING = [
    Option(
        "max_tokens",
        _number_or_none,
        "N",
        "longest answer, in tokens; 'none': until it ends or the context does",
    ),
    Option("temperature", float, "T", "0 always takes the likeliest token; higher is more varied"),
    Option("top_k", int, "N", "only the N likeliest tokens; 0: all"),
    Option("top_p", float, "P", "only the likeliest tokens that together have this probability; 1: all"),
    Option("min_p", float, "P", "no token less than P times as likely as the likeliest; 0: off"),
    Option("typical_p", float, "P", "only tokens about as surprising as expected, of this mass; 1: off"),
    Option("repeat_penalty", float, "X", "above 1 makes tokens that occurred less likely; 1: off"),
    Option("repeat_last_n", int, "N", "tokens that the penalties look back at; -1: all"),
    Option("presence_penalty", float, "X", "taken once from the logit of tokens that occurred; 0: off"),
    Option("frequency_penalty", float, "X", "taken from the logit for each time a token occurred; 0: off"),
    Option("logit_bias", _bias, "ID=X", "add X to the logit of a token (repeatable)", repeats=True),
    Option("seed", int, "N", "the same seed gives the same text"),
    Option("stop", str, "TEXT", "end before this text (repeatable)", repeats=True),
    Option("stop_token_ids", int, "ID", "end at this token (repeatable)", repeats=True),
    Option("ignore_eos", bool, "", "go on where the model would end"),
    Option("min_tokens", int, "N", "shortest answer, in tokens"),
    Option(
        "grammar", _text_or_file, "GBNF", "what the answer has to be, in llama.cpp's GBNF; @FILE reads a file"
    ),
    Option("json_schema", _text_or_file, "JSON", "the same as a JSON schema; @FILE reads a file"),
    Option("regex", str, "REGEX", "the same as a regular expression"),
    Option("lark", _text_or_file, "LARK", "the same as a Lark grammar; @FILE reads a file"),
    Option("allowed_token_ids", int, "ID", "only this token (repeatable)", repeats=True),
    Option("bad_words", str, "TEXT", "never this text (repeatable)", repeats=True),
    Option(
        "sampler_order", _names, "NAMES", "samplers and their order, with commas between; others are not used"
    ),
    Option("dynatemp_range", float, "T", "the temperature follows the entropy, by so much; 0: off"),
    Option("dynatemp_exponent", float, "X", "how it follows"),
    Option(
        "top_n_sigma", float, "X", "only logits within so many standard deviations of the largest; -1: off"
    ),
    Option("xtc_probability", float, "P", "how often the likeliest tokens are left out; 0: never"),
    Option("xtc_threshold", float, "P", "which ones: those at least so likely, but the last of them"),
    Option("dry_multiplier", float, "X", "makes tokens less likely that lengthen a repetition; 0: off"),
    Option("dry_base", float, "X", "how fast that grows with its length"),
    Option("dry_allowed_length", int, "N", "repetitions up to this length are left alone"),
    Option("dry_penalty_last_n", int, "N", "tokens looked through for repetitions; -1: all"),
    Option("dry_sequence_breakers", str, "TEXT", "text that ends a repetition (repeatable)", repeats=True),
    Option("mirostat", int, "N", "1 or 2: this algorithm instead of those that cut tokens off; 0: off"),
    Option("mirostat_tau", float, "X", "the surprise it aims at"),
    Option("mirostat_eta", float, "X", "how fast it learns"),
    Option("adaptive_target", float, "P", "favours tokens of about this probability; -1: off"),
    Option("adaptive_decay", float, "X", "how long it remembers"),
    Option("infill", bool, "", "for filling in the middle: ends where that is likely"),
]
ENGINE = [
    Option("n_ctx", int, "N", "tokens that each request may use, prompt and answer"),
    Option("n_seq_max", int, "N", "requests computed at the same time"),
    Option("n_batch", int, "N", "tokens in one step at most"),
    Option("n_ubatch", int, "N", "tokens computed in one piece at most"),
    Option("n_threads", int, "N", "CPU threads while one request runs"),
    Option("n_threads_batch", int, "N", "CPU threads while several run, and for prompts"),
]
MODEL = [Option("n_gpu_layers", int, "N", "layers computed on the GPU; -1: all")]


def add_options(
    parser: argparse.ArgumentParser, title: str, options: list[Option], defaults: Mapping[str, Any]
) -> None:
    """Add `options` as a group of the help, with the library's `defaults` written beside them."""
    group = parser.add_argument_group(title)
    for option in options:
        default = defaults.get(option.name)
        shown = "" if option.read is bool or option.repeats or default is None else f" ({default})"
        # An option that was not given leaves no attribute, so that the library's own default holds.
        if option.read is bool:
            group.add_argument(option.flag, action="store_true", default=argparse.SUPPRESS, help=option.help)
            continue
        group.add_argument(
            option.flag,
            type=option.read,
            metavar=option.metavar,
            action="append" if option.repeats else "store",
            default=argparse.SUPPRESS,
            help=option.help + shown,
        )


def given(args: argparse.Namespace, options: list[Option]) -> dict[str, Any]:
    """The options that were given, as keyword arguments."""
    values = {}
    for option in options:
        if hasattr(args, option.name):
            value = getattr(args, option.name)
            values[option.name] = tuple(value) if option.repeats else value
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return values
