"""Names the versions of DeepSpeed in which a rule changed that decides how files are cut.

Found by comparing the releases 0.9.0 to 0.19.8, function by function; the comments name the code.
"""

import re
from typing import Final

from streamshard.errors import UsageError
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node, show

Version = tuple[int, int, int]

OLDEST_TARGET: Final = (0, 14, 1)
"""The oldest version that files are written for; files of older ones are read."""
# `DeepSpeedEngine._configure_zero_optimizer` sets it to False before (0.12.6, engine.py:1488).
ROUND_ROBIN_AT_STAGE_1: Final = (0, 13, 0)
# `_do_optimizer_sanity_check` did not ask for the offload before (0.10.0, engine.py:1142).
OFFLOAD_WITHOUT_BF16_OPTIMIZER: Final = (0, 10, 1)
# `_get_expert_parallel_ranks` of `utils/groups.py` did not know the key before.
DATA_BEFORE_EXPERTS: Final = (0, 12, 4)
# `deepspeed.initialize` made no mesh of the two sizes before.
SEQUENCE_MESH: Final = (0, 15, 0)
# `get_data_types` took fp32 gradients for bf16 without ZeRO before.
STAGE_0_WITHOUT_BF16_OPTIMIZER: Final = (0, 17, 6)
# The optimizers' groups held parameters without elements before.
EMPTY_PARAMETERS_FROZEN: Final = (0, 19, 6)
# `DeepSpeedZeroConfig` had no such key before, and refuses keys that it does not have.
PARAMETER_ALIGNMENT: Final = (0, 19, 7)


def has(rule: Version, version: Version | None) -> bool:
    """Tell whether a version has a rule; an unknown one is taken for the newest."""
    return version is None or version >= rule


def recorded_version(text: Node) -> Version | None:
    """Read what files record as the version that saved them; None if it is none.

    >>> recorded_version("0.12.6+unknown"), recorded_version("0.19"), recorded_version(None)
    ((0, 12, 6), None, None)
    """
    found = re.match(
        r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", text if isinstance(text, str) else ""
    )
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def version_in(*holders: Node) -> Version | None:
    """Return the version that the first of some files' dicts records which records one."""
    found = (recorded_version(h.get(names.DS_VERSION)) for h in holders if isinstance(h, dict))
    return next((version for version in found if version is not None), None)


def given_version(text: str | None, name: str) -> Version | None:
    """Read a version that a user gives for a target; `name`: where it is, for messages."""
    version = recorded_version(text)
    if text is not None and version is None:
        raise UsageError(f"{name} is {show(text)}; give a release of DeepSpeed, such as 0.16.9")
    if version is not None and version < OLDEST_TARGET:
        message = f"{name} is {show(text)}: files are written for {dotted(OLDEST_TARGET)} and later"
        raise UsageError(f"{message} versions; resume with one of these")
    return version


def target_version(wanted: Version | None, saved_by: Version | None) -> Version | None:
    """Return the version that files are written for; by default the one that saved.

    >>> target_version(None, (0, 16, 9)), target_version(None, (0, 9, 5))
    ((0, 16, 9), (0, 14, 1))
    """
    return wanted or (None if saved_by is None else max(saved_by, OLDEST_TARGET))


def dotted(version: Version) -> str:
    """Return a version as text.

    >>> dotted((0, 16, 9))
    '0.16.9'
    """
    return ".".join(map(str, version))
