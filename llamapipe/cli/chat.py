"""``llamapipe chat``: a conversation at the terminal."""

from __future__ import annotations

import argparse
import sys

import llamapipe as lp
from llamapipe.arguments import path_of
from llamapipe.cli.loading import open_engine, open_model, template_problem
from llamapipe.cli.options import (
    ENGINE,
    MODEL,
    MODEL_HELP,
    SAMPLING,
    HelpFormatter,
    UsageError,
    add_engine_options,
    add_options,
    defaults_of,
    given,
    model_path,
    template_file,
)
from llamapipe.cli.talk.conversation import Conversation
from llamapipe.cli.talk.reader import line_history
from llamapipe.cli.talk.session import Session
from llamapipe.cli.usage.texts import given_text, read_stdin, stdin_is_terminal

_DESCRIPTION = """\
Hold a conversation with a model, or answer one message. Without -m, use the bundled model. Needs the extra 'chat'.
If standard input is not a terminal and no message is given, each of its lines is a message, or a command such as
/clear; a backslash at the end continues a line, and \"\"\" begins and ends several. Standard input is not read if a
message is given."""
_EPILOG = """\
examples:
  llamapipe chat
  llamapipe chat -m model.gguf --system "Answer in one sentence."
  llamapipe chat -m model.gguf "Why is the sky blue?"
  git diff | llamapipe chat -m model.gguf --system "Review this change." -

Commands in the conversation: /clear clears it, /regen answers again, /system TEXT sets the system message, /save FILE
writes the messages as JSON, /load FILE continues from them, /help lists the commands, /bye quits. Ctrl-C stops an
answer; Ctrl-D quits."""


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "chat",
        parents=[common],
        usage="llamapipe chat [options] [MESSAGE]",
        allow_abbrev=False,
        help="hold a conversation with a model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "message", nargs="?", metavar="MESSAGE", help="answer this and exit; - reads it from stdin"
    )
    parser.add_argument("-m", "--model", type=model_path, metavar="FILE", help=MODEL_HELP)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--load", type=path_of, metavar="FILE", help="continue a conversation saved with /save"
    )
    parser.add_argument(
        "--chat-template",
        type=template_file,
        metavar="FILE",
        help="a Jinja file, instead of the model's template",
    )
    parser.add_argument(
        "--no-thinking", action="store_true", help="turn off reasoning, if the template supports it"
    )
    add_options(parser, "sampling", SAMPLING, {**defaults_of(lp.SamplingParams), "max_tokens": None})
    add_engine_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    options = given(args, SAMPLING)
    options.setdefault("max_tokens", None)
    try:
        params = lp.SamplingParams(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    conversation = _begun(args)
    message = args.message
    if message is not None:
        message = read_stdin().removesuffix("\n") if message == "-" else given_text(message)
    if message is not None and not message.strip():
        raise UsageError("the message is empty")
    if message is None and sys.stdin is None:
        raise UsageError("there is no standard input to read messages from; pass one as an argument")
    engine_options = {"n_seq_max": 1, **given(args, ENGINE)}
    with open_model(args.model, {"chat_template": args.chat_template, **given(args, MODEL)}) as model:
        _check_template(model, args.chat_template)
        with open_engine(model, engine_options) as engine:
            session = Session(engine, params, conversation, args.no_thinking)
            if message is not None:
                session.answer(message)
            elif not stdin_is_terminal():
                session.read_lines()
            else:
                with line_history():
                    session.talk()
    return 0


def _begun(args: argparse.Namespace) -> Conversation:
    """The conversation that the options begin."""
    conversation = Conversation(args.system)
    if args.load is not None:
        if args.system is not None:
            raise UsageError("--load and --system do not go together: the file has its own system message")
        try:
            conversation.load(args.load)
        except ValueError as error:
            raise UsageError(f"--load: {error}") from error
    return conversation


def _check_template(model: lp.Model, file: str | None) -> None:
    """Raises UsageError for a template that was given, InvalidRequestError for a model's own."""
    problem = template_problem(model)
    if problem is None:
        return
    if file is not None:
        raise UsageError(f"--chat-template: {problem}")
    raise lp.errors.InvalidRequestError(
        f"{problem}; give one with --chat-template FILE, or use llamapipe generate"
    )
