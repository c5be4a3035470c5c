"""Waits for what other processes do, with a deadline."""

import time


def poll(what, read, condition, seconds=60):
    """Reads until condition(value) holds; the value is returned."""
    deadline = time.monotonic() + seconds
    value = None
    while time.monotonic() < deadline:
        value = read()
        if condition(value):
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}; last: {value}")
