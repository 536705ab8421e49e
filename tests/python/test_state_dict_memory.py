"""What state_dict() of a job in memory takes: its result, 12 bytes a bf16 parameter, and nothing beside it."""
from own_process import run_anew


def test_state_dict_of_a_memory_only_job_takes_its_result_and_no_copy(tmp_path):
    run_anew(tmp_path, '''
    def memory(what):
        with open('/proc/self/status') as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

    parameters = [(f'p{i}', torch.nn.Parameter(torch.zeros(4 << 20, dtype=torch.bfloat16))) for i in range(4)]
    optimizer = bt.AdamW(parameters, lr=1e-3, threads=2, dram='1GiB')
    for _ in range(2):
        for _, parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1)
        optimizer.step()
    with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # the peak begins anew
    before = memory('VmRSS')
    state = optimizer.state_dict()
    result = sum(tensor.nbytes for entry in state['state'].values() for tensor in entry.values())
    assert 12 * (16 << 20) <= result < 13 * (16 << 20), result
    torch.save(state, 'state.pt')
    beyond = memory('VmHWM') - before - result
    assert beyond < 64 << 20, f'{beyond >> 20} MiB beside the result'
    ''')
