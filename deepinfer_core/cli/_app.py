"""The command group with lazily imported commands, and the way errors become messages and exit codes."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import deepinfer_core.cli
from deepinfer_core.errors import DeepInferError

FIRST = ("generate", "batch", "checkpoint", "config", "backends", "doctor")
"""Commands that `--help` lists first; the others follow by name."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Errors are printed to stderr, with a traceback only after `--debug`."""
    debug, arguments = _take_debug(arguments)
    try:
        _root()(args=list(arguments), prog_name="deepinfer", obj=debug)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except DeepInferError as error:
        return _report(f"error: {error}", error.exit_code, debug)
    except BrokenPipeError:
        return 1  # the reader of our output went away; nothing is left to say to it
    except Exception as error:  # noqa: BLE001 the last line of defence: a defect becomes one line and exit code 1
        text = f"internal error: {type(error).__name__}: {error}\nThis is a defect. `--debug` shows where; please report it."
        return _report(text, 1, debug)
    return 0


def command_names() -> list[str]:
    """Every command that is there."""
    modules = {module.name.replace("_", "-") for module in pkgutil.iter_modules(deepinfer_core.cli.__path__) if module.name[0] != "_"}
    return [name for name in FIRST if name in modules] + sorted(modules.difference(FIRST))


class _Group(TyperGroup):
    """Finds commands by module name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return command_names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _LazyCommand(cmd_name) if cmd_name in command_names() else None


class _LazyCommand(TyperCommand):
    """Stands for a command until it is run; knows its help line from the source text alone."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=_help_line(name))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return _load(str(self.name)).make_context(info_name, args, parent=parent, **extra)


def _load(name: str) -> Any:
    module = importlib.import_module(f"deepinfer_core.cli.{name.replace('-', '_')}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(module.command)
    return typer.main.get_command(app)


def _help_line(name: str) -> str:
    path = Path(deepinfer_core.cli.__path__[0]) / f"{name.replace('-', '_')}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n")[0]


def _root() -> Any:
    app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback()
    def root(
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
    ) -> None:
        """DeepSeek-V4.1-Flash on whatever hardware there is.

        Example: deepinfer generate "Once upon a time" --backend cpu_ref
        """

    return typer.main.get_command(app)


def _version(wanted: bool) -> None:
    if wanted:
        from deepinfer_core import __version__

        print(f"deepinfer-core {__version__}")
        raise typer.Exit


def _take_debug(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether `--debug` stands before a lone `--`, and the arguments without it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(options) < end, [*options, *arguments[end:]]


def _report(text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(text, file=sys.stderr)
    return code
