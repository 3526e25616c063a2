"""Pickles without running them: inert nodes, the machine that reads them, the writer."""
