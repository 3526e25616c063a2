"""Reads the values of a DeepSpeed config, each with the meaning that DeepSpeed gives it, or none.

DeepSpeed has two ways. The models of most sections (`DeepSpeedConfigModel` of `runtime/
config_utils.py`, on pydantic) convert values, and leave out a key whose value is "auto". Other keys
are taken as they are, so that the text "false" is true there. What DeepSpeed refuses is refused
here too, and so is what its versions understand in different ways.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from streamshard.errors import UsageError
from streamshard.formats.pickle.inert import show

AUTO: Final = "auto"
_ON: Final = ("1", "true", "t", "yes", "y", "on")
_OFF: Final = ("0", "false", "f", "no", "n", "off")
_COUNT: Final = re.compile(r"\s*([+-]?[0-9]{1,30})(\.0+)?\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\s*[+-]?[0-9.]{1,30}([eE][+-]?[0-9]{1,3})?\s*", re.ASCII)
_MOST: Final = float(1 << 63)
"""From here on pydantic takes a float for no integer."""
_DTYPES: Final[Mapping[str, str]] = {
    name: dtype
    for dtype, names in {
        "float16": ("torch.float16", "fp16", "float16", "half"),
        "float32": ("torch.float32", "fp32", "float32", "float"),
        "int8": ("torch.int8", "int8"),
        "bfloat16": ("torch.bfloat16", "bf16", "bfloat16"),
    }.items()
    for name in names
}
"""Name in a config → dtype, by `DtypeEnum` of `runtime/config.py`."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a DeepSpeed config; every method raises `UsageError` for a senseless value."""

    values: Mapping[str, Any]
    path: str = ""
    """Keys that lead to it, each with a dot after it."""

    def section(self, key: str) -> "Section":
        """Return a section in this one; an empty one if there is none."""
        found = self.values.get(key, {})
        if not isinstance(found, Mapping):
            self.refuse(key, "not a section")
        return Section(found, f"{self.path}{key}.")

    def has(self, key: str) -> bool:
        """Tell whether a model sees a key."""
        return bool(self.values.get(key, AUTO) != AUTO)

    def flag(self, key: str) -> bool:
        """Read a switch of a model. Default: off."""
        if not self.has(key):
            return False
        value = self.values[key]
        if isinstance(value, float) and value in (0, 1):
            value = int(value)
        text = str(value).lower() if isinstance(value, bool | int | str) else ""
        if text not in (*_ON, *_OFF):
            self.refuse(key, "not a switch")
        return text in _ON

    def count(self, key: str, least: int = 0) -> int | None:
        """Read a count of a model; None if the config does not give it."""
        if not self.has(key):
            return None
        value = self.values[key]
        if isinstance(value, str) and (found := _COUNT.fullmatch(value)):
            value = int(found[1])
        if isinstance(value, float) and value.is_integer() and value < _MOST:
            value = int(value)
        if not isinstance(value, int) or value < least:
            self.refuse(key, "not a count")
        return int(value)

    def fraction(self, key: str) -> float:
        """Read a number from 0 to 1 of a model. Default: 1."""
        if not self.has(key):
            return 1.0
        value = self.values[key]
        try:
            is_number = isinstance(value, int | float) or _NUMBER.fullmatch(value)
            fraction = float(value) if is_number else math.nan
        except (TypeError, ValueError, OverflowError):
            fraction = math.nan
        if not 0 <= fraction <= 1:
            self.refuse(key, "not a part of 1")
        return fraction

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Read one of some names of a model. Default: the first."""
        value = self.values[key] if self.has(key) else choices[0]
        if value not in choices:
            self.refuse(key, f"none of {', '.join(choices)}")
        return str(value)

    def dtype(self, key: str) -> str | None:
        """Read a dtype that is taken as it is; None if the config does not give it."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or value not in _DTYPES:
            self.refuse(key, "no dtype that DeepSpeed knows")
        return _DTYPES[value]

    def plain_flag(self, key: str) -> bool:
        """Read a switch that is taken as it is. Default: off."""
        value = self.values.get(key)
        if not isinstance(value, bool | int | None):
            self.refuse(key, "not true or false, without quotation marks")
        return bool(value)

    def plain_count(self, key: str) -> int | None:
        """Read a count that is taken as it is; None if the config does not give it."""
        value = self.values.get(key)
        if value is None or value == AUTO:
            return None
        if isinstance(value, float) and value.is_integer() and value < _MOST:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(key, "not a count")
        return int(value)

    def refuse(self, key: str, what: str) -> NoReturn:
        """Refuse the value of a key, which is not what it must be."""
        found = show(self.values.get(key))
        raise UsageError(f"DeepSpeed config: {self.path}{key} is {found}, which is {what}")
