"""Styles, scripts, and texts as pages hold them."""

from pkgutil import get_data


def asset(name: str) -> str:
    """Return a style or a script."""
    return (get_data("streamshard.drawing", name) or b"").decode()


def escaped(text: str) -> str:
    """Escape a text for HTML, within elements and within double quotes.

    The standard library is not used: html loads all entities.

    >>> escaped('<a "b" & c>')
    '&lt;a &quot;b&quot; &amp; c&gt;'
    """
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    for letter, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        shown = shown.replace(letter, entity)
    return shown
