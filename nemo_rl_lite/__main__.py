"""`python -m nemo_rl_lite VERB ...`: the console script."""

from nemo_rl_lite.cli import main

main()
