"""Pickles without running them: inert nodes, the unpickler that reads them, the writer."""
