"""Formats the result of `inspect` for people: a summary, and tables."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from streamshard.cli.text.escaping import one_line, printable
from streamshard.cli.text.health_text import health_table, healthy_text
from streamshard.cli.text.tables import bold, facts_text, more_text, paragraph, table
from streamshard.errors import command
from streamshard.health import TensorHealth
from streamshard.operations.inspect.inspect_report import (
    CheckpointList,
    CheckpointSummary,
    FileGroup,
    FileSummary,
    GroupSummary,
    IncompleteCheckpoint,
    Inspection,
    OwnedPartition,
    OwnedPiece,
    ParameterDetail,
    RankDetail,
)
from streamshard.registry import reader_of
from streamshard.sizes import counted, show_bytes

_PARAMETERS_SHOWN: Final = 20
"""Maximum parameters, file groups, details and problems that are listed without `-v`."""
_DOUBTS_SHOWN: Final = 5
"""Maximum warnings about the newest checkpoints of a list without `-v`."""
_ROWS_SHOWN: Final = 40
"""Maximum rows in the table of one parameter or one partition without `-v`."""
_YES: Final = {True: "yes", False: "NO", None: "-"}
_MAIN_HYPER_PARAMETERS: Final = ("lr", "betas", "momentum", "eps", "weight_decay")


Cell = object
Columns = Sequence[str]


def inspection_text(
    report: Inspection | CheckpointList | IncompleteCheckpoint,
    *,
    verbose: bool,
    width: int | None = None,
) -> str:
    """Format the result of `inspect`.

    `width`: columns of the terminal, which gets colours; None for any other output.
    """
    page = _Page(width, verbose=verbose)
    if isinstance(report, CheckpointList):
        page.add(f"directory  {one_line(report.path)}, {_checkpoints(report.checkpoints)}")
        page.checkpoints(report, ())
        page.pictures(report.pictures)
        return page.text()
    if isinstance(report, IncompleteCheckpoint):
        page.incomplete(report)
        page.pictures(report.pictures)
        if len(report.checkpoints) > 1:
            page.checkpoints(
                report, [one.problem or "" for one in report.checkpoints if one.is_latest]
            )
        return page.text()
    is_brief = bool(report.details or report.rank or report.pictures)
    page.add(printable(facts_text(report.title if is_brief else report.facts)))
    if report.details:
        page.details(report.details)
    if report.rank is not None:
        page.rank(report.rank)
    if not is_brief:
        page.overview(report)
    if report.health is not None and not is_brief:
        page.health(report.health)
    page.pictures(report.pictures)
    if len(report.checkpoints) > 1:
        page.checkpoints(report, report.problems)
    page.texts([*(f"PROBLEM  {problem}" for problem in report.problems), *report.notes])
    return page.text()


class _Page:
    """Blocks of text and tables with empty lines between them."""

    def __init__(self, width: int | None, *, verbose: bool) -> None:
        self._blocks: list[str] = []
        self._width = width
        self._verbose = verbose

    def text(self) -> str:
        return "\n\n".join(self._blocks)

    def add(self, block: str) -> None:
        if block:
            self._blocks.append(block)

    def texts(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.add(one_line(text) if self._width is None else paragraph(one_line(text)))

    def pictures(self, pictures: Sequence[FileSummary]) -> None:
        self.add("\n".join(f"drew  {p.path}, {show_bytes(p.nbytes)}" for p in pictures))

    def checkpoints(
        self, report: Inspection | CheckpointList | IncompleteCheckpoint, messages: Sequence[str]
    ) -> None:
        """Add a table of a directory's checkpoints, the newest last.

        `messages`: problems that are shown elsewhere.
        """
        all_of_them = report.checkpoints
        head: Columns = ("checkpoint", "step", "ranks", "size", "saved", "whole")
        rows = [_checkpoint_row(one) for one in all_of_them]
        if any(one.warnings or one.is_healthy is not None for one in all_of_them):
            head = (*head, "healthy")
            rows = [(*row, _health(one)) for row, one in zip(rows, all_of_them, strict=True)]
        self.table("", head, rows, "")
        problems = [one.problem for one in all_of_them if one.problem is not None]
        self.texts([f"PROBLEM  {p}" for p in problems if not any(p in other for other in messages)])
        if problems or isinstance(report, CheckpointList):
            self.texts([_newest_whole(report.path, all_of_them)])
        self._health_of(report.path, all_of_them)

    def _health_of(self, path: str, summaries: Sequence[CheckpointSummary]) -> None:
        """Say what is suspicious about checkpoints, and how to find out what is not known."""
        doubts = [f"SUSPICIOUS  {one.path}: {w}" for one in summaries for w in one.warnings]
        shown = doubts if self._verbose else doubts[-_DOUBTS_SHOWN:]
        self.texts(shown)
        self.add(more_text(len(doubts) - len(shown), what="more of this kind"))
        unread = [one for one in summaries if one.is_whole and one.is_healthy is None]
        if unread:
            one = f"{path.rstrip('/')}/{unread[-1].path}"
            commands = (
                ("reads one", command("verify", one, health=True)),
                ("reads the newest ones, until one is healthy", command("newest", path)),
            )
            text = "Headers do not tell whether a checkpoint is healthy, that is, without NaN:"
            self.add(f"{text}\n{facts_text(commands)}")

    def incomplete(self, report: IncompleteCheckpoint) -> None:
        """Add the existing files of an incomplete checkpoint, and its problems."""
        self.add(_incomplete_summary(report))
        self._files(report)
        shown = report.problems if self._verbose else report.problems[:_PARAMETERS_SHOWN]
        self.texts([f"PROBLEM  {problem}" for problem in shown])
        self.add(more_text(len(report.problems) - len(shown)))

    def table(self, title: str, head: Columns, rows: Iterable[Sequence[Cell]], more: str) -> None:
        """Add a table with a title above it, and a line below it about rows left out."""
        lines = printable(title).split("\n") if title else []
        blocks = lines if self._width is None else [bold(line) for line in lines]
        if head:
            cells = [[_cell_text(cell) for cell in row] for row in rows]
            blocks.append(table([head, *cells], self._width))
        self.add("\n".join([*blocks, *([more] if more else [])]))

    def health(self, health: Mapping[str, TensorHealth]) -> None:
        """Add what was measured when a store was made: of all tensors, or of those with NaN."""
        shown = {n: one for n, one in health.items() if self._verbose or not one.is_good}
        self.add(f"healthy  {healthy_text(health)}, as measured when it was made")
        if shown:
            self.add(printable(health_table(shown)))

    def overview(self, report: Inspection) -> None:
        """Add the tables of a whole checkpoint."""
        if report.groups:
            self.table("", *_group_table(report, all_of_them=self._verbose), "")
        sizes = {**report.state_bytes, "all": sum(report.state_bytes.values())}
        self.table("", ("tensors", "bytes", ""), _sizes(sizes.items()), "")
        self._files(report)
        self._parameters(report)

    def _files(self, report: Inspection | IncompleteCheckpoint) -> None:
        if self._verbose:
            files = ((file.path, file.nbytes) for file in report.file_list)
            self.table("", ("file", "bytes", ""), _sizes(files), "")
            return
        groups = [_file_row(group) for group in report.file_groups[:_PARAMETERS_SHOWN]]
        more = more_text(len(report.file_groups) - len(groups), "-v lists every file")
        self.table("", ("files", "count", "each", "all"), groups, more)

    def _parameters(self, report: Inspection) -> None:
        most = None if self._verbose else _PARAMETERS_SHOWN
        shown = report.parameters[:most]
        is_of_ranks = any(p.first_rank is not None for p in shown)
        pieces = "chunks" if reader_of(report.kind).is_store else "pieces"
        head = ("parameter", "shape", "elements", "group", "ranks" if is_of_ranks else pieces)
        rows = [
            (
                p.name,
                list(p.shape),
                f"{p.numel:,}",
                p.group,
                p.ranks_text if is_of_ranks else p.pieces,
            )
            for p in shown
        ]
        hint = "-v lists all, --param PATTERN shows where the elements of some lie"
        if not rows or (not report.zero_stage and not reader_of(report.kind).is_foreign):
            return  # only the module's weights are known by name, and they are not cut
        self.table("", head, rows, more_text(len(report.parameters) - len(rows), hint))

    def details(self, details: Sequence[ParameterDetail]) -> None:
        shown = details if self._verbose else details[:_PARAMETERS_SHOWN]
        for detail in shown:
            self.table(*_detail_table(detail, None if self._verbose else _ROWS_SHOWN))
        self.add(more_text(len(details) - len(shown), "-v shows all, --json for programs"))

    def rank(self, rank: RankDetail) -> None:
        files = ((file.path, file.nbytes) for file in rank.files)
        self.table("", (f"files of rank {rank.rank}", "bytes", ""), _sizes(files), "")
        for part in rank.partitions:
            self.table(*_partition_table(part, None if self._verbose else _ROWS_SHOWN))


def _sizes(named: Iterable[tuple[str, int]]) -> list[tuple[str, str, str]]:
    return [(name, f"{nbytes:,}", show_bytes(nbytes)) for name, nbytes in named]


def _cell_text(value: Cell) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_cell_text, value)) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _checkpoint_row(summary: CheckpointSummary) -> tuple[Cell, ...]:
    saved = "-" if summary.changed is None else _saved(datetime.fromisoformat(summary.changed))
    whole = _YES[summary.is_whole]
    marks = {whole: True, "newest": summary.is_newest, "latest": summary.is_latest}
    return (
        summary.path,
        _known(summary.step),
        _known(summary.world_size),
        show_bytes(summary.nbytes),
        saved,
        ", ".join(mark for mark, is_set in marks.items() if is_set),
    )


def _health(one: CheckpointSummary) -> str:
    return "suspicious" if one.warnings and one.is_healthy is not False else _YES[one.is_healthy]


def _saved(changed: datetime) -> str:
    """Say in local time when something was saved, and how long ago."""
    seconds = max(0, int((datetime.now(UTC) - changed).total_seconds()))
    if seconds >= 86400:
        return f"{changed.astimezone():%b %d}, {seconds // 86400} d ago"
    ago = f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"
    return f"{changed.astimezone():%H:%M}, {ago} ago"


def _known(number: int | None) -> str:
    return "-" if number is None else str(number)


def _checkpoints(summaries: Sequence[CheckpointSummary]) -> str:
    whole = sum(one.is_whole is True for one in summaries)
    return f"{counted(len(summaries), 'checkpoint')}, {whole:,} whole"


def _newest_whole(path: str, summaries: Sequence[CheckpointSummary]) -> str:
    """Name the newest whole checkpoint, as far as the headers tell."""
    whole = [one for one in summaries if one.is_whole]
    if not whole:
        return "None of them is whole."
    text = f"The newest whole checkpoint: {path.rstrip('/')}/{whole[-1].path}."
    return f"{text} Whole: all files are there, and their headers agree; verify reads all the rest."


def _group_table(report: Inspection, *, all_of_them: bool) -> tuple[Columns, list[list[Cell]]]:
    groups = report.groups
    held = dict.fromkeys(key for group in groups for key in group.hyper_parameters)
    shown = [key for key in held if all_of_them or key in _MAIN_HYPER_PARAMETERS]
    parts = any(group.model_part or group.expert_rank is not None for group in groups)
    head = ["group", *(["part"] if parts else []), "parameters", "elements", "states", *shown]
    rows: list[list[Cell]] = []
    for number, group in enumerate(groups):
        states = ", ".join(
            f"{key} {_cell_text(value)}" if isinstance(value, int | float) else key
            for key, value in group.states.items()
        )
        values = [group.hyper_parameters.get(key, "-") for key in shown]
        sizes = (f"{group.parameters:,}", f"{group.numel:,}")
        rows.append([number, *([_part(group)] if parts else []), *sizes, states or "-", *values])
    return head, rows


def _part(group: GroupSummary) -> str:
    experts = "" if group.expert_rank is None else f"expert rank {group.expert_rank}"
    return ", ".join(filter(None, (group.model_part, experts))) or "-"


def _file_row(group: FileGroup) -> tuple[Cell, ...]:
    each = show_bytes(group.smallest)
    if show_bytes(group.largest) != each:
        each = f"{each} to {show_bytes(group.largest)}"
    return group.pattern, f"{group.files:,}", each, show_bytes(group.nbytes)


def _detail_table(
    detail: ParameterDetail, most: int | None
) -> tuple[str, Columns, list[list[Cell]], str]:
    """Make the table of a parameter; states with the same elements in the same file share a row."""
    title = f"{detail.name}: shape {_cell_text(detail.shape)}, {counted(detail.numel, 'element')}"
    if detail.model_part:
        title += f", {detail.model_part}"
    title += f", param group {detail.group}" if detail.group is not None else f", {detail.kind}"
    if detail.alias_of:
        return f"{title} of {detail.alias_of}, which has the values", (), [], ""
    title += "\n" + ", ".join(f"{state} {dtype}" for state, dtype in detail.states.items())
    places: dict[tuple[bool, int, int, str], dict[str, OwnedPiece]] = {}
    # Of scales there is one for each block of elements.
    whole = {piece.state for piece in detail.pieces if piece.stop == detail.numel}
    for piece in detail.pieces:
        key = (piece.rank is None, piece.start, piece.stop, piece.file)
        places.setdefault(key, {})[piece.state] = piece
    rows: list[list[Cell]] = []
    for _, held in sorted(places.items()):
        piece = next(iter(held.values()))
        offsets = [f"{held[s].offset:,}" if s in held else "-" for s in detail.states]
        elements = f"{'' if piece.state in whole else 'blocks '}{piece.start:,} to {piece.stop:,}"
        rows.append(["all" if piece.rank is None else piece.rank, elements, piece.file, *offsets])
    shown = rows[:most]
    head = ("rank", "elements", "file", *(f"{state} at" for state in detail.states))
    return title, head, shown, more_text(len(rows) - len(shown))


def _partition_table(
    part: OwnedPartition, most: int | None
) -> tuple[str, Columns, list[list[Cell]], str]:
    where = f"param group {part.group}"
    if part.sub_group is not None:
        where += f", sub-group {part.sub_group}"
    offsets = ", ".join(f"{state} at {offset:,}" for state, offset in part.offsets.items())
    title = f"{where}: {counted(part.numel, 'element')}, {part.padding:,} of them padding\n"
    title += f"{part.file}: bytes of {offsets}"
    rows: list[list[Cell]] = [
        [held.name, f"{held.start:,} to {held.stop:,}", f"{held.numel:,}", f"{held.at:,}"]
        for held in part.ranges[:most]
    ]
    head = ("parameter", "elements", "of", "at")
    return title, head, rows, more_text(len(part.ranges) - len(rows))


def _incomplete_summary(found: IncompleteCheckpoint) -> str:
    stage = (
        "ZeRO stage not recorded" if found.zero_stage is None else f"ZeRO stage {found.zero_stage}"
    )
    steps = "not recorded" if found.global_steps is None else f"{found.global_steps:,}"
    facts = [
        ("checkpoint", f"{found.path} ({reader_of(found.kind).title}), NOT WHOLE"),
        ("tag", found.tag or "not known"),
        ("saved by", f"{stage}, world size {found.world_size or 'not recorded'}"),
        ("DeepSpeed", found.deepspeed_version or "version not recorded"),
        ("steps", steps),
        ("on disk", f"{counted(found.files, 'file')}, {show_bytes(found.file_bytes)}"),
    ]
    return printable(facts_text(facts))
