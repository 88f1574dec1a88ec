"""truedraw audit: find out whether something really samples from its target. One command for each kind of thing."""

from __future__ import annotations

import typer

from truedraw.cli.audit_endpoint import endpoint
from truedraw.cli.audit_model import audit_model
from truedraw.cli.audit_verifier import function, process

audit_app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find out whether an engine, a verifier or a pair of models really samples from the target.",
)
audit_app.command()(endpoint)
audit_app.command()(function)
audit_app.command()(process)
audit_app.command("model")(audit_model)
