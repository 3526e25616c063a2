"""Other tensor, pipeline and expert parallel degrees: what is put together and cut again."""
