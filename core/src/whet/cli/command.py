"""The common part of all commands: how they report errors, and the arguments that name a config."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import click

from whet.errors import ConfigError, WhetError, printable

if TYPE_CHECKING:
    from whet.plugins.registry import Registry

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Utf8(click.Command):
    """A command that takes only arguments in UTF-8."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the arguments. Refuse one that is not text before it is used as a file name."""
        for argument in args:
            if any("\ud800" <= letter <= "\udfff" for letter in argument):
                raise click.UsageError(f"the argument {argument!r:.80} is not UTF-8 text")
        return super().make_context(info_name, args, parent, **extra)


class Command(Utf8):
    """A command that prints errors of whet as plain messages. `--traceback` also shows where an error came from."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        about = "Show the traceback of an error."
        self.params.append(click.Option(["--traceback"], is_flag=True, expose_value=False, callback=_keep, help=about))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error of whet ends it with exit code 1."""
        try:
            return super().invoke(ctx)
        except WhetError as error:
            if ctx.meta.get("traceback"):
                raise
            raise click.ClickException(message(error)) from error
        except BrokenPipeError:
            raise
        except (OSError, UnicodeError, RecursionError) as error:  # errors of the files and texts that the command got
            if ctx.meta.get("traceback"):
                raise
            raise click.ClickException(message(WhetError(_of_input(error)))) from error


def _of_input(error: Exception) -> str:
    """Return in plain words what is wrong with a file, a text or a nesting that no other check refused."""
    if isinstance(error, OSError):
        name = f"{str(error.filename)!r:.200}: " if error.filename else ""
        return f"{name}{error.strerror or error}; `--traceback` shows where it was needed"
    if isinstance(error, RecursionError):
        return "something is nested too deeply; `--traceback` shows what"
    return f"a text is not UTF-8: {error.reason if hasattr(error, 'reason') else error}; `--traceback` shows where"


class Group(Command, click.Group):
    """A command with plain errors and subcommands."""


def message(error: WhetError) -> str:
    """Return an error's text for the terminal. Several problems get a line each."""
    problems = error.problems if isinstance(error, ConfigError) else []
    lines = [f"{len(problems)} problems in the config", *(f"  {problem}" for problem in problems)]
    text = str(error) if len(problems) < 2 else "\n".join(lines)
    text += f"\n{error.remedy}" if isinstance(error, ConfigError) and error.remedy else ""
    return printable(text)


def config_arguments(function: Decorated) -> Decorated:
    """Add the arguments CONFIG and OVERRIDES to a command. An override is `key.path=value`."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
    return click.argument("config", type=click.Path())(overrides(function))


def say(text: str) -> None:
    """Print progress for the user on stderr. A closed stderr does not make the command fail."""
    with suppress(OSError):
        click.echo(text, err=True)


def warn_of_broken(registry: "Registry") -> None:
    """Print the plugins that cannot be used on stderr."""
    for broken in registry.broken:
        say(f"warning: not usable: {broken}")


def _keep(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    ctx.meta["traceback"] = value
