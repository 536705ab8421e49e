"""One rank of test_hosts.py, in a network namespace of its own, as on another host: hosts_main.py FOLDER NAMESPACE RANK SERVER ADDRESS
ADDRESS6 PORT INTERFACE. ADDRESS, ADDRESS6: of rank 0's host, with {} for the number of the host. PORT: the first of several."""
import ctypes
import itertools
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import ballast
import ballast.torch as bt

_CLONE_NEWNET = 0x40000000  # sched.h

folder, namespace, rank, server, address, address6, port, interface = sys.argv[1:]
folder, rank = pathlib.Path(folder), int(rank)
with open(f'/run/netns/{namespace}', 'rb') as file:
    assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
torch.set_num_threads(1)
ports = itertools.count(int(port))
own, own6, master, master6 = address.format(rank + 1), address6.format(rank + 1), address.format(1), address6.format(1)
results = {}


def case(name, init_method, environment=None, master=None, **more):
    """What the rank was told, or the address that it told the others. environment: not torch's, which knows the interface, too."""
    for variable in ('GLOO_SOCKET_IFNAME', 'BALLAST_HOST'):
        os.environ.pop(variable, None)
    os.environ.update(MASTER_ADDR=master or 'none', MASTER_PORT=str(next(ports)))
    dist.init_process_group('gloo', init_method=init_method.format(port=os.environ['MASTER_PORT']), rank=rank, world_size=2)
    os.environ.update(environment or {})
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    try:
        arguments = {'name': name, 'servers': server, 'step_timeout': 120.0, 'open_timeout': 120.0, **more}
        optimizer = bt.AdamW(model.named_parameters(), **arguments)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        results[name] = optimizer.job.options.host
        optimizer.close()
    except ballast.Error as error:
        results[name] = str(error)
    print(name, results[name], flush=True)
    dist.destroy_process_group()


file = f'file://{folder}/meeting-'
case('environment', 'env://', master=master)
case('tcp', f'tcp://{master}:{{port}}')
case('tcp6', f'tcp://[{master6}]:{{port}}')
case('own_name_is_loopback', 'env://', master='127.0.1.1' if rank == 0 else master)
case('file', file + 'a')
case('file_host', file + 'b', host=own)
case('file_host6', file + 'c', host=own6)
case('file_variable', file + 'd', {'BALLAST_HOST': own})
case('file_interface', file + 'e', {'GLOO_SOCKET_IFNAME': interface})
case('interface6', f'tcp://[{master6}]:{{port}}', {'GLOO_SOCKET_IFNAME': f'none0,{interface}'})
case('loopback', f'tcp://{master}:{{port}}', host='127.0.0.1')
case('no_server', f'tcp://{master}:{{port}}', servers=None, dram='64MiB')
for name, environment, more in (('elsewhere', {}, {'host': '192.0.2.1'}), ('no_interface', {'GLOO_SOCKET_IFNAME': 'none0'}, {})):
    case(name, f'tcp://{master}:{{port}}', environment, **more)
(folder / f'{rank}.json').write_text(json.dumps(results), encoding='utf-8')
