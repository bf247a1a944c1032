"""`python -m ringtide.cli`, for torchrun."""

from ringtide.cli import main

main(prog_name="ringtide")
