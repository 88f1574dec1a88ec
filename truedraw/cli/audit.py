"""truedraw audit: find out whether something really samples from its target. One command for each kind of thing."""

from __future__ import annotations

import typer

from truedraw.cli.audit_verifier import function, process

audit_app = typer.Typer(
    no_args_is_help=True,
    help="Find out whether an engine, a verifier or a pair of models really samples from the target.",
)
audit_app.command()(function)
audit_app.command()(process)
