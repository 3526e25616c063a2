"""The common steps of verbs that write: plan, estimate, stage, run, read back, commit, report."""
