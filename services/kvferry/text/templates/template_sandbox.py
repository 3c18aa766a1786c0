"""The environment in which chat templates run: Jinja's sandbox, with a budget of work for each rendering.

Everything a template can do is one of the following, and no other functions, filters, tests or methods are available:

    operations of constant cost     counted by `template_program` before they run, per loop iteration and macro call
    filters, tests, methods,        each takes its cost from the budget before it runs (`template_costs`)
    arithmetic, comparison, output

Lists that Jinja's filters return lazily are built at once, so that their cost is counted where it arises.
"""

import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import escape

from kvferry.core.errors import InvalidRequest
from kvferry.text.templates import template_costs as costs
from kvferry.text.templates.template_costs import CALL, ITEM, Budget, limited

_NO_BUDGET = Budget(0)
_DATE = re.compile(r"(?:[^%]|%-?[A-Za-z%])*", re.DOTALL)
_MAX_DATE = 100
"""Maximum number of characters of the format of a date."""
_MACRO = 256
"""Units per call of a macro, in addition to those of its body."""
_METHODS: Mapping[type, Mapping[str, costs.Cost]] = {
    str: costs.TEXT_METHODS,
    dict: costs.MAPPING_METHODS,
    list: costs.LIST_METHODS,
    tuple: costs.LIST_METHODS,
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], object]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "lteq": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "gteq": lambda a, b: a >= b,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}


class BudgetContext(Context):
    """The variables of one rendering, and its budget."""

    budget: Budget = _NO_BUDGET


class _Format:
    """The method `format` of a string; `Sandbox.call` counts and calls it."""

    def __init__(self, template: str) -> None:
        self.template = template


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. The caller sets `budget` on the context before it starts a rendering."""

    context_class = BudgetContext
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, now: Callable[[], datetime] | None = None) -> None:
        """
        Args:
            now: clock of the function `strftime_now`; without it, templates have no such function.
        """
        # Without the optimizer, which would run filters on constants at compile time.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,
            finalize=_finalize,
        )
        self.globals: dict[str, object] = {
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "range": self.globals["range"],
        }
        if now is not None:
            self.globals["strftime_now"] = lambda form: _date(now(), form)
        own: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(("e", "escape"), _escape),
            **dict.fromkeys(("safe", "string"), str),
            "tojson": _to_json,
        }
        given: dict[str, Callable[..., Any]] = {**self.filters, **own}
        self.filters = {name: _counted(given[name], cost) for name, cost in costs.FILTERS.items()}
        self.filters |= _INTERNAL
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: _counted(tests[name], cost) for name, cost in costs.TESTS.items()}

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a filter that a template names by a string, as `map` does.

        Raises:
            SecurityError: the filter is not supported in templates.
        """
        if name in _INTERNAL:
            raise jinja2.exceptions.SecurityError(f"filter {name!r} is not supported")
        return super().call_filter(name, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "+" and type(left) is str and type(right) is str:
            budget.spend(CALL + len(left) + len(right))
            return left + right
        budget.spend(CALL)
        if operator == "**":
            raise jinja2.exceptions.SecurityError("exponentiation is not supported")
        if operator == "*":
            costs.multiply(budget, left, right)
        elif operator == "+":
            costs.add(budget, left, right)
        elif operator == "%" and isinstance(left, str):
            costs.remainder(budget, left, right)
        else:
            costs.number(left)
            costs.number(right)
        return limited(self.binop_table[operator](left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not costs.is_plain(argument):
            raise jinja2.exceptions.SecurityError(f"a {type(argument).__name__} cannot be a key")
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an attribute that begins with an underscore, as transformers does; Jinja's default is empty text.

        Raises:
            SecurityError: always.
        """
        raise jinja2.exceptions.SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} is not accessible")

    def wrap_str_format(self, value: Any) -> Any:
        is_format = isinstance(value, types.BuiltinMethodType) and value.__name__ == "format"
        return _Format(value.__self__) if is_format and isinstance(value.__self__, str) else None

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.spend(CALL + ITEM * (len(args) + len(kwargs)))
        if isinstance(obj, types.BuiltinMethodType):
            cost = _METHODS.get(type(obj.__self__), {}).get(obj.__name__)
            if cost is None:
                raise jinja2.exceptions.SecurityError(f"method {obj.__name__!r} is not supported")
            named = {name: value for name, value in kwargs.items() if name != "_loop_vars"}
            cost(budget, obj.__self__, *args, **named)
            return limited(obj(*args, **named))
        if isinstance(obj, _Format):
            kwargs.pop("_loop_vars", None)
            costs.format_text(budget, obj.template, *args, **kwargs)
            return SandboxedFormatter(self).vformat(obj.template, args, kwargs)
        if obj is dict or obj is Namespace:
            costs.pairs(budget, *args, **kwargs)
        elif isinstance(obj, types.MethodType) and isinstance(obj.__self__, LoopContext):
            for value in args:
                costs.read_all(budget, value)
        elif obj is self.globals["raise_exception"] or obj is self.globals.get("strftime_now"):
            for value in args:
                costs.text_of(budget, value)
        elif isinstance(obj, Macro):
            budget.spend(_MACRO)
        elif not (isinstance(obj, jinja2.Undefined) or obj is self.globals["range"]):
            raise jinja2.exceptions.SecurityError(f"a {type(obj).__name__} cannot be called")
        return super().call(context, obj, *args, **kwargs)


def _budget(context: Context) -> Budget:
    assert isinstance(context, BudgetContext)
    return context.budget


def _counted(function: Callable[..., Any], cost: costs.Cost) -> Callable[..., Any]:
    """Return a filter or test that takes its cost from the budget of the rendering before it runs."""
    kind = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    def counted(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.spend(CALL)
        cost(budget, value, *args, **kwargs)
        if kind is None:
            result = function(value, *args, **kwargs)
        else:
            first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[kind]
            result = function(first, value, *args, **kwargs)
        return list(result) if isinstance(result, Iterator) else limited(result)

    return counted


# ---------------------------------------------------------------------- calls that `template_program` inserts


@jinja2.pass_context
def _spend(context: BudgetContext, units: int) -> None:
    context.budget.spend(units)


@jinja2.pass_context
def _iterate(context: BudgetContext, values: Iterable[object], units: int) -> Iterator[object]:
    budget = context.budget
    for value in values:
        budget.spend(units)
        yield value


@jinja2.pass_context
def _concat(context: BudgetContext, *values: object) -> str:
    for value in values:
        costs.text_of(context.budget, value)
    return "".join(map(str, values))


@jinja2.pass_context
def _compare(context: BudgetContext, value: object, *operations: Any) -> object:
    result: object = True
    for operation, other in zip(operations[::2], operations[1::2], strict=True):
        costs.compare(context.budget, operation, value, other)
        result = _COMPARISONS[operation](value, other)
        if not result:
            break
        value = other
    return result


@jinja2.pass_context
def _slice(context: BudgetContext, value: Any, start: object, stop: object, step: object) -> object:
    costs.cut(context.budget, value, start, stop, step)
    return value[start:stop:step]


def _key(value: object) -> object:
    if not costs.is_plain(value):
        raise jinja2.exceptions.SecurityError(f"a {type(value).__name__} cannot be a key")
    return value


_INTERNAL: dict[str, Callable[..., Any]] = {
    "!spend": _spend,
    "!iterate": _iterate,
    "!concat": _concat,
    "!compare": _compare,
    "!slice": _slice,
    "!key": _key,
}


@jinja2.pass_context
def _finalize(context: BudgetContext, value: object) -> object:
    if type(value) is str:
        context.budget.spend(len(value))
    else:
        costs.text_of(context.budget, value)
    return value


def _raise_exception(message: object) -> NoReturn:
    raise InvalidRequest(f"the chat template rejects these messages: {str(message)[:500]}", field="messages")


def _date(moment: datetime, form: object) -> str:
    # Some systems pad a field to any width, for example with `%9999d`.
    if not isinstance(form, str) or len(form) > _MAX_DATE or _DATE.fullmatch(form) is None:
        raise InvalidRequest(
            f"the chat template uses the unsupported date format {str(form)[:100]!r}", field="messages"
        )
    return moment.strftime(form)


def _escape(value: object) -> str:
    return str(escape(value))


def _to_json(
    value: object,
    ensure_ascii: object = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: object = False,
) -> str:
    # Not Jinja's `tojson`, which escapes HTML; models were trained with plain JSON. The arguments are those of
    # transformers.
    item, key = separators if separators is not None else (None, None)
    return json.dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=None if item is None or key is None else (item, key),
        sort_keys=bool(sort_keys),
    )


class _Generation(Extension):
    """The tag `generation` of transformers, which marks what a model learns. Its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  an attribute of the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
