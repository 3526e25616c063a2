"""`serve` on the command line: answers until it is interrupted."""

import argparse
import signal
from contextlib import closing

from streamshard.cli.parser import keywords
from streamshard.cli.signals import StoppedBySignal
from streamshard.cli.streams import print_json, tell, write_out
from streamshard.source.source import open_source
from streamshard.verb_options import ServeOptions
from streamshard.view.http_view import HttpView
from streamshard.view.viewed_files import ViewedFiles


def run_serve(arguments: argparse.Namespace) -> None:
    """Serve a checkpoint, and print where."""
    options = ServeOptions(**keywords(arguments))
    opened = open_source(options.source, options)
    opened.require_use_of_like()

    def log(line: str) -> None:
        if arguments.verbose:
            tell(line)

    def report(line: str) -> None:
        tell(f"streamshard: {line}")

    with (
        closing(ViewedFiles(opened, options.chunk_size)) as files,
        HttpView(files, options.bind, log, report, options.allow_origin) as view,
    ):
        if not view.is_loopback:
            tell(f"streamshard: {view.url} is no address of this machine alone: whoever reaches "
                 "it can read the checkpoint")  # fmt: skip
        try:
            if arguments.json:
                print_json({"url": view.url})
            else:
                write_out(f"{view.url}\n")
            view.serve_forever()
        except KeyboardInterrupt as error:
            if isinstance(error, StoppedBySignal) and error.number != signal.SIGINT:
                raise
