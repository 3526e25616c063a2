"""One file per verb: read headers, plan, check budget and disk, run, commit."""
