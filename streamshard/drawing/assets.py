"""Styles, scripts, and texts as pictures and pages hold them."""

from pkgutil import get_data


def asset(name: str) -> str:
    """Return a style or a script."""
    return (get_data("streamshard.drawing", name) or b"").decode()


def clean(text: str) -> str:
    """Replace unprintable characters by their escapes; XML cannot hold control characters."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def escaped(text: str) -> str:
    """Escape a text for XML and HTML, within elements and within double quotes.

    The standard library is not used: xml.sax imports the HTTP modules, and html loads all entities.

    >>> escaped('<a "b" & c>')
    '&lt;a &quot;b&quot; &amp; c&gt;'
    """
    shown = clean(text)
    for letter, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        shown = shown.replace(letter, entity)
    return shown
