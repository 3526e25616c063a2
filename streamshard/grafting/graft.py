"""`graft`: writes the job of a changed model, with the training of an earlier checkpoint in it."""

from dataclasses import replace
from pathlib import Path

from streamshard.errors import UsageError
from streamshard.grafting.grafted_source import Graft
from streamshard.grafting.rules import Rules
from streamshard.io.entries import read_document
from streamshard.io.files import source_errors
from streamshard.io.object_path import as_path
from streamshard.operations.repartition import repartition
from streamshard.options import RepartitionOptions, takes
from streamshard.source.source import Source, open_source
from streamshard.transfer.plan import TransferPlan, plan_transfer
from streamshard.transfer.report import Report, Watched
from streamshard.transfer.run_identity import digest_of_headers, digest_of_settings
from streamshard.transfer.target import require_other, require_separate
from streamshard.transfer.target_writer import Output
from streamshard.verb_options import GraftOptions


class _Graft(GraftOptions, Watched):
    """What `graft` takes."""


@takes(GraftOptions)
def plan_graft(options: GraftOptions) -> TransferPlan:
    """Read the headers of both checkpoints and plan a graft; writes nothing.

    What START is, is what the target is: names, shapes, param groups, dtypes, ZeRO stage, world
    size, settings. A parameter that is in both, with the same name and shape, has the master
    weights and the optimizer states of SRC, bit for bit. Every other parameter needs a rule.

    Raises
    ------
    UsageError
        If SRC and START differ where no rule says what to do. The notes of the error are the rules
        that would.
    StreamshardError
        One of its subclasses, each with its own exit code; see `streamshard.errors`.
    """
    return _plan(options)


@takes(_Graft)
def graft(options: _Graft) -> Report:
    """Write the job of a changed model, with an earlier training in it; see `plan_graft`."""
    return _plan(options).run(options.progress)


def _plan(options: GraftOptions) -> TransferPlan:
    rules = Rules() if options.rules is None else _read(as_path(options.rules))
    target = as_path(options.target)
    require_other(options.start, target)

    def prepare(source: Source) -> Output:
        start = open_source(options.start)
        require_separate(start.path, target, start.directories)
        return _output(options, rules, source, start)

    return plan_transfer(options, prepare)


def _read(path: Path) -> Rules:
    with source_errors(path):
        text = read_document(path)
    try:
        return Rules.of(text.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is no text in UTF-8") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _output(options: GraftOptions, rules: Rules, source: Source, start: Source) -> Output:
    """Decide what the files of the target are: those of a repartition of what is grafted."""
    source.require_use_of_like()
    grafted = Graft(source, start, rules, options.fresh_states).grafted()
    given = RepartitionOptions(start.path, options.target, world_size=start.checkpoint.ranks)
    output = repartition.prepare(None, given, None, grafted.source)
    decisive = {
        **output.options,
        "verb": "graft",
        "rules": digest_of_settings(rules.lines),
        "fresh_states": str(options.fresh_states),
        "sources": " ".join(digest_of_headers(one.checkpoint) for one in (source, start)),
    }
    return replace(
        output,
        options=decisive,
        source_world_size=source.checkpoint.ranks,
        notes=(*grafted.notes, *output.notes),
        check=(lambda _, __: grafted.find_means()) if grafted.warm else None,
    )
