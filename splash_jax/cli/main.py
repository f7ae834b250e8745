"""`splash`: the commands and how they start and end."""

from typing import Annotated

import typer

from splash_jax.cli.calibrate import calibrate
from splash_jax.cli.demo import demo
from splash_jax.cli.generate import generate
from splash_jax.cli.plan import plan
from splash_jax.cli.preflight import preflight
from splash_jax.cli.process import command
from splash_jax.cli.simulate import simulate

EXAMPLES = """
\b
Examples:
  splash demo
  splash generate small --prompt "The river" --num-devices 4 --switch 8:dp
  splash plan small -T 8 --src tp --dst dp
"""

app = typer.Typer(
    name="splash",
    help="LLM inference whose attention layout (tp, dp, cp, dop, dcp, rep) is switched while requests run.",
    epilog=EXAMPLES,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog='\b\nExample:\n  splash generate small --chat --prompt "What is gold?" --max-tokens 40')(generate)
app.command(
    epilog="\b\nExamples:\n  splash plan small -T 8 --tokens 40,100,300"
    "\n  splash plan small --mesh node=2,chip=4 --layouts"
)(plan)
app.command(epilog="\b\nExample:\n  splash preflight deepseek-v3.2 --hardware h200 -T 8 --batch 16 --context 131072")(
    preflight
)
app.command(epilog="\b\nExample:\n  splash calibrate small -T 8 --name here")(calibrate)
app.command(
    epilog="\b\nExamples:\n  splash simulate deepseek-v3.2 --dtype float8 --traffic rollout --plot run.png"
    "\n  splash simulate deepseek-v3.2 --dtype float8 --traffic azure:trace.csv --requests 5000 --groups 4 --workers 2"
)(simulate)
app.command(epilog="\b\nExample:\n  splash demo --out /tmp/splash_demo")(demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        from splash_jax import __version__

        typer.echo(f"splash {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM inference whose attention layout (tp, dp, cp, dop, dcp, rep) is switched while requests run."""


def run(arguments: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 an error in one line on stderr, 2 a usage error."""
    with command():
        app(arguments, prog_name="splash")


if __name__ == "__main__":
    run()
