"""Each ZeRO stage to more ranks or to fewer: converted and loaded, and loaded directly."""

from tests.oracle.cases import BF16
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.reshardings import Resharding

SIZES = ((2, 3), (3, 2), (2, 3))
RESHARDINGS = [Resharding(case, n, m) for case, (n, m) in zip(BF16, SIZES, strict=True)]
