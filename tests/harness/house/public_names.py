"""Public names of kvferry, collected from the product itself: the generated parts of docs/public-api.md."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from textwrap import wrap
from typing import Any

import click
import yaml

from kvferry.cli.main import main as command_line
from kvferry.core import errors as core_errors
from kvferry.core.errors import KvferryError
from kvferry.core.metrics import all_metrics
from kvferry.gateway.http import admin_api
from kvferry.gateway.http.openapi.operations import OPERATIONS
from kvferry.operator.pool import names as kubernetes

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ("kvferry.client", "kvferry.engine")
"""Modules whose `__all__` is public."""
_PROTOS = ("inference", "prefill", "decode", "kv_events", "kv_transfer", "worker_admin")
_DEFINITIONS = ROOT / "charts" / "kvferry" / "files" / "crds"
_VARIABLE = re.compile(r"\bKVFERRY_[A-Z]+_KEY\b")


def python() -> Iterator[str]:
    """Yield the public classes of the Python APIs, with their public attributes or values."""
    for module in PYTHON:
        loaded = import_module(module)
        for name in loaded.__all__:
            yield f"{module}.{name}{_members(getattr(loaded, name))}"


def commands() -> Iterator[str]:
    """Yield each command with its arguments and options."""
    yield from _commands(command_line, "kvferry", click.Context(command_line))


def routes() -> Iterator[str]:
    """Yield the method and path of each route of the client API and of the admin API."""
    for operation in OPERATIONS:
        yield f"{operation.method} {operation.path}"
    for path in admin_api.PATHS:
        yield f"admin: {path if ' ' in path else f'GET {path}'}"


def calls() -> Iterator[str]:
    """Yield the full name of each gRPC method."""
    for name in _PROTOS:
        file = import_module(f"kvferry.v1.{name}_pb2").DESCRIPTOR
        for service in file.services_by_name.values():
            yield from (f"{service.full_name}/{method.name}" for method in service.methods)


def metric_names() -> Iterator[str]:
    """Yield each metric with its type and labels."""
    for metric in all_metrics.ALL:
        yield f"{metric.name} {metric.kind}{''.join(f' {label}' for label in metric.labels)}"


def reasons() -> Iterator[str]:
    """Yield the stable reason of each class of error, with its statuses over gRPC and HTTP."""
    found = {
        one.reason: f"{one.reason} {one.grpc_status} {one.http_status}"
        for one in vars(core_errors).values()
        if isinstance(one, type) and issubclass(one, KvferryError) and one is not KvferryError
    }
    yield from (found[reason] for reason in sorted(found))


def objects() -> Iterator[str]:
    """Yield the fields of each custom resource, then labels and annotations."""
    for path in sorted(_DEFINITIONS.glob("*.yaml")):
        definition = yaml.safe_load(path.read_text("utf-8"))["spec"]
        for version in definition["versions"]:
            kind = f"{definition['names']['kind']} {version['name']}"
            properties = version["schema"]["openAPIV3Schema"]["properties"]
            for part in ("spec", "status"):
                if part in properties:
                    yield from (f"{kind} {field}" for field in _fields(properties[part], part))
    yield from (f"label {name}" for name in (kubernetes.LABEL_POOL, kubernetes.LABEL_ROLE, kubernetes.LABEL_REVISION))
    yield f"annotation {kubernetes.ANNOTATION_WAKE}"
    yield f"field manager {kubernetes.FIELD_MANAGER}"


def values() -> Iterator[str]:
    """Yield the values of the chart."""
    chart = yaml.safe_load((ROOT / "charts" / "kvferry" / "values.yaml").read_text("utf-8"))
    yield from _paths(chart, "")


def variables() -> Iterator[str]:
    """Yield the environment variables with keys."""
    texts = (p.read_text("utf-8") for room in ("services", "operator") for p in (ROOT / room).rglob("*.py"))
    yield from sorted({name for text in texts for name in _VARIABLE.findall(text)})


def parts() -> dict[str, str]:
    """Return the generated parts of the page, by name."""
    sections = {
        "public-python": python(),
        "public-commands": commands(),
        "public-routes": routes(),
        "public-calls": calls(),
        "public-metrics": metric_names(),
        "public-reasons": reasons(),
        "public-objects": objects(),
        "public-values": values(),
        "public-variables": variables(),
    }
    return {name: f"```text\n{_listed(lines)}```\n" for name, lines in sections.items()}


def _listed(lines: Iterator[str]) -> str:
    wrapped = (wrap(line, 116, subsequent_indent="    ", break_on_hyphens=False) for line in lines)
    return "".join(f"{line}\n" for parts in wrapped for line in parts)


def _members(value: object) -> str:
    if not isinstance(value, type):
        return ""
    if is_dataclass(value):
        return "(" + ", ".join(field.name for field in fields(value) if not field.name.startswith("_")) + ")"
    if hasattr(value, "__members__"):
        return " " + " | ".join(repr(str(member)) for member in value.__members__.values())
    methods = [name for name, one in vars(value).items() if not name.startswith("_") and callable(_function(one))]
    arguments = list(signature(value).parameters)
    return f"({', '.join(arguments)}) " + " ".join(f".{name}" for name in methods)


def _function(one: object) -> object:
    return getattr(one, "__func__", one) if not isinstance(one, property) else one.fget


def _commands(command: click.Command, path: str, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands(found, f"{path} {name}", context)
        return
    named = [option for parameter in command.params for option in _spellings(parameter)]
    yield " ".join([path, *named])


def _spellings(parameter: click.Parameter) -> list[str]:
    if isinstance(parameter, click.Argument):
        return [parameter.make_metavar(click.Context(click.Command("none")))]
    return [] if getattr(parameter, "hidden", False) else [*parameter.opts, *parameter.secondary_opts]


def _fields(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if schema.get("type") == "array":
        yield from _fields(schema["items"], f"{path}[]")
    elif "properties" in schema:
        for name, inner in schema["properties"].items():
            yield from _fields(inner, f"{path}.{name}")
    else:
        yield path


def _paths(value: object, path: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _paths(inner, f"{path}.{name}" if path else name)
    else:
        yield path
