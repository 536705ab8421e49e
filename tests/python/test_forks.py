"""What a step costs while a data loader's worker, a forked child of the trainer, is alive."""
import os
import signal

import pytest
from own_process import run_anew as run


@pytest.mark.parametrize('place', ["durability='none'", "durability='step', directory='state', nvme='1GiB'"])
def test_a_step_beside_a_forked_worker_copies_no_state(place, tmp_path):
    run(tmp_path, f'''
        import resource
        model = torch.nn.Linear(2048, 2048, bias=False)
        optimizer = bt.AdamW(model.parameters(), dram='256MiB', threads=2, {place})
        model.weight.grad = torch.full_like(model.weight, 0.01)
        def faults_of_a_step():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            optimizer.step()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        faults_of_a_step()
        alone = min(faults_of_a_step() for _ in range(3))
        worker = iter(torch.utils.data.DataLoader(range(64), num_workers=1))
        next(worker)
        beside = faults_of_a_step()
        # The parameters are the trainer's and the child's alike, so the step copies their pages; moments are three times as many
        # bytes with the master weights, and no child's.
        pages = model.weight.numel() * 4 // resource.getpagesize()
        assert beside - alone < 1.5 * pages, (alone, beside, pages)
        ''')


def test_a_forked_child_reads_the_parameters(tmp_path):
    run(tmp_path, '''
        model = mlp()
        optimizer = make(model)
        for batch in batches(2):
            loss_of(model, batch).backward()
            optimizer.step()
        expected = sum(p.sum().item() for p in model.parameters())
        child = os.fork()
        if child == 0:
            os._exit(0 if sum(p.sum().item() for p in model.parameters()) == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        # A child that ends as processes do runs finalisers over what it inherited.
        child = os.fork()
        if child == 0:
            import gc
            del optimizer
            gc.collect()
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        ''')


def test_a_child_of_a_killed_trainer_does_not_keep_its_directory(tmp_path):
    try:
        run(tmp_path, '''
            model = mlp()
            optimizer = make(model)
            loss_of(model, next(batches(1))).backward()
            optimizer.step()
            child = os.fork()
            if child == 0:
                os.close(1), os.close(2)
                while True:
                    signal.pause()
            open('child', 'w').write(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
            ''', expect=-9)
        run(tmp_path, 'assert make(mlp(), resume="must").resume().step == 1')
    finally:
        os.kill(int((tmp_path / 'child').read_text()), signal.SIGKILL)  # it was there all the while
