"""Options are written down once: the command line and the functions take the same ones."""

import inspect
from collections.abc import Callable

import pytest

import streamshard
from streamshard.cli.parser import arguments_of
from streamshard.operations.apply import PLANNERS
from streamshard.operations.transfer import plan_file
from streamshard.operations.verb_options import ExportOptions, option_types

ONLY_IN_PYTHON = {
    "verify": {"progress"},
    "diff": {"progress"},
    "compact": {"progress", "now", "chunk_size"},
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    **PLANNERS,
    "verify": streamshard.verify,
    "diff": streamshard.diff,
    "inspect": streamshard.inspect,
    "compact": streamshard.compact,
    "apply": streamshard.load_plan,
}


def keywords(function: Callable[..., object]) -> list[inspect.Parameter]:
    """List the keyword-only parameters that `help` shows."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_the_command_line_has_every_option_with_the_same_default(verb: str) -> None:
    places = ["a"] if verb in ("verify", "inspect", "apply") else ["a", "b"]
    parsed = vars(arguments_of().parse_args([verb, *places]))
    for option in keywords(FUNCTIONS[verb]):
        if option.name not in ONLY_IN_PYTHON.get(verb, ()):
            value = parsed[option.name]
            assert (tuple(value) if isinstance(value, list) else value) == option.default


@pytest.mark.parametrize("verb", PLANNERS)
def test_functions_show_the_options_of_the_verb(verb: str) -> None:
    types = option_types(plan_file.OPTIONS[verb])
    planned = keywords(getattr(streamshard, f"plan_{verb}"))
    assert {option.name: option.annotation for option in planned} == types
    *rest, progress = keywords(getattr(streamshard, verb))
    assert (rest, progress.name) == (planned, "progress")


def test_what_is_no_option_is_refused_also_by_type_checkers() -> None:
    """Without the keywords in the types, the comments that silence the checker were unused."""
    with pytest.raises(TypeError, match="wrld_size"):
        streamshard.plan_repartition("a", "b", wrld_size=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="codek"):
        streamshard.convert("a", "b", codek="zstd")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        streamshard.plan_export("a", "b", "bf16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        streamshard.export("a", "b", None, "bf16")  # type: ignore[call-arg]


def test_options_do_not_change_with_the_lists_they_were_made_from() -> None:
    patterns = ["layers.*"]
    options = ExportOptions(include=patterns)
    patterns.append("embed.*")
    assert options.include == ("layers.*",)
