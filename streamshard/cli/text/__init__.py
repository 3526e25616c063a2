"""Lays out reports as text for people."""
