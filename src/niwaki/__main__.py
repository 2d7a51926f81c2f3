"""``python -m niwaki``."""

from niwaki.cli import main

main()
