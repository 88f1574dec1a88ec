"""The entry point: every failure becomes one line on standard error and an exit status.

0 done, 1 a run that failed, 2 usage, 130 Ctrl-C; audits have a 3 of their own.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer

from truedraw.cli.audit import audit_app
from truedraw.cli.bench import bench
from truedraw.cli.chat import chat
from truedraw.cli.explain import explain
from truedraw.cli.generate import generate
from truedraw.cli.load import load
from truedraw.cli.plan import plan
from truedraw.cli.profile import profile
from truedraw.cli.prove import prove
from truedraw.cli.serve import serve
from truedraw.cli.train import train_app
from truedraw.errors import TruedrawError, UsageError

# Typer 0.29 carries Click inside, earlier ones import it: either way this is the base of its usage errors
_ClickException: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding with exactly the law of the target.",
)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(prove)
app.command()(explain)
app.command()(plan)
app.command()(bench)
app.command()(profile)
app.command()(load)
app.add_typer(audit_app, name="audit")
app.add_typer(train_app, name="train")


def main() -> None:
    """Run a command and exit with its status."""
    sys.exit(run())


def run() -> int:
    if sys.stderr is None:  # closed: what belongs there must not land on standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    if sys.stdout is None:
        complain("standard output is closed: there is nowhere to write the text to")
        return 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to lose the text
    try:
        # not app(): that answers a closed pipe by itself, with silence
        command = typer.main.get_command(app)
        with command.make_context("truedraw", sys.argv[1:]) as context:
            status = command.invoke(context)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except typer.Exit as done:
        return done.exit_code
    except _ClickException as error:
        complain(_usage(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return 130
    except BrokenPipeError:
        # whatever is still buffered has nowhere to go: keep the interpreter from trying at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain("standard output was closed: stopped")
        return 1
    except UsageError as error:
        complain(str(error))
        return 2
    except TruedrawError as error:
        complain(str(error))
        return 1
    except OSError as error:
        complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1
    except MemoryError:
        complain("out of memory: a smaller --context, fewer --slots or a smaller model is needed")
        return 1


def _usage(error: Any) -> str:
    """Typer's message, and the value as typed, which it does not always tell."""
    message: str = error.format_message()
    details = getattr(error.__cause__, "errors", None)
    given = details()[0].get("input") if details is not None else None
    return message if given is None or repr(given) in message else f"{message}: {given!r} was given"


def complain(message: str) -> None:
    """One line on standard error."""
    if message:  # empty where the help was shown instead
        print("truedraw: " + " ".join(message.split()), file=sys.stderr)
