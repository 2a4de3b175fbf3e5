"""`python -m torchremat` is the command `torchremat`."""

from torchremat.cli.app import main

if __name__ == "__main__":
    main(prog_name="torchremat")
