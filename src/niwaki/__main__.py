"""``niwaki``, and ``python -m niwaki``."""

import signal


def run() -> None:
    """The entry point of the command line."""
    # Ctrl-C ends the program without a traceback until there is somebody to say more.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from niwaki.cli.main import main

    main()


if __name__ == "__main__":
    run()
