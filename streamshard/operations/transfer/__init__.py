"""What verbs that write do alike: plan, estimate, stage, run, read back, commit, report."""
