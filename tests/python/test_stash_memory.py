"""Peak memory of a forward and a backward pass over 16 transformer blocks without recompute, with and without a stash on the disk. On the
CPU the device's memory is the process's own."""
import json

import pytest
from own_process import run_anew

# The system's allocator keeps freed memory of these sizes for itself unless they are mapped one by one. In both processes alike.
MALLOC = {'MALLOC_MMAP_THRESHOLD_': '65536'}

BODY = '''
    import hashlib, json, time
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from blocks import Stack, batch_of

    class Live(TorchDispatchMode):
        """The most bytes of tensors that were made within, and alive at one time."""
        def __init__(self):
            super().__init__()
            self.made, self.peak = {}, 0
        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            result = operation(*arguments, **(keywords or {}))
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    self.made[StorageWeakRef(storage)] = storage.nbytes()
            for gone in [each for each in self.made if each.expired()]:
                del self.made[gone]
            self.peak = max(self.peak, sum(self.made.values()))
            return result

    def memory(what):
        with open('/proc/self/status') as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

    model, x = Stack(128), batch_of(128, batch=24, length=256)
    model.blocks[0](x).sum().backward()  # libraries take their memory
    model.zero_grad()
    began, live = memory('VmRSS'), Live()
    stash = bt.stash(model, nvme='4GiB', directory='.') if STASH else torch.enable_grad()
    for counted in (True, False):  # counting takes time and memory
        model.zero_grad()
        with open('/proc/self/clear_refs', 'w') as file:
            file.write('5')
        start = time.perf_counter()
        with live if counted else torch.enable_grad():
            with stash:
                loss = model(x).square().mean()
            loss.backward()
        peak, seconds = memory('VmHWM') - began, time.perf_counter() - start
    stats = stash.stats() if STASH else {}
    bits = hashlib.sha256(b''.join(p.grad.numpy().tobytes() for p in model.parameters())).hexdigest()
    print(json.dumps({'peak': peak, 'live': live.peak, 'bits': bits, 'loss': loss.item(), 'seconds': seconds,
                      'gradients': sum(p.numel() for p in model.parameters()) * 4, **stats}))
    '''


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    def of(stash):
        body = BODY.replace('STASH', str(stash))
        return json.loads(run_anew(tmp_path_factory.mktemp('memory'), body, **MALLOC).stdout)

    return of(False), of(True)


def test_peak_memory_is_at_most_a_quarter(results):
    without, stashed = results
    print(f'without {without}\nwith    {stashed}')
    gradients = without['gradients']  # the parameters', which both keep
    assert without['live'] - gradients > 400 << 20
    assert stashed['live'] - gradients <= (without['live'] - gradients) / 4
    assert stashed['peak'] - gradients <= (without['peak'] - gradients) / 4


def test_bits_are_the_same(results):
    without, stashed = results
    assert (stashed['bits'], stashed['loss']) == (without['bits'], without['loss'])


def test_each_byte_goes_once(results):
    """To the disk, and back but for what is in staging memory when backward begins."""
    stashed = results[1]
    assert stashed['written'] <= stashed['moved'] <= 1.02 * stashed['written']
    assert 0.9 * stashed['moved'] < stashed['read'] <= stashed['moved']
