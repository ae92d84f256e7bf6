"""`python -m nemo_rl_lite COMMAND ...`, the same as `nrl-lite COMMAND ...`."""

from nemo_rl_lite.cli import main

main()
