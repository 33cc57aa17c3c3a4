"""Changes of a solution, one at a time, made by a program. No check may praise such a changed function."""

import ast
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import wraps

import torch

from helpers.practice.engine import compiled

OPERATORS = ((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod), (ast.And, ast.Or))
COMPARISONS = ((ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq))
COMPARISONS += ((ast.In, ast.NotIn), (ast.Is, ast.IsNot))
OTHER = {one: other for pair in OPERATORS + COMPARISONS for one, other in (pair, pair[::-1])}
LARGE = 64  # a result is doubled if it is above this, or is a tensor of more numbers


def changed(function: Callable, most: int, seed: int) -> Iterator[tuple[str, Callable]]:
    """(description, changed function) for at most `most` changes: random ones, and last `doubled`."""
    chance = random.Random(seed)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    ways = list(_ways(tree))
    for at, said, change in chance.sample(ways, min(most - 1, len(ways))):
        copied = deepcopy(tree)
        change(list(ast.walk(copied))[at])
        yield f"line {said}", compiled(ast.unparse(ast.fix_missing_locations(copied)), function)
    yield f"doubled where it is larger than {LARGE}", doubled(function)


def doubled(function: Callable) -> Callable:
    """The function, with a large result doubled; if it returns None, a large first tensor is doubled."""

    def twice(value):
        if isinstance(value, torch.Tensor):
            return value * 2 if value.numel() > LARGE else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(twice, value))
        if isinstance(value, dict):
            return {name: twice(one) for name, one in value.items()}
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value * 2 if is_number and value > LARGE else value

    @wraps(function)
    def changed(*arguments):
        result = function(*arguments)
        if result is None and isinstance(arguments[0], torch.Tensor) and arguments[0].numel() > LARGE:
            with torch.no_grad():
                arguments[0].mul_(2)
        return twice(result)

    return changed


def _ways(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[ast.AST], None]]]:
    """(number of the node in the walk, description, a function that changes the node in place), for each."""
    for at, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node):
            code = ast.unparse(node).splitlines()[0][:60]
            yield at, f"{getattr(node, 'lineno', 1)}: {what} in {code}", change


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable]]:
    """(description, a function that changes the node in place), for each change of one node."""
    match node:
        case ast.Constant(value=bool() as value):
            yield f"{value} turned", lambda one: setattr(one, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield f"{value} + 1", lambda one: setattr(one, "value", value + 1)
            if value:
                yield f"{value} to 0", lambda one: setattr(one, "value", type(value)(0))
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            yield "another operator", lambda one: setattr(one, "op", OTHER[type(op)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield "the sign turned", lambda one: setattr(one, "op", ast.UAdd())
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield "turned", lambda one: setattr(one, "ops", [OTHER[type(op)]()])
        case ast.Call(args=args, keywords=keywords):
            if len(args) + len(keywords) > 1 or args and not keywords:
                last = "keywords" if keywords else "args"
                yield "the last argument left out", lambda one: getattr(one, last).pop()
        case ast.Subscript(slice=ast.Slice()):
            yield "a slice shortened", _shorten
    for field in ("body", "orelse"):
        lines = getattr(node, field, None)
        if isinstance(lines, list) and not isinstance(node, ast.Module):
            for place, line in enumerate(lines):
                if not isinstance(line, (ast.FunctionDef, ast.Pass)) and not _is_docstring(line):
                    yield f"left out: {ast.unparse(line).splitlines()[0][:60]}", _without(field, place)


def _shorten(node: ast.Subscript) -> None:
    """By one, at its end."""
    upper = node.slice.upper
    one = ast.Constant(1)
    node.slice.upper = ast.UnaryOp(ast.USub(), one) if upper is None else ast.BinOp(upper, ast.Sub(), one)


def _without(field: str, place: int) -> Callable[[ast.AST], None]:
    return lambda node: getattr(node, field).__setitem__(place, ast.Pass())


def _is_docstring(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
