"""The command line: argv, one call, exit code."""
