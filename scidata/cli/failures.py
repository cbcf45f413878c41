"""How commands fail: one line on stderr, with ``--json`` an object on stdout too, and the exit code."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from typing import Any

import typer
import typer.core

from scidata.core.urls import public_text
from scidata.errors import ConfigError, OutputError, SciDataError, UnknownNameError, near_matches, visible

FAILED, USAGE, INTERRUPTED = 1, 2, 130

#: What the library calls an argument that has another name in a command.
_ARGUMENTS = {"stage": {"cache_dir": "CACHE"}, "index": {"cache_dir": "--out"}}


class Group(typer.core.TyperGroup):
    """Turns expected errors into one line and the exit code, unless ``--debug`` is given."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Remember whether JSON is asked for, before anything can be wrong."""
        as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except Exception as e:
            _tell_usage(e, as_json=as_json)
            raise
        context.meta["scidata.json"] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        from scidata.cli.progress import pulse, warnings_on_stderr

        as_json = ctx.meta["scidata.json"]
        try:
            reword = lambda text: self._in_options(ctx, text)  # noqa: E731
            with pulse("at work"), warnings_on_stderr(reword):
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `scidata plan … | head`: the framework ends quietly
        except (SciDataError, OSError) as e:
            # arguments that cannot be honoured, and names that are not there, are the command's; the rest has failed
            usage = isinstance(e, ConfigError | UnknownNameError) and not isinstance(e, OutputError)
            message, code = self._in_options(ctx, _message(e)), USAGE if usage else FAILED
            if as_json:
                _print_json(e, message, code)
            if ctx.meta.get("scidata.debug"):
                raise
            from scidata.cli.output import print_error

            print_error(message)
            raise typer.Exit(code) from None
        except Exception as e:
            _tell_usage(e, as_json=as_json)
            raise
        except KeyboardInterrupt as e:
            if as_json:
                _print_json(e, "interrupted", INTERRUPTED)
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def _in_options(self, ctx: Any, message: str) -> str:
        """Return a message with arguments of the library as options of the command that runs."""
        command = self.commands.get(ctx.invoked_subcommand or "")
        options = dict(_ARGUMENTS.get(ctx.invoked_subcommand, {}))
        for each in () if command is None else command.params:
            longest = max(each.opts, key=len)
            if longest.startswith("--") and each.name:
                options[each.name] = longest
        return in_options(message, options)


def _tell_usage(error: Exception, *, as_json: bool) -> None:
    """Make messages of wrong usage, which repeat the user's words, safe to print; print them as JSON if asked for."""
    if isinstance(error, typer.Exit | typer.Abort):
        return
    if isinstance(getattr(error, "message", None), str):
        error.message = visible(public_text(error.message))  # type: ignore[attr-defined]
    if as_json:
        format_message = getattr(error, "format_message", None)
        text = str(error) if format_message is None else " ".join(format_message().split())
        _print_json(error, text, getattr(error, "exit_code", FAILED))


def _print_json(error: BaseException, message: str, code: int) -> None:
    from scidata.cli.output import print_json

    shown = " ".join(visible(public_text(message)).split())
    print_json({"error": {"type": type(error).__name__, "message": shown, "exit_code": code}})


def _message(error: BaseException) -> str:
    if not isinstance(error, OSError) or isinstance(error, SciDataError) or not error.strerror:
        return str(error) or type(error).__name__
    folder, name = os.path.split(str(error.filename))
    is_lost = isinstance(error, FileNotFoundError) and os.path.isdir(folder or ".")
    near = near_matches(name, os.listdir(folder or "."), listed=False) if is_lost else ""
    return f"{error.filename}: {error.strerror.lower()}{near}" if error.filename else error.strerror


_VALUE = r"""'[^']*'|"[^"]*"|\{[^{}]*\}|\[[^][]*\]|\([^()]*\)|[\w+-]+(?:\.\w+)*"""
_SLICE = re.compile(r"slice\(([^(),]+), ([^(),]+)(?:, None)?\)")
#: Said of a dimension, ``isel of 'level'``, or as a remedy, ``crop with isel``.
_BEFORE_DIM = ("halo", "isel", "sel", "bounds", "align", "weights")
_ALONE = ("isel", "sel", "steps", "align", "periodic", "shard")
#: What such a word may follow if it is no argument: of a URL, an attribute of a file, part of a longer name.
_NOT_AFTER = r"(?<![\w.?&/:-])(?<!attribute )"


def in_options(message: str, options: Mapping[str, str]) -> str:
    """Return a message of the library with keyword arguments as options of a command: ``{"halo": "--halo"}``."""
    if not options:
        return message
    names = "|".join(map(re.escape, sorted(options, key=len, reverse=True)))
    # a message that names the option itself, kind='grid' (--kind grid), keeps it
    given = re.compile(rf"{_NOT_AFTER}({names})=({_VALUE})?+(?!/)(?:\.\.\.|…)?(?: \((--[^()]*)\))?")
    message = given.sub(lambda found: found[3] or _typed(options[found[1]], found[2]), message)
    message = re.sub(
        rf"(^|: )({names})(?= names |: no |: field |: means nothing|: '| leaves | must be\b)",
        lambda found: found[1] + options[found[2]],
        message,
    )
    message = re.sub(rf"(^|: )({'|'.join(_BEFORE_DIM)})(?= of ')", lambda m: m[1] + options.get(m[2], m[2]), message)
    plain = [name for name in options if "_" in name]
    called = rf"\b(?:with|use|another) (?:{'|'.join(_ALONE)})|" if _ALONE else ""
    found = re.compile(rf"{_NOT_AFTER}(?:{called}{'|'.join(map(re.escape, plain)) or '(?!)'})\b(?![=./])")

    def reworded(match: re.Match[str]) -> str:
        before, _, name = match[0].rpartition(" ")
        return f"{before} {options.get(name, name)}".strip()

    return _SLICE.sub(_ends, found.sub(reworded, message))


def _ends(found: re.Match[str]) -> str:
    return ":".join("" if end == "None" else end for end in found.groups())


def _typed(option: str, value: str | None) -> str:
    if value is None or value == "True":
        return option
    value = _SLICE.sub(lambda found: repr(_ends(found)), value)
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return f"{option} {value}"
    if found is None:
        return f"no {option}"
    text = "none" if found is False else _text(found)
    return f"{option} {text}" if text else option


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        sides = {name: ":".join(map(str, item)) if isinstance(item, tuple) else item for name, item in value.items()}
        return ",".join(f"{name}={_text(item)}" for name, item in sides.items())
    if isinstance(value, list | tuple):
        return ",".join(_text(item) for item in value)
    return "" if value is ... else str(value)
