"""Draws `docs/heat-map.png` by the example of `docs/reading.md`: `python -m docs.site.heat_map`.

DeepSpeed trains on 4 CPU ranks first; the example runs on what it saved. It needs matplotlib.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from docs.site.recording import train

_DOCS: Final = Path(__file__).parent.parent
_EXAMPLE: Final = re.compile(r"^```py\n(import matplotlib.*?)^```", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Train, and run the example next to what was saved."""
    found = _EXAMPLE.search((_DOCS / "reading.md").read_text())
    if found is None:
        raise ValueError("docs/reading.md has no example that draws")
    with tempfile.TemporaryDirectory(prefix="streamshard-heat-map-") as name:
        place = Path(name)
        train(place)
        path = os.pathsep.join([str(_DOCS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": path}
        subprocess.run([sys.executable, "-c", found[1]], cwd=place, env=env, check=True)
        (_DOCS / "heat-map.png").write_bytes((place / "heat-map.png").read_bytes())


if __name__ == "__main__":
    main()
