"""The command line: parse argv, call one operation, return the exit code."""
