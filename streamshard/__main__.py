"""`python -m streamshard`: the command line, where its script is not on the path."""

from streamshard.cli import program

if __name__ == "__main__":
    program()
