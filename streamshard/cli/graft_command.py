"""`graft` on the command line, with a table of what each rule makes."""

import argparse

from streamshard.cli.text.tables import table
from streamshard.cli.transfer_command import run_transfer
from streamshard.grafting.record import GraftReport
from streamshard.sizes import show_bytes


def run_graft(arguments: argparse.Namespace) -> None:
    """Plan a graft, and run the plan."""
    run_transfer(arguments, _rules_text)


def _rules_text(report: GraftReport) -> str:
    rows: list[tuple[str, ...]] = [("rule", "tensors", "elements", "in fp32")]
    for rule, count in report.by_rule.items():
        sizes = f"{count.elements:,}", show_bytes(4 * count.elements)
        rows.append((rule, f"{count.tensors:,}", *sizes))
    return table(rows)
