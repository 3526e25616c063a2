"""Settings that all tests share."""

import os

from hypothesis import settings

# A busy machine is no failure, so nothing has a deadline. In CI the same examples every time: what
# is found by chance is for a developer's machine.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
