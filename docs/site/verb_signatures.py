"""Shows the options of the verbs that write as keywords, as `help` does; the site runs no code.

`takes(Options)` and `runs(plan)` of `streamshard/operations/verb_options.py` make these keywords.
"""

from collections.abc import Iterator
from typing import Any

from griffe import Class, Expr, Extension, Function, Module, Parameter, ParameterKind, Parameters

_HOME = "operations.verb_options"


class VerbSignatures(Extension):
    """Replaces the parameters of functions that are decorated so."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:  # noqa: ANN401
        """Change the signatures of one package."""
        for function in list(_functions(pkg)):
            for decorator in function.decorators:
                name, _, argument = str(decorator.value).rstrip(")").partition("(")
                if name == "takes":
                    _take(function, [*_options(pkg[_HOME], argument)])
                elif name == "runs":
                    _run(function, function.parent[argument])


def _functions(module: Module) -> Iterator[Function]:
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _functions(inner)
    yield from (function for function in module.functions.values() if not function.is_alias)


def _options(module: Module, name: str) -> Iterator[Parameter]:
    """Yield the keywords of an options class: its own, then inherited ones."""
    found: list[Class] = [module[name]]
    while found[-1].bases:
        found.append(module[str(found[-1].bases[0])])
    for kind in (found[0], *reversed(found[1:])):
        for field in kind.members.values():
            if field.is_attribute:
                yield _keyword(field.name, field.annotation, str(field.value))


def _keyword(name: str, annotation: str | Expr | None, default: str) -> Parameter:
    kind = ParameterKind.keyword_only
    return Parameter(name, annotation=annotation, kind=kind, default=default)


def _take(function: Function, options: list[Parameter]) -> None:
    function.parameters = Parameters(*list(function.parameters)[:2], *options)


def _run(function: Function, plan: Function) -> None:
    annotation = function.parameters["progress"].annotation
    progress = _keyword("progress", annotation, "None")
    function.parameters = Parameters(*plan.parameters, progress)
