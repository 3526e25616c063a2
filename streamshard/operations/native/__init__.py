"""The native files of a target: settings, content, regions."""
