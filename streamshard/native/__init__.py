"""Makes the native files of a target: their settings, content and regions."""
