"""`python -m hpctrain` is `hpctrain`."""

from hpctrain.cli import main

if __name__ == "__main__":
    main(prog_name="hpctrain")
