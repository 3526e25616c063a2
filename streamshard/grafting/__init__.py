"""`graft`: puts a training into what the job of a changed model saved before its first step."""
