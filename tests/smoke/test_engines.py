"""Each ZeRO stage to more ranks and to fewer: converted and loaded, and loaded directly."""

from tests.oracle.cases import BF16
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.reshardings import Resharding

RESHARDINGS = [Resharding(case, n, m) for case in BF16 for n, m in ((2, 3), (3, 2))]
