"""One rank of test_leaving.py: leaving_main.py CASE, with torch's variables, in a folder of the pair's. Both ranks train over a private
server; then rank 0 leaves while rank 1 is slow, or does not come."""
import os
import pathlib
import signal
import socket
import sys
import time
import warnings

import torch
import torch.distributed as dist
from main_thread import ctrl_c, waits_in, when
from scripts import batches, loss_of, mlp
from torch.nn.parallel import DistributedDataParallel

import ballast.torch as bt

SLOW_SECONDS = 1.5


def is_there(address):
    host, port = address.rsplit(':', 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def await_end(address):
    while is_there(address):
        time.sleep(0.05)


def trained():
    torch.manual_seed(3)
    model = DistributedDataParallel(mlp())
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, dram='64MiB', threads=1, step_timeout=120.0)
    for batch in batches(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model, optimizer


def slow(case, model, optimizer):
    while case == 'drop' and not pathlib.Path('dropped').exists():
        time.sleep(0.05)
    time.sleep(SLOW_SECONDS)
    for parameter in model.parameters():  # from the server
        assert optimizer.state[parameter]['exp_avg'].abs().sum() > 0
    pathlib.Path('read').touch()


def first(case, optimizer, address):
    """Rank 0's end. Returns what is to live until the end of the script."""
    started = time.monotonic()
    if case == 'exit':
        return optimizer
    if case == 'error':
        raise ArithmeticError('the script ends with this')
    if case == 'drop':
        del optimizer  # a finalizer waits for nobody: rank 1 reads behind it
        pathlib.Path('dropped').touch()
        await_end(address)
    elif case == 'interrupted':
        try:
            when(lambda: waits_in('private_server.py'), ctrl_c)
            optimizer.close()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError('it waited for nobody')
    else:
        if case == 'stays':
            optimizer.job.connection._private._seconds = 2.0
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter('always')
            optimizer.close()
        assert [str(each.message)[:48] for each in told] == ['rank 1 has not closed its optimizer within 2 s ('] * (case == 'stays'), told
    assert not is_there(address)
    elapsed = time.monotonic() - started
    assert (2 if case == 'stays' else 0) <= elapsed < 110, elapsed  # step_timeout: 120 s
    return None


def main():
    case = sys.argv[1]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    model, optimizer = trained()
    address, rank = optimizer.job.options.servers[0], dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        holder = [optimizer]
        del optimizer
        holder.append(first(case, holder.pop(), address))
        return
    if case == 'killed':
        os.kill(os.getpid(), signal.SIGKILL)
    if case in ('stays', 'interrupted', 'error'):
        await_end(address)
        return
    slow(case, model, optimizer)
    if case == 'close':
        optimizer.close()
    # Else the process ends, and the optimizer with it.


if __name__ == '__main__':
    main()
