"""Puts a picture on an HTML page that fetches nothing and runs only its own script."""

from base64 import b64encode
from hashlib import sha256
from typing import Final

from streamshard.drawing.picture import Picture
from streamshard.drawing.svg import escaped, svg

_SCRIPT: Final = """
const tip = document.getElementById("tip");
const drawing = document.querySelector("svg");
const texts = new Map();
for (const title of drawing.querySelectorAll("rect > title")) {
  texts.set(title.parentNode, title.textContent);
  title.remove();
}
function show(event) {
  const text = texts.get(event.target);
  const colour = event.target.dataset ? event.target.dataset.u : undefined;
  for (const part of drawing.querySelectorAll("rect[data-u]")) {
    part.classList.toggle("off", colour !== undefined && part.dataset.u !== colour);
  }
  tip.hidden = text === undefined;
  if (text === undefined) return;
  const lines = text.split("\\n");
  tip.replaceChildren(...lines.map((line, number) => {
    const element = document.createElement(number ? "div" : "b");
    element.textContent = line;
    return element;
  }));
  const right = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.left = Math.max(4, right) + "px";
  tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
}
drawing.addEventListener("pointermove", show);
drawing.addEventListener("pointerdown", show);
drawing.addEventListener("pointerleave", () => show({ target: drawing }));
"""
_STYLE: Final = """
:root { color-scheme: light dark; }
body { margin: 0; background: #ffffff; }
main { overflow-x: auto; }
svg { display: block; margin: 0 auto; min-width: 720px; max-width: 1280px; width: 100%;
  height: auto; }
.off { opacity: 0.25; }
#tip { position: fixed; max-width: 30rem; padding: 8px 10px; border-radius: 6px; z-index: 1;
  font: 12px/1.5 system-ui, sans-serif; background: #1f2328; color: #ffffff;
  overflow-wrap: anywhere; pointer-events: none; }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; }
  #tip { background: #e6edf3; color: #0d1117; }
}
"""


def page(picture: Picture) -> str:
    """Draw a picture on an HTML page."""
    allowed = b64encode(sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(picture.title)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            f"<main>{svg(picture)}</main>",
            '<div id="tip" hidden></div>',
            f"<script>{_SCRIPT}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )
