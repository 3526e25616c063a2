"""Runs a training script whose loads reshard, as Python itself would run it."""

import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import distributed

from streamshard.errors import StreamshardError, TargetError, TargetExistsError, command
from streamshard.formats.deepspeed import names
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import exists, is_directory, lexists, names_in, paths_in, resolve
from streamshard.io.files import target_errors
from streamshard.io.object_path import as_path, is_object
from streamshard.live.live_engine import Engine, replaced, writes_in_background
from streamshard.live.resharding_loads import resharding
from streamshard.sizes import counted


@contextmanager
def _complete_saves() -> Iterator[None]:
    """Write `latest` when all ranks have written their files, not when rank 0 has.

    In `DeepSpeedEngine.save_checkpoint` rank 0 writes `latest` before it waits for the others. If
    one of them dies in between, `latest` names a tag that no job can load. If it dies before, and
    fewer ranks then save the same tag again, files of the former world size stay in it; these are
    removed here.
    """
    plain = DeepSpeedEngine.save_checkpoint

    @wraps(plain)
    def save(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(plain).bind(engine, *args, **kwargs)
        call.apply_defaults()
        if not call.arguments["save_latest"] or writes_in_background(engine):
            return plain(engine, *args, **kwargs)
        tag = call.arguments["tag"]
        directory = Path(call.arguments["save_dir"])
        call.arguments["save_latest"] = False
        saved = plain(*call.args, **call.kwargs)  # ends with a barrier
        if distributed.get_rank() == 0:
            name = f"global_step{engine.global_steps}" if tag is None else str(tag)
            _remove_files_of_other_ranks(engine, directory / name)
            temporary = directory / f"{names.OWN_PREFIX}-{names.LATEST}"
            write_durably(directory / names.LATEST, name.encode(), temporary)
        distributed.barrier()
        return saved

    with replaced(DeepSpeedEngine, "save_checkpoint", save):
        yield


def _remove_files_of_other_ranks(engine: Engine, directory: Path) -> None:
    """Remove the files of ranks that this job does not have."""
    if not engine.zero_optimization():
        return
    ranks = distributed.get_world_size(engine.optimizer.dp_process_group)
    for path in list(paths_in(directory)):
        file = names.parse(path.name)
        if file is not None and file.dp_rank is not None and file.dp_rank >= ranks:
            remove_file(path)


_BEGINNINGS: Final = (
    *((DeepSpeedEngine, name) for name in ("load_checkpoint", "forward", "backward", "step")),
    *((PipelineEngine, name) for name in ("train_batch", "eval_batch")),
)
"""What a job calls before or in its first step. A script that runs `engine.module` itself calls
`backward` or `step` first."""


def _free_directory(given: str) -> Path:
    """Return the directory that a user names, which must be empty or not there."""
    directory = as_path(given)
    if is_object(directory):
        message = "DeepSpeed saves on a disk, not in a bucket; give a directory"
        raise TargetError(message, path=directory)
    with target_errors(directory):
        if lexists(directory) and not (is_directory(directory) and not names_in(directory)):
            message = "exists, and is not an empty directory; give a directory that is new or empty"
            raise TargetExistsError(message, path=directory)
        return resolve(directory)  # the script may change the working directory


@contextmanager
def _start_saved(directory: Path) -> Iterator[None]:
    """Save the first engine that begins to train, before it does anything, and end the process."""
    with ExitStack() as patches:
        for owner, name in _BEGINNINGS:
            beginning = _saving(getattr(owner, name), directory)
            patches.enter_context(replaced(owner, name, beginning))
        yield


def _saving(plain: Callable[..., Any], directory: Path) -> Callable[..., Any]:
    @wraps(plain)
    def save(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if engine.basic_optimizer is None:  # a model that does not train, such as a reference
            return plain(engine, *args, **kwargs)
        try:
            engine.save_checkpoint(str(directory))  # ends with a barrier
            if writes_in_background(engine):
                engine._commit_decoupled_checkpoint()
                engine.checkpoint_engine.cleanup()  # ends the process that writes
        except Exception:
            traceback.print_exc()
            _end(1)
        if distributed.get_rank() == 0:
            sys.stderr.write(_text(engine, directory))
        _end(0)

    return save


def _text(engine: Engine, directory: Path) -> str:
    stage, ranks = engine.zero_optimization_stage(), counted(distributed.get_world_size(), "rank")
    return (
        f"saved in {directory}: the job before its first step, ZeRO stage {stage} on {ranks}\n"
        f"next: {command('graft', 'SRC', directory, 'OUT')}\n"
    )


def _end(code: int) -> NoReturn:
    """End the process.

    Not by SystemExit: scripts and callbacks that catch everything (Lightning's
    `OnExceptionCheckpoint`, `finally: trainer.save_model()`) would save untrained weights over
    those of the run that is to go on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_KEEP = "--keep-global-batch"
_NEWEST = "--newest"
_SAVE_START = "--save-start"
_USAGE = f"""\
usage: python -m streamshard.deepspeed [OPTIONS] SCRIPT [ARG ...]
       python -m streamshard.deepspeed [OPTIONS] -m MODULE [ARG ...]

Run a training script; its loads of DeepSpeed checkpoints take checkpoints of any world size, and
`latest` names a tag only when all ranks have written it.
Works under torchrun (-m streamshard.deepspeed), deepspeed (--module streamshard.deepspeed) and
accelerate launch (-m streamshard.deepspeed).

options:
  {_KEEP}  if the world size changed, set micro batch and accumulation so that the
                       global batch stays; stop if that is impossible
  {_NEWEST}             load the newest checkpoint that is whole and holds no NaN,
                       not the one that 'latest' names
  {_SAVE_START} DIR     save in DIR what the job is before its first step, and end it: at
                       the first load of a checkpoint, or the first forward; DIR must be
                       new or empty; 'streamshard graft' puts a training into it
  -h, --help           show this text"""


@dataclass(frozen=True, slots=True)
class _Command:
    """What the arguments ask for."""

    name: str
    """Path of the script, or name of the module."""
    is_module: bool
    keeps_global_batch: bool
    takes_newest: bool
    start: Path | None
    """Where the job is saved before its first step, if that is all that it is to do."""
    arguments: tuple[str, ...]
    """The script's own."""


def launch() -> None:
    """Run the script or the module that the arguments name."""
    call = _parse(sys.argv[1:])
    _require_there(call)
    sys.argv = [call.name, *call.arguments]
    if not call.is_module and not sys.flags.safe_path:
        # `python -m` put the working directory here; a script expects its own.
        sys.path[0] = str(resolve(Path(call.name)).parent)
    with ExitStack() as patches:
        how = {
            "keeps_global_batch": call.keeps_global_batch,
            "takes_newest": call.takes_newest,
        }
        patches.enter_context(resharding(**how))
        patches.enter_context(_complete_saves())
        if call.start is not None:
            patches.enter_context(_start_saved(call.start))
        try:
            if call.is_module:
                runpy.run_module(call.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(Path(call.name).absolute()), run_name="__main__")
        except Exception as error:
            error.__traceback__ = _own_frames(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)
        except SystemExit as ended:
            if ended.code or call.start is None:
                raise
    if call.start is not None:
        message = f"error: '{call.name}' ended, and no engine in it had begun to train or load a"
        _stop(f"{message} checkpoint: nothing is saved. Give it the arguments of a training", 3)


def _parse(arguments: list[str]) -> _Command:
    words, ranked = list(arguments), []
    keeps = takes_newest = is_module = False
    start = None
    while words and words[0].startswith("-") and not is_module:
        option = words.pop(0)
        if option.startswith(("--local_rank=", "--local-rank=")):
            ranked.append(option)  # launchers put it in front of all; it is for the script
        elif option == _KEEP:
            keeps = True
        elif option == _NEWEST:
            takes_newest = True
        elif option == _SAVE_START:
            start = _start(words.pop(0) if words else "-")
        elif option == "-m":
            is_module = True
        elif option in ("-h", "--help"):
            sys.stdout.write(f"{_USAGE}\n")
            sys.exit(0)
        else:
            _stop(f"{_USAGE}\n\nerror: unknown option {option}; the script's own follow its name")
    if not words:
        _stop(f"{_USAGE}\n\nerror: name a training script, or -m and a module")
    own = (*ranked, *words[1:])
    return _Command(words[0], is_module, keeps, takes_newest, start, own)


def _start(directory: str) -> Path:
    if directory.startswith("-"):
        _stop(f"{_USAGE}\n\nerror: {_SAVE_START} lacks its directory")
    try:
        return _free_directory(directory)
    except StreamshardError as error:
        _stop(f"error: {error}", error.exit_code)


def _require_there(call: _Command) -> None:
    """Stop if there is no such script or module."""
    if not call.is_module:
        if not exists(Path(call.name)):
            where = Path.cwd()
            _stop(f"error: no script '{call.name}': name one that is there, seen from {where}")
        return
    try:
        found = find_spec(call.name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        _stop(f"error: no module '{call.name}': name one that this Python can import")


def _stop(message: str, code: int = 2) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    sys.exit(code)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames above the script's."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    return trace
