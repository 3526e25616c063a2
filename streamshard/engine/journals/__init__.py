"""What an unfinished target has already, recorded so that a later run goes on from there."""
