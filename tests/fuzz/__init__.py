"""Coverage-guided fuzzing of what reads files, and the replay of what it has found."""
