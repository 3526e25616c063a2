"""Draws pictures of how parameters are cut, as SVG and HTML; knows no file and no format."""
