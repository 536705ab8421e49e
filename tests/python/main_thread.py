"""Acts at a moment of the main thread that a test names, on a machine of any speed: other threads look at what it waits for."""
import os
import signal
import sys
import threading
import time


def waits_in(file):
    """Whether the main thread waits for another one, in a function of the file of that name or in what it called."""
    frame = sys._current_frames()[threading.main_thread().ident]
    if frame.f_code.co_filename != threading.__file__ or frame.f_code.co_name != 'wait':
        return False
    while frame is not None and os.path.basename(frame.f_code.co_filename) != file:
        frame = frame.f_back
    return frame is not None


def when(condition, act):
    """Calls act() once condition() holds, on a thread of its own; returns at once."""
    def run():
        while not condition():
            time.sleep(0.002)
        act()
    threading.Thread(target=run, daemon=True).start()


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def unread_bytes(address):
    """Bytes that the server at 127.0.0.1 has been sent and has not read, over all of its connections."""
    port = f':{int(address.rsplit(":", 1)[1]):04X}'
    with open('/proc/net/tcp', encoding='ascii') as lines:
        rows = [line.split() for line in lines][1:]
    established = '01'  # of include/net/tcp_states.h
    return sum(int(row[4].split(':')[1], 16) for row in rows if row[1].endswith(port) and row[3] == established)
