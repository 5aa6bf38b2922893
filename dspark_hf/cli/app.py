"""The `dspark-hf` command: every subcommand by name, and errors as one line."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from dspark_hf.cli.bench import bench_app
from dspark_hf.cli.calibrate import calibrate
from dspark_hf.cli.convert import convert
from dspark_hf.cli.demo import demo
from dspark_hf.cli.doctor import doctor
from dspark_hf.cli.eval import eval_app
from dspark_hf.cli.generate import generate
from dspark_hf.cli.serve import serve
from dspark_hf.cli.train import train_app
from dspark_hf.cli.verify import verify
from dspark_hf.errors import DSparkError

USAGE_ERROR = 2
"""Exit code when the caller can put it right."""


class _Group(TyperGroup):
    """Ends a command with one red line where this package refuses something on purpose."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except DSparkError as error:
            line = " ".join(str(error).split())
            Console(stderr=True).print(Text(f"Error: {line}", "red"), soft_wrap=True)
            raise typer.Exit(USAGE_ERROR) from error


app = typer.Typer(
    name="dspark-hf",
    cls=_Group,
    help="Hugging Face models that generate faster, with the same text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(generate)
app.command()(serve)
app.command()(demo)
app.command()(doctor)
app.command()(verify)
app.command()(convert)
app.command()(calibrate)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(eval_app, name="eval")


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
