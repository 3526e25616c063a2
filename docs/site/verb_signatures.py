"""Shows what verbs take as parameters, as `help` does; the site runs no code but that of options.

`takes(Options)` of `streamshard/options.py` makes these parameters of the fields of a class.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, cast

from griffe import (
    Attribute,
    Class,
    ExprCall,
    ExprKeyword,
    Extension,
    Function,
    Module,
    Parameter,
    ParameterKind,
    Parameters,
)

from streamshard import options
from streamshard.options import Options, with_parameters


class VerbSignatures(Extension):
    """Replaces the parameters of functions that are decorated so."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:  # noqa: ANN401
        """Change the signatures of one package."""
        for function in list(_functions(pkg)):
            for decorator in function.decorators:
                name, _, argument = str(decorator.value).rstrip(")").partition("(")
                if name == "takes":
                    fields: dict[str, Attribute] = {}
                    for field in _fields(_found(function.parent, argument)):
                        fields[field.name] = fields.pop(field.name, field)
                    found = [_parameter(field) for field in fields.values()]
                    found.sort(key=lambda one: one.kind is ParameterKind.keyword_only)
                    function.parameters = Parameters(*found)
                    kind = _options_class(_found(function.parent, argument))
                    if function.docstring is not None:
                        function.docstring.value = with_parameters(function.docstring.value, kind)


def _functions(module: Module) -> Iterator[Function]:
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _functions(inner)
    yield from (function for function in module.functions.values() if not function.is_alias)


def _found(module: Module, name: str) -> Any:  # noqa: ANN401
    """Return what a name stands for in a module."""
    found = module.members[name]
    return found.final_target if found.is_alias else found


def _options_class(kind: Class) -> type[Options]:
    """Return the class of options that a class of a verb is or extends."""
    for one in (kind, *(_found(kind.module, str(base)) for base in kind.bases)):
        if one.module.name in (options.__name__.rpartition(".")[2], "verb_options"):
            return cast("type[Options]", getattr(import_module(one.module.path), one.name))
    raise LookupError(kind.path)


def _fields(kind: Class) -> Iterator[Attribute]:
    """Yield the fields of an options class: its own, then inherited ones."""
    yield from (
        one for one in kind.members.values() if one.is_attribute and one.annotation and one.value
    )
    for base in kind.bases:
        yield from _fields(_found(kind.module, str(base)))


def _parameter(field: Attribute) -> Parameter:
    value: Any = field.value
    if not isinstance(value, ExprCall):  # the name of a field that several classes have
        value = _found(field.module, str(value)).value
    how = str(value.function)
    given = {one.name: one.value for one in value.arguments if isinstance(one, ExprKeyword)}
    default = given.get("default", "False" if how == "flag" else "None")
    is_place = how == "place"
    kind = ParameterKind.positional_or_keyword if is_place else ParameterKind.keyword_only
    shown = None if is_place else default
    return Parameter(field.name, annotation=field.annotation, kind=kind, default=shown)
