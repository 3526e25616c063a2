"""The engine with real files, and with files that misbehave."""
