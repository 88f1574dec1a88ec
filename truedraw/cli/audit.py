"""truedraw audit: whether an engine really samples from its target."""

from __future__ import annotations

import typer

from truedraw.cli.audit_model import audit_model

audit_app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find out whether an engine really samples from its target.",
)
audit_app.command("model")(audit_model)
