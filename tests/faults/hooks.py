"""What a fault can be, and how it is put into a module: while Python imports it. No file is changed.

A fault names a place, "module:function" or "module:Class.method", also "module:CONSTANT", and one hook. Hooks find what
they change by its kind and name within that function, not by text: formatting, comments and other lines do not matter.
With `nth`, the nth of those that fit is meant, counted from the top, or all of them with 0.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "TRIFORCE_FAULT"  # tells processes that tests start
OPERATORS = {"<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "==": ast.Eq, "!=": ast.NotEq, "in": ast.In,
             "not in": ast.NotIn, "is": ast.Is, "is not": ast.IsNot, "+": ast.Add, "-": ast.Sub, "*": ast.Mult,
             "/": ast.Div, "//": ast.FloorDiv, "%": ast.Mod, "**": ast.Pow, "&": ast.BitAnd, "|": ast.BitOr,
             "@": ast.MatMult, "and": ast.And, "or": ast.Or}


class Misfit(Exception):
    """A fault that does not fit the code."""


Hook = Callable[[ast.AST], None]  # edits the syntax tree of a function or of an assignment


@dataclass(frozen=True)
class Fault:
    id: str
    where: str  # module:function
    breaks: str  # what goes wrong
    hook: Hook
    tests: str  # files of tests/ without test_ and .py, and pytest's -k where few of a file's tests are meant

    @property
    def module(self) -> str:
        return "triforce." + self.where.partition(":")[0]

    @property
    def path(self) -> Path:
        return ROOT / (self.module.replace(".", "/") + ".py")


# -- hooks -------------------------------------------------------------------------------------------------------------


def result(expression: str) -> Hook:
    """The function returns an expression of what it returns, `found`."""
    return _replacing(lambda node: isinstance(node, ast.Return), lambda node: ast.Return(ast.Call(
        _parsed(f"lambda found: {expression}"), [node.value], [])), 0, "return")


def nothing(value=None) -> Hook:
    """The function does nothing."""
    return lambda function: function.body.insert(0, ast.Return(ast.Constant(value)))


def given(**changes: str) -> Hook:
    """The function gets an expression in place of an argument, for each that is named."""
    def edit(function: ast.AST) -> None:
        names = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        for name, expression in changes.items():
            if name not in names:
                raise Misfit(f"there is no argument {name}")
            function.body[:0] = ast.parse(f"{name} = {expression}").body

    return edit


def op(old: str, new: str, nth: int = 1) -> Hook:
    """An operator becomes another."""
    def places(node: ast.AST) -> Iterator[Callable]:
        if isinstance(node, ast.Compare):
            for i, one in enumerate(node.ops):
                if isinstance(one, OPERATORS[old]):
                    yield lambda i=i: node.ops.__setitem__(i, OPERATORS[new]())
        elif isinstance(getattr(node, "op", None), OPERATORS[old]):
            yield lambda: setattr(node, "op", OPERATORS[new]())

    return _editing(places, nth, f"operator {old}")


def name(old: str, new: str, nth: int = 1) -> Hook:
    """A name, or that of an attribute, becomes another: of a function that is called, or of a variable that is read."""
    def change(node: ast.AST) -> ast.AST:
        setattr(node, "id" if isinstance(node, ast.Name) else "attr", new)
        return node

    return _replacing(lambda node: getattr(node, "id", getattr(node, "attr", None)) == old
                      and isinstance(node.ctx, ast.Load), change, nth, f"name {old}")


def const(old, new, nth: int = 1) -> Hook:
    """A literal becomes another."""
    return _replacing(lambda node: isinstance(node, ast.Constant) and type(node.value) is type(old)
                      and node.value == old, lambda node: ast.Constant(new), nth, f"literal {old!r}")


def unset(target: str, nth: int = 1) -> Hook:
    """An attribute, or those that are assigned with it, keeps its value; so does a variable."""
    def fits(node: ast.AST) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        targets = [one for of in targets for one in getattr(of, "elts", [of])]
        return isinstance(node, (ast.Assign, ast.AugAssign)) and any(_called(one) == target for one in targets)

    return _statements(fits, nth, f"assignment to {target}")


def skip(function: str, nth: int = 1) -> Hook:
    """A statement that calls a function, or raises what it makes, is left out."""
    def fits(node: ast.AST) -> bool:
        called = node.value if isinstance(node, ast.Expr) else node.exc if isinstance(node, ast.Raise) else None
        return isinstance(called, ast.Call) and _called(called) == function

    return _statements(fits, nth, f"statement that calls {function}")


def bare(function: str, nth: int = 1) -> Hook:
    """Instead of x.function(...), or of function(x, ...), there is x."""
    def change(call: ast.Call) -> ast.expr:
        is_method = isinstance(call.func, ast.Attribute) and not _is_module(call.func.value)
        return call.func.value if is_method else call.args[0]

    return _replacing(lambda node: isinstance(node, ast.Call) and _called(node) == function, change, nth,
                      f"call of {function}")


def arg(function: str, which: int | str, expression: str, nth: int = 1) -> Hook:
    """An argument of a call, by number or name, becomes an expression."""
    def change(call: ast.Call) -> ast.Call:
        if isinstance(which, int):
            call.args[which] = _parsed(expression)
        else:
            call.keywords = [one for one in call.keywords if one.arg != which]
            call.keywords.append(ast.keyword(which, _parsed(expression)))
        return call

    return _replacing(lambda node: isinstance(node, ast.Call) and _called(node) == function, change, nth,
                      f"call of {function}")


def cond(mentions: str, outcome: bool, nth: int = 1) -> Hook:
    """A condition that mentions a name is always so, or never: of an `if`, or a part of it beside `and` and `or`."""
    def change(_) -> ast.expr:
        return ast.Constant(outcome)

    def edit(function: ast.AST) -> None:
        conditions = [one for node in ast.walk(function) for one in _conditions(node)]
        fits = [one for one in conditions if _mentions(one, mentions)]
        inner = {id(one) for one in fits
                 if not any(other is not one and other in ast.walk(one) for other in fits)}
        _replacing(lambda node: id(node) in inner, change, nth, f"condition with {mentions}")(function)

    return edit


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return node.ifs if isinstance(node, ast.comprehension) else []


def _mentions(node: ast.AST, name: str) -> bool:
    return any(getattr(one, "id", None) == name or getattr(one, "attr", None) == name for one in ast.walk(node))


def _called(node) -> str | None:
    """The last name of a call, or of what is assigned to."""
    node = node.func if isinstance(node, ast.Call) else node
    node = node.value if isinstance(node, ast.Subscript) else node
    return getattr(node, "attr", None) or getattr(node, "id", None)


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "math", "attention", "np")


def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _in_order(tree: ast.AST) -> list[ast.AST]:
    """All nodes, by where they begin in the text."""
    nodes = list(ast.walk(tree))
    return sorted(nodes, key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))


def _chosen(found: list, nth: int, what: str) -> list:
    if len(found) < max(nth, 1):
        raise Misfit(f"there are {len(found)} of: {what}")
    return found[nth - 1 : nth] if nth else found


def _editing(places: Callable[[ast.AST], Iterator[Callable]], nth: int, what: str) -> Hook:
    def edit(function: ast.AST) -> None:
        for change in _chosen([one for node in _in_order(function) for one in places(node)], nth, what):
            change()

    return edit


def _replacing(fits: Callable[[ast.AST], bool], change: Callable, nth: int, what: str) -> Hook:
    def edit(function: ast.AST) -> None:
        chosen = {id(node) for node in _chosen([node for node in _in_order(function) if fits(node)], nth, what)}

        class Replacing(ast.NodeTransformer):
            def visit(self, node: ast.AST) -> ast.AST:
                node = self.generic_visit(node)
                return change(node) if id(node) in chosen else node

        Replacing().visit(function)

    return edit


def _statements(fits: Callable[[ast.AST], bool], nth: int, what: str) -> Hook:
    return _replacing(fits, lambda node: ast.Pass(), nth, what)


# -- putting in --------------------------------------------------------------------------------------------------------


def faulty(fault: Fault, source: str) -> ast.Module:
    """The syntax tree of a module with a fault.

    Raises:
        Misfit: the function is gone, or there is nothing in it that the hook could change.
    """
    tree = ast.parse(source)
    node = tree
    for part in fault.where.partition(":")[2].split("."):
        node = next((one for one in ast.walk(node) if one is not node and part in _names(one)), None)
        if node is None:
            raise Misfit(f"{fault.where} is gone")
    before = ast.dump(node)
    fault.hook(node)
    if ast.dump(node) == before:
        raise Misfit("changes nothing")
    return ast.fix_missing_locations(tree)


def _names(node: ast.AST) -> list[str]:
    """Of a class, a function, or what is assigned to."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [getattr(one, "id", "") for of in targets for one in getattr(of, "elts", [of])]


class Loader(importlib.machinery.SourceFileLoader):
    """Of the module with the fault. What it compiles is not kept."""

    fault: Fault

    def get_code(self, fullname: str):
        return compile(faulty(self.fault, self.get_source(fullname)), self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, fault: Fault):
        self.fault = fault

    def find_spec(self, fullname: str, path, target=None):
        if fullname != self.fault.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Loader(fullname, spec.origin)
        spec.loader.fault = self.fault
        return spec


def install(fault: Fault) -> None:
    """This process, and those that it starts, import the module with the fault."""
    os.environ[VARIABLE] = fault.id
    sys.meta_path.insert(0, Finder(fault))


def misfits(faults: list[Fault]) -> list[str]:
    """What is wrong with a list for the code as it is, a line for each fault, which begins with its id."""
    wrong, seen = [], set()
    for fault in faults:
        try:
            if fault.id in seen:
                raise Misfit("is listed twice")
            seen.add(fault.id)
            if not fault.path.is_file():
                raise Misfit(f"{fault.module} is gone")
            faulty(fault, fault.path.read_text(encoding="utf-8"))
            gone = [file for file in files_of(fault) if not (ROOT / file).is_file()]
            if gone:
                raise Misfit(f"there is no {gone[0]}")
        except Misfit as error:
            wrong.append(f"{fault.id}: {error}")
    return wrong


def files_of(fault: Fault) -> list[str]:
    return [f"tests/test_{word}.py" for word in fault.tests.partition(" -k ")[0].split()]
