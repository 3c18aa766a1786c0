"""Rewrites the syntax tree of a chat template so that each operation whose cost depends on data is counted.

    a ~ b          a | !concat(b)              x[a:b]     x | !slice(a, b)
    a < b          a | !compare("lt", b)       {k: v}     {k | !key: v}
    for x in y     for x in y | !iterate(w)    macro, long branches     begin with !spend(w)

Filters, tests, calls, arithmetic and output are counted by the sandbox and stay as they are. All other operations take
constant time and memory; their number is fixed by the text between two points that are counted, and w is their weight.
The names begin with `!`, so that a template cannot use them. Kinds of nodes that are not listed here are rejected.
"""

from collections.abc import Iterable

from jinja2 import nodes
from jinja2.exceptions import TemplateAssertionError
from jinja2.visitor import NodeTransformer

_NODE = 8
"""Units per evaluation of a node of the tree."""
_ITERATION = 32
_LONG = 256
"""Weight above which a branch is counted only if it is taken."""
_MAX_BITS = 64
_SPEND = "!spend"
_KINDS = frozenset(
    {
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock),
        *(nodes.FilterBlock, nodes.With, nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Break, nodes.Continue),
        *(nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword),
        *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
        *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos),
        *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
    }
)


def metered(template: nodes.Template) -> nodes.Template:
    """Return the tree with all operations of data-dependent cost counted.

    Raises:
        TemplateAssertionError: the template has an unsupported statement.
    """
    rewritten = _Rewriter().visit(template)
    assert isinstance(rewritten, nodes.Template)
    rewritten.body.insert(0, _spend(_weight(rewritten.body), rewritten))
    assert template.environment is not None
    rewritten.set_environment(template.environment)
    return rewritten


class _Rewriter(NodeTransformer):
    def visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        if type(node) not in _KINDS:
            raise TemplateAssertionError(f"{type(node).__name__} is not supported", node.lineno)
        self.generic_visit(node)
        rewrite = getattr(self, f"_{type(node).__name__}", None)
        rewritten: nodes.Node = node if rewrite is None else rewrite(node)
        return rewritten

    def _Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802  name of the node
        if isinstance(node.value, int) and node.value.bit_length() > _MAX_BITS:
            raise TemplateAssertionError(f"an integer has more than {_MAX_BITS} bits", node.lineno)
        return node

    def _Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return _filter(_expression(node.nodes[0]), "!concat", node.nodes[1:])

    def _Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        if len(node.ops) == 1 and _is_short(node.expr, node.ops[0]):
            return node
        arguments: list[nodes.Expr] = []
        for operand in node.ops:
            arguments += [nodes.Const(operand.op), operand.expr]
        return _filter(node.expr, "!compare", arguments)

    def _Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(_expression(node.node), "!slice", [end or nodes.Const(None) for end in ends])

    def _Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        if not isinstance(node.key, nodes.Const):
            node.key = _filter(_expression(node.key), "!key", [])
        return node

    def _For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        if node.recursive:
            raise TemplateAssertionError("recursive loops are not supported", node.lineno)
        each = _ITERATION + _weight([*node.body, node.target, *([node.test] if node.test else [])])
        node.iter = _filter(_expression(node.iter), "!iterate", [nodes.Const(each)])
        node.else_ = _counted(node.else_)
        return node

    def _If(self, node: nodes.If) -> nodes.Node:  # noqa: N802
        node.body, node.else_ = _counted(node.body), _counted(node.else_)
        return node

    def _Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        node.body.insert(0, _spend(_weight([*node.args, *node.defaults, *node.body]), node))
        return node

    def _CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        node.body.insert(0, _spend(_weight([*node.args, *node.defaults, *node.body]), node))
        return node


def _expression(node: nodes.Node) -> nodes.Expr:
    assert isinstance(node, nodes.Expr)
    return node


def _filter(value: nodes.Expr, name: str, arguments: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, arguments, [], None, None).set_lineno(value.lineno)  # type: ignore[return-value]


def _spend(weight: int, where: nodes.Node) -> nodes.ExprStmt:
    statement = nodes.ExprStmt(_filter(nodes.Const(weight), _SPEND, []))
    return statement.set_lineno(where.lineno)  # type: ignore[return-value]


def _counted(body: list[nodes.Node]) -> list[nodes.Node]:
    """Return a branch that counts its own weight if it is long."""
    weight = _weight(body)
    return [_spend(weight, body[0]), *body] if weight > _LONG else body


def _is_short(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Return whether the cost of a comparison is bounded by the length of its constants."""
    right = operand.expr
    if operand.op in ("eq", "ne"):
        return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)
    return (
        operand.op in ("in", "notin")
        and isinstance(right, nodes.List | nodes.Tuple)
        and all(isinstance(item, nodes.Const) for item in right.items)
    )


def _weight(parts: Iterable[nodes.Node]) -> int:
    """Return the units of one evaluation, without the parts that count themselves when they begin."""
    total, left = 0, list(parts)
    while left:
        node = left.pop()
        total += _NODE + (len(node.data) if isinstance(node, nodes.TemplateData) else 0)
        for name in node.fields:
            value = getattr(node, name)
            if isinstance(value, nodes.Node):
                left.append(value)
            elif isinstance(value, list) and not _is_counted(node, name, value):
                left += (item for item in value if isinstance(item, nodes.Node))
    return total


def _is_counted(node: nodes.Node, name: str, body: list[object]) -> bool:
    if isinstance(node, nodes.For) and name == "body":
        return True
    first = body[0] if body else None
    return isinstance(first, nodes.ExprStmt) and isinstance(first.node, nodes.Filter) and first.node.name == _SPEND
