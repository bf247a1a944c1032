"""Which Python a kernel may be written in. NKI has had two front ends: up to 0.6 one that parses a subset of Python,
from 0.7 one that traces it. A simulator takes all of Python; this finds, in the source, what one of the two does not
take or takes in another meaning. It sees names, not values: it misses what is hidden behind them.
"""

import ast
import inspect
from dataclasses import dataclass

from ringtide.kernels.nki.simulator.errors import LintError

_TENSORS = {"ndarray", "zeros", "ones", "full", "zeros_like", "empty_like", "load", "load_transpose2d", "matmul"}
_MUTATORS = {"append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "add", "discard", "sort"}
_STATEMENTS = {
    ast.Try: ("try", "errors are not caught in a kernel: test beforehand"),
    ast.TryStar: ("try", "errors are not caught in a kernel: test beforehand"),
    ast.Yield: ("generator", "no generators: a loop, or a list"),
    ast.YieldFrom: ("generator", "no generators: a loop, or a list"),
    ast.GeneratorExp: ("generator", "no generator expressions: a list"),
    ast.Global: ("global", "a kernel changes nothing outside: return it"),
    ast.Nonlocal: ("global", "a kernel changes nothing outside: return it"),
    ast.AsyncFunctionDef: ("async", "no async"),
    ast.Await: ("async", "no async"),
}


@dataclass(frozen=True)
class Finding:
    """A place in a kernel that one of the front ends does not take."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def check(kernel) -> list:
    """Findings in a kernel (a function, or what `jit` made of it) and in the functions of its file that it reaches, by
    name or in a table of them.

    Rules: keyword-only, is, try, generator, global, async, mutation (of what the function did not make), while and
    branch (on registers or tensors), late-binding (of a loop's variable).
    """
    function = inspect.unwrap(kernel)
    file = inspect.getsourcefile(function)
    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    return check_source(tree, function.__name__, file)


def check_source(tree, name, file="<kernel>") -> list:
    """`check` on a parsed module. Raises LintError."""
    functions = {x.name: x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    top = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    for x in tree.body:
        if isinstance(x, ast.Assign):
            top |= {target.id: x.value for target in x.targets if isinstance(target, ast.Name)}
    if name not in functions:
        raise LintError(f"lint: {file} has no `def {name}`: it reads kernels that are functions of a file")
    todo, seen, found = [functions[name]], set(), []
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            found += _Function(file, node).findings if isinstance(node, ast.FunctionDef) else ()
            todo += [top[x.id] for x in ast.walk(node) if isinstance(x, ast.Name) and x.id in top]
    return sorted(found, key=lambda x: x.line)


class _Function(ast.NodeVisitor):
    """Findings in one function and those defined inside it."""

    def __init__(self, file, node):
        self.file, self.findings, self.loops = file, [], []
        self.local = _parameters(node) | _assigned(node)
        self.registers, self.tensors = _made_by(node, ("register_alloc",)), _made_by(node, _TENSORS)
        self._signature(node)
        for x in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(x)

    def _say(self, node, rule, text):
        self.findings.append(Finding(self.file, node.lineno, rule, text))

    def _signature(self, node):
        if node.args.kwonlyargs:
            self._say(node, "keyword-only", f"argument {node.args.kwonlyargs[0].arg} after *: plain arguments")

    def visit(self, node):
        if type(node) in _STATEMENTS:
            self._say(node, *_STATEMENTS[type(node)])
        return super().visit(node)

    def visit_FunctionDef(self, node):
        self._captures(node)
        self.findings += _Function(self.file, node).findings

    def visit_Lambda(self, node):
        self.visit_FunctionDef(node)

    def _captures(self, node):
        """A function made in a loop that reads the loop's variable sees its last value, or, traced, this one."""
        own = _parameters(node) | _assigned(node)
        used = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
        for name in sorted(used.intersection(*[set().union(*self.loops)]) - own if self.loops else ()):
            self._say(
                node, "late-binding", f"a function made in a loop reads the loop's {name}: pass it as an argument"
            )

    def visit_For(self, node):
        self.visit(node.iter)
        self.loops.append({x.id for x in ast.walk(node.target) if isinstance(x, ast.Name)})
        for x in (*node.body, *node.orelse):
            self.visit(x)
        self.loops.pop()

    def visit_Compare(self, node):
        sides = [node.left, *node.comparators]
        for i, op in enumerate(node.ops):
            if isinstance(op, ast.Is | ast.IsNot) and not any(isinstance(x, ast.Constant) for x in sides[i : i + 2]):
                self._say(node, "is", "`is` only with None, True, False: compare with ==")
        self.generic_visit(node)

    def visit_While(self, node):
        if names := self._names(node.test) & self.registers:
            self._say(node, "while", f"while on register {min(names)}: nl.while_loop")
        elif names := self._values(node.test):
            self._say(node, "while", f"while on tensor {min(names)}: nl.while_loop on a register")
        self.generic_visit(node)

    def _branch(self, node):
        if names := (self._names(node.test) & self.registers) | self._values(node.test):
            self._say(
                node, "branch", f"a branch on {min(names)}, whose value the compiler does not know: select by a mask"
            )
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_Assert = _branch

    def _names(self, test):
        return {x.id for x in ast.walk(test) if isinstance(x, ast.Name)}

    def _values(self, test):
        """Tensors whose content a test looks at: the test itself, or an operand of its comparisons and and/or/not."""
        if isinstance(test, ast.BoolOp):
            return set().union(*map(self._values, test.values))
        if isinstance(test, ast.UnaryOp):
            return self._values(test.operand)
        if isinstance(test, ast.Compare):
            sides = test.left, *test.comparators
            none = [x for x in sides if isinstance(x, ast.Constant) and x.value is None]
            if none or any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in test.ops):
                return set()
            return set().union(*map(self._values, sides))
        if isinstance(test, ast.Subscript):
            return self._values(test.value)
        return {test.id} & self.tensors if isinstance(test, ast.Name) else set()

    def visit_Assign(self, node):
        for target in node.targets:
            self._target(target)
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self._target(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node):
        for target in node.targets:
            self._target(target)

    def _target(self, target):
        """An assignment into an object: this function must have made it, or been given it."""
        if isinstance(target, ast.Tuple | ast.List):
            for x in target.elts:
                self._target(x)
        elif isinstance(target, ast.Subscript | ast.Attribute):
            self._mutates(target, _root(target))

    def visit_Call(self, node):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            root = _root(node.func)
            if root is not None and not self._is_module(node.func):
                self._mutates(node, root)
        self.generic_visit(node)

    def _is_module(self, attribute):
        return isinstance(attribute.value, ast.Name) and attribute.value.id in ("nl", "nisa", "nki", "np")

    def _mutates(self, node, name):
        if name is not None and name not in self.local:
            self._say(
                node, "mutation", f"changes {name}, which the function has not made: pass it, or return the change"
            )


def _root(node):
    """The name that a chain of attributes and subscripts begins with, or None."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _parameters(node):
    a = node.args
    every = (*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x is not None))
    return {x.arg for x in every}


def _inside(node):
    """All nodes of a function, without those of functions in it."""
    todo = list(node.body) if isinstance(node.body, list) else [node.body]
    while todo:
        x = todo.pop()
        yield x
        if not isinstance(x, ast.FunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(x)


def _assigned(node):
    stored = {x.id for x in _inside(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return stored | {x.name for x in _inside(node) if isinstance(x, ast.FunctionDef)}


def _made_by(node, calls):
    """Names that are assigned what one of these functions returned."""
    made = set()
    for x in _inside(node):
        if isinstance(x, ast.Assign) and isinstance(x.value, ast.Call):
            f = x.value.func
            called = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", None)
            if called in calls:
                made |= {t.id for t in x.targets if isinstance(t, ast.Name)}
    return made
