"""Memory that processes fill together: nobody takes other memory for it, and none stays behind."""

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from streamshard.io.node_memory import NodeMemory, Offer

PARTS, NBYTES = 300, 10_000


@pytest.fixture
def memory() -> NodeMemory:
    return NodeMemory.make(PARTS, NBYTES)


def in_another_process(act: Callable[[], None]) -> int:
    """Do something in a fork; returns how it ended."""
    pid = os.fork()
    if not pid:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def holders(offer: Offer) -> list[int]:
    """List the processes that have memory open."""
    wanted, found = Path(f"/proc/{offer.process}/fd/{offer.descriptor}").stat(), list[int]()
    for place in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it is closed by now
            if os.path.samestat(place.stat(), wanted):
                found.append(int(place.parts[2]))
    return found


def test_no_trace_of_it_when_all_processes_are_killed(memory: NodeMemory) -> None:
    before = {*Path("/dev/shm").iterdir()}
    offer = memory.offer()
    assert holders(offer) == [os.getpid()]

    def open_and_die() -> None:
        opened = NodeMemory.open(offer, PARTS)
        opened.content()[:] = b"x" * NBYTES
        assert os.getpid() in holders(offer)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_another_process(open_and_die) == -signal.SIGKILL
    assert holders(offer) == [os.getpid()]
    assert {*Path("/dev/shm").iterdir()} == before
    memory.close()


def test_other_memory_is_refused(memory: NodeMemory) -> None:
    other = NodeMemory.make(PARTS, NBYTES)
    offer = memory.offer()
    for wrong in (
        replace(offer, descriptor=other.offer().descriptor),
        replace(offer, token=bytes(16)),
    ):
        with pytest.raises(OSError, match="is not the memory that was offered"):
            NodeMemory.open(wrong, PARTS)
    other.close()
    memory.close()
    with pytest.raises(FileNotFoundError):
        NodeMemory.open(offer, PARTS)


def test_a_limit_on_the_size_of_files_is_one_on_memory() -> None:
    def make() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES, NBYTES))
        before = [*Path("/proc/self/fd").iterdir()]
        with pytest.raises(OSError, match="File too large"):
            NodeMemory.make(PARTS, NBYTES)
        assert [*Path("/proc/self/fd").iterdir()] == before

    assert in_another_process(make) == 0
