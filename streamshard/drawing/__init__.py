"""Puts reports on pages; knows no file and no format."""
