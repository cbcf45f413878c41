"""Templates of reference sets: ``{{u}}``, ``{{f(c='a')}}``, ``{{(i + 1) * 1000}}``; names and whole numbers, no code.

The specification takes them for Jinja's, a language in which a set could do anything. Sets use only these:
names, calls of a template with named arguments, and arithmetic on whole numbers.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from scidata.errors import UnsupportedFormatError

_PART = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_MAX_TEXT = 1 << 14  # of one URL
_MAX_EXPRESSION = 200
_MAX_GENERATED = 1 << 20
_MAX_NUMBER = 2**63
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip

_Value: TypeAlias = str | int


class Templates:
    """The templates of a set, by name.

    Raises
    ------
    UnsupportedFormatError
        They are no texts by name.
    """

    def __init__(self, raw: object, where: str) -> None:
        self._where = where
        if not isinstance(raw, dict) or not all(isinstance(v, str) and len(v) <= _MAX_TEXT for v in raw.values()):
            raise UnsupportedFormatError(f"{where}: templates must be texts of at most {_MAX_TEXT} characters by name")
        self._texts: dict[str, str] = raw

    def fill(self, text: str, values: Mapping[str, _Value] | None = None) -> str:
        """Return a text with the expressions in ``{{ }}`` evaluated; ``values`` are the variables of a generator."""
        if "{{" not in text:
            return text
        filled = _PART.sub(lambda found: str(self._evaluate(found[1], values or {})), text)
        if len(filled) > _MAX_TEXT:
            raise self._error(text[:80], f"gives more than {_MAX_TEXT} characters")
        return filled

    def _error(self, text: str, why: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(f"{self._where}: template {text!r} {why}; write the references out")

    def _evaluate(self, text: str, values: Mapping[str, _Value]) -> _Value:
        if len(text) > _MAX_EXPRESSION:
            raise self._error(text[:80], "is too long")
        try:
            return self._value(ast.parse(text.strip(), mode="eval").body, values)
        except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError, ZeroDivisionError):
            raise self._error(text, "is no name, call or arithmetic") from None

    def _value(self, node: ast.expr, values: Mapping[str, _Value]) -> _Value:
        match node:
            case ast.Constant(value=str() | int() as value) if not isinstance(value, bool):
                return value
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.Name(id=name) if "{{" not in self._texts.get(name, "{{"):
                return self._texts[name]
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in self._texts:
                given = {k.arg: self._value(k.value, values) for k in keywords if k.arg is not None}
                return _PART.sub(lambda found: str(given[found[1].strip()]), self._texts[name])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, values)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                found = _OPERATIONS[type(op)](self._number(left, values), self._number(right, values))
                if abs(found) < _MAX_NUMBER:
                    return found
        raise ValueError(node)

    def _number(self, node: ast.expr, values: Mapping[str, _Value]) -> int:
        value = self._value(node, values)
        if not isinstance(value, int):
            raise ValueError(value)
        return value

    def generated(self, entries: object) -> Iterator[tuple[str, list[Any]]]:
        """Yield the keys and references that the generators of a set (``gen``) stand for.

        Raises
        ------
        UnsupportedFormatError
            A generator that is not understood, or more references than any set has.
        """
        total = 0
        for entry in entries if isinstance(entries, list) else [entries]:
            texts = {n: entry.get(n) for n in ("key", "url", "offset", "length")} if isinstance(entry, dict) else {}
            dimensions = entry.get("dimensions") if isinstance(entry, dict) else None
            present = {n: v for n, v in texts.items() if v is not None}
            if (
                not isinstance(dimensions, dict)
                or not {"key", "url"} <= present.keys()
                or ("offset" in present) != ("length" in present)
                or not all(isinstance(v, str | int) for v in present.values())
            ):
                raise UnsupportedFormatError(f"{self._where}: generator {str(entry)[:200]} is not understood")
            steps = {str(name): self._steps(values) for name, values in dimensions.items()}
            total += math.prod(map(len, steps.values()))
            if total > _MAX_GENERATED:
                raise UnsupportedFormatError(
                    f"{self._where}: generators of more than {_MAX_GENERATED} references; write the set as Parquet"
                )
            for values in itertools.product(*steps.values()):
                at: dict[str, _Value] = dict(zip(steps, values, strict=True))
                filled = {name: self.fill(str(text), at) for name, text in present.items()}
                where = [self._whole(filled[n]) for n in ("offset", "length") if n in filled]
                yield filled["key"], [filled["url"], *where]

    def _whole(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._error(text[:80], "should give a whole number") from None

    def _steps(self, values: object) -> Sequence[_Value]:
        if isinstance(values, list) and all(isinstance(v, str | int) for v in values):
            return values
        if isinstance(values, dict):
            numbers = [values.get("start", 0), values.get("stop"), values.get("step", 1)]
            if all(isinstance(n, int) and abs(n) < 2**31 for n in numbers) and numbers[2]:
                return range(*numbers)
        raise UnsupportedFormatError(f"{self._where}: a generator's dimension {str(values)[:80]} is not understood")
