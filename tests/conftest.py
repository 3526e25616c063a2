"""Settings for all tests."""

import os

from hypothesis import settings

# In CI a failure should be the change's: the same examples every time, and no limit on how long
# one may take on a machine that does other work. Elsewhere new examples are looked for.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
