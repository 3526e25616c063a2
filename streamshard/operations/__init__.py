"""One folder per verb, and what verbs share."""
