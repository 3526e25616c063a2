"""Draws: pictures of how parameters are cut, as SVG and as a page; knows no file and no format."""
