"""The verbs around a running server: diagnose, launch, stop, logs, backends, doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from mlapatch.cli import run
from mlapatch.cli.options import AsJson


def register(app: typer.Typer) -> None:
    """Add the verbs to the application."""

    @app.command()
    def diagnose(
        log: Annotated[str, typer.Argument(metavar="LOG", help="A server's output; - reads standard input.")],
        as_json: AsJson = False,
    ) -> None:
        """Say why a server log ended as it did: cause, phase, rank, evidence, advice.

        An unknown failure is called unknown. Example: mlapatch diagnose logs/gather-cast-20261129-112636.log
        """
        from mlapatch.commands.diagnose import diagnose as command

        run(lambda: command(log=log), as_json=as_json)
