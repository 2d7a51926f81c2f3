"""``python -m niwaki``."""

from niwaki.cli.main import main

main()
