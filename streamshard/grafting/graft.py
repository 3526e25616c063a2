"""`graft`: writes the job of a changed model, with the training of an earlier checkpoint in it."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from streamshard.errors import UsageError
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.facts_file import text_of
from streamshard.grafting.grafted_source import grafted
from streamshard.grafting.record import GraftReport, RuleCount
from streamshard.grafting.rules import Rules
from streamshard.io.object_path import as_path
from streamshard.layout.batch import BatchPlan
from streamshard.native.resharding import resharding_of
from streamshard.operations.repartition.repartition import output_of
from streamshard.options import takes
from streamshard.source.degree_change import DerivedSource
from streamshard.source.source import Source, open_source
from streamshard.transfer.plan import TransferPlan, plan_opened
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

    counts: Mapping[str, RuleCount] = {}

    def prepare(source: Source) -> Output:
        nonlocal counts
        start = open_source(options.start)
        require_separate(start.path, target, start.directories)
        source.require_use_of_like()
        job, counts = grafted(source, start, replace(rules, is_fresh=options.fresh_states))
        return _output(options, rules, start, job)

    opened = partial(open_source, options.source, options, takes_bare=True)
    plan = plan_opened(options, opened, prepare)
    known = {field.name: getattr(plan.report, field.name) for field in fields(Report)}
    return replace(plan, report=GraftReport(**known, by_rule=counts))


def _read(path: Path) -> Rules:
    text = text_of(path)
    try:
        return Rules.of(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _output(options: GraftOptions, rules: Rules, start: Source, job: DerivedSource) -> Output:
    """Decide what the files of the target are: those of a repartition of what is grafted."""
    decisive = {
        "verb": "graft",
        "rules": digest_of_settings(rules.lines),
        "fresh_states": str(options.fresh_states),
        "sources": " ".join(digest_of_headers(one.checkpoint) for one in (job.original, start)),
    }
    new, version = start.checkpoint, start.facts.ds_version
    found = resharding_of(job.original, new.ranks, ds_version=version, derived=job)
    return output_of(found, decisive, options.target, job=_batch_of(new.config))


def _batch_of(config: ds_config.Config) -> BatchPlan | None:
    """Return the batch that a config names in full."""
    total, micro, accumulation = ds_config.batch_sizes(config)
    if total is None or micro is None or accumulation is None:
        return None
    return BatchPlan(total, micro, accumulation)
