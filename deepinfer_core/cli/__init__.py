"""The `deepinfer` command. `main` is the console script.

Each command is one module of this package, found by its name: `deepinfer_core/cli/<name>.py`, whose first docstring line is the
command's line in `deepinfer --help` and which holds a function `command` or a `typer.Typer` called `app`. It is imported only when
the command runs. Modules whose names start with `_` are no commands.
"""


def main() -> None:
    """Runs the command line of this process and exits: 0 done, 1 failed, 2 wrong usage."""
    import sys

    from deepinfer_core.cli._app import run

    sys.exit(run(sys.argv[1:]))
