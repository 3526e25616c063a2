"""Other tensor, pipeline and expert parallel degrees: makes a source from a source."""
