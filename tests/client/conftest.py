"""For every test of the client."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Whoever runs the tests in a shell's background: what is tested of Ctrl-C is what a person's terminal does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
