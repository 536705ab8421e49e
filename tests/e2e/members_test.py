#!/usr/bin/env python3
"""Jobs with two copies of each chunk that change their servers, when their group starts again or while it trains, with a real etcd.

Usage: members_test.py BIN [NAME,...]     BIN: folder of the programs. NAME: a part of a test's name. Exit 77: no etcd here.
Every run ends with the bits of the same training in one process.
"""
import collections
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request

from etcd_jobs import BIN, MODEL, Server, Training, digest_of, job_key, main, open_again, reference, run, several, start, wait_for

SHARDS = 1024


def ctl(etcd, prefix, command, *words):
    code, text = run(BIN / 'ballastctl', command, '--job', prefix, *words, '--servers', etcd.url(prefix))
    return code, text


def train(etcd, prefix, *more):
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', f'{etcd.url(prefix)}?servers=3', '--job', prefix, '--replicas', '2', *more)
    assert code == 0, text
    return text


def go_on(etcd, prefix, *more, failover_after=3):
    """The group starts again. failover_after: where no server is lost, more than a busy machine needs for an answer."""
    code, text = open_again(etcd.url(prefix), prefix, '--failover-after', failover_after, *more)
    assert code == 0, text
    return text


def table_of(etcd, prefix):
    return job_key(etcd, prefix, prefix)['table']


def members(etcd, prefix):
    return [member['server_id'] for member in table_of(etcd, prefix)['members']]


def places(etcd, prefix, kind):
    """{server: shards that it has as `kind`: holders, fillers}"""
    table = table_of(etcd, prefix)
    names = [member['server_id'] for member in table['members']]
    return collections.Counter(names[member] for shard in table['shards'] for member in shard.get(kind, []))


def await_copies(etcd, prefix):
    """Servers copy by themselves, whether a group trains or not; a group that trained long enough has ended the change too."""
    def all_copied():
        fills = re.findall(r'has copied (\d+) of (\d+) shards', ctl(etcd, prefix, 'members')[1])
        return len(fills) == len(places(etcd, prefix, 'fillers')) and all(have == want for have, want in fills)
    wait_for(all_copied, 'all copies are made')


def check_settled(etcd, prefix, names):
    table = table_of(etcd, prefix)
    assert sorted(members(etcd, prefix)) == sorted(names), table['members']
    for shard in table['shards']:
        assert len(shard['holders']) == table['replicas'] and not shard.get('fillers') and not shard.get('leaving'), shard
    holds = places(etcd, prefix, 'holders')
    share = SHARDS * table['replicas'] / len(names)
    assert all(abs(shards - share) <= 0.05 * share + 2 for shards in holds.values()), f'level: {holds}'


def wipe(server, folder, name):
    server.end(signal.SIGKILL)
    shutil.rmtree(folder / name)


def test_a_wiped_server_fills_and_counts(etcd, folder, bits):
    a, b, _ = several(etcd, 'wiped', folder)
    train(etcd, 'wiped', '--stop-at', '8')
    wipe(b, folder, 'b')
    text = go_on(etcd, 'wiped', '--stop-at', '14')
    assert "job 'wiped' goes on without 'b' (last seen at" in text, text
    assert re.search(r"server 'a' copies \d+ of 1024 shards; its copies count once all are made", text), text
    b.start()
    wait_for(lambda: len(etcd.entries('wiped')) == 3, 'b is back, without anything')
    text = go_on(etcd, 'wiped', '--stop-at', '22')
    assert re.search(r"server 'b' joins and copies \d+ of 1024 shards; its copies count once all are made", text), text
    await_copies(etcd, 'wiped')
    text += go_on(etcd, 'wiped', '--stop-at', '28')
    assert re.search(r"server 'b' has copied \d+ of 1024 shards and holds them now", text), text
    check_settled(etcd, 'wiped', 'abc')
    wipe(a, folder, 'a')
    text = go_on(etcd, 'wiped')
    assert "goes on without 'a'" in text and digest_of(text) == bits, text


def test_a_spare_takes_the_place_of_a_lost_server(etcd, folder, bits):
    _, b, c, *_ = several(etcd, 'spare', folder)
    train(etcd, 'spare', '--stop-at', '8')
    Server(etcd, 'spare', 'd', folder)
    wait_for(lambda: len(etcd.entries('spare')) == 4, 'd is registered')
    before = etcd.ctl('get', '--print-value-only', '/spare/jobs/spare')
    text = go_on(etcd, 'spare', '--stop-at', '12')
    assert 'joins' not in text and members(etcd, 'spare') == ['a', 'b', 'c'], text
    assert table_of(etcd, 'spare') == json.loads(before)['table'], 'a job that has its servers takes no other'
    wipe(c, folder, 'c')
    text = go_on(etcd, 'spare', '--stop-at', '18')
    assert "goes on without 'c'" in text and "server 'd' joins and copies" in text, text
    await_copies(etcd, 'spare')
    go_on(etcd, 'spare', '--stop-at', '24')
    check_settled(etcd, 'spare', 'abd')
    wipe(b, folder, 'b')
    assert digest_of(go_on(etcd, 'spare')) == bits


def test_a_server_comes_back_with_an_old_state(etcd, folder, bits):
    """It was left out meanwhile: what it has is of no use, and it copies all anew."""
    a, b, _ = several(etcd, 'stale', folder)
    train(etcd, 'stale', '--stop-at', '8')
    b.end(signal.SIGKILL)
    text = go_on(etcd, 'stale', '--stop-at', '16')
    assert "goes on without 'b'" in text and members(etcd, 'stale') == ['a', 'c'], text
    b.start()
    wait_for(lambda: len(etcd.entries('stale')) == 3, 'b is back')
    text = go_on(etcd, 'stale', '--stop-at', '22')
    assert "server 'b' joins and copies" in text, text
    await_copies(etcd, 'stale')
    go_on(etcd, 'stale', '--stop-at', '28')
    check_settled(etcd, 'stale', 'abc')
    wipe(a, folder, 'a')
    assert digest_of(go_on(etcd, 'stale')) == bits


def test_add_drain_replace(etcd, folder, bits):
    several(etcd, 'moves', folder, 'abcd')
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', f'{etcd.url("moves")}?servers=4', '--job', 'moves', '--replicas', '2',
                     '--stop-at', '4')
    assert code == 0, text
    step = 4

    def change(command, *words, after, joins=(), leaves=()):
        nonlocal step
        code, text = ctl(etcd, 'moves', command, *words)
        assert code == 0 and 'The group at work begins with it' in text, text
        text = go_on(etcd, 'moves', '--stop-at', step + 3, failover_after=60)
        for name in joins:
            assert f"server '{name}' joins and copies" in text, text
        for name in leaves:
            assert f"server '{name}' leaves once others have copied" in text, text
        await_copies(etcd, 'moves')
        text += go_on(etcd, 'moves', '--stop-at', step + 6, failover_after=60)
        for name in leaves:
            assert f"server '{name}' has left; others have all that it had" in text, text
        check_settled(etcd, 'moves', after)
        step += 6
    change('drain', '--server', 'd', after='abc', leaves='d')
    change('add', '--server', 'd', after='abcd', joins='d')
    change('drain', '--server', 'b', after='acd', leaves='b')
    change('replace', '--server', 'c', '--by', 'b', after='abd', joins='b', leaves='c')
    status = json.loads(run(BIN / 'ballastctl', 'status', '--json', '--servers', f'{etcd.url("moves")}?servers=4')[1])
    has = [server['status']['server_id'] for server in status['servers']
           if any(job['name'] == 'moves' for job in server['status'].get('jobs', []))]
    assert sorted(has) == ['a', 'b', 'd'], 'who left has dropped the job'
    assert digest_of(go_on(etcd, 'moves', failover_after=60)) == bits


def test_more_and_fewer_copies(etcd, folder, bits):
    _, b, c = several(etcd, 'copies', folder)
    train(etcd, 'copies', '--stop-at', '6')
    code, text = ctl(etcd, 'copies', 'replicas', '--copies', '3')
    assert code == 0 and '3 copies of each chunk' in text, text
    # The trainer's program still says two: an operator's number goes before it.
    text = go_on(etcd, 'copies', '--replicas', '2', '--stop-at', '12')
    assert re.search(r"server 'a' copies \d+ of 1024 shards", text), text
    await_copies(etcd, 'copies')
    go_on(etcd, 'copies', '--stop-at', '18')
    check_settled(etcd, 'copies', 'abc')
    assert table_of(etcd, 'copies')['replicas'] == 3
    wipe(b, folder, 'b')
    wipe(c, folder, 'c')
    text = go_on(etcd, 'copies', '--stop-at', '24')
    assert "goes on without 'b'" in text and members(etcd, 'copies') == ['a'], text
    assert digest_of(go_on(etcd, 'copies')) == bits


LONG = ['--steps', '100000', *MODEL[2:]]


def check_bits(etcd, prefix, training):
    """Ends a training of LONG, and compares its state a few steps later with that of undisturbed training."""
    assert training.process.poll() is None, training.log.read_text()
    training.process.send_signal(signal.SIGTERM)
    training.process.wait(120)
    last = re.findall(r'^step +(\d+)/', training.log.read_text(), re.M)[-1]
    model = [*LONG, '--stop-at', str(int(last) + 5)]
    code, text = run(BIN / 'train_bytes_lm', *model, '--servers', etcd.url(prefix), '--job', prefix, '--resume', 'must')
    assert code == 0 and digest_of(text) == reference(model), text


def test_a_group_at_work_loses_servers(etcd, folder, bits):
    a, b, c = several(etcd, 'live', folder)
    training = Training(f'{etcd.url("live")}?servers=3', 'live', folder, '--replicas', '2', '--failover-after', '1', model=LONG)
    training.step(4)
    wipe(a, folder, 'a')
    training.says("goes on without 'a'")
    wait_for(lambda: not places(etcd, 'live', 'fillers'), 'b and c have all')
    Server(etcd, 'live', 'd', folder)
    training.says(r"server 'd' has copied \d+ of 1024 shards and holds them now")
    check_settled(etcd, 'live', 'bcd')
    wipe(b, folder, 'b')
    training.says("goes on without 'b'")
    wait_for(lambda: not places(etcd, 'live', 'fillers'), 'c and d have all')
    check_bits(etcd, 'live', training)


def test_a_group_at_work_loses_two_servers_at_once(etcd, folder, bits):
    """No call goes to the second while the first is waited for."""
    a, b, c, d = several(etcd, 'two', folder, 'abcd')
    training = Training(f'{etcd.url("two")}?servers=4', 'two', folder, '--replicas', '3', '--failover-after', '1', model=LONG)
    training.step(4)
    a.process.kill()
    b.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: members(etcd, 'two') == ['c', 'd'], 'neither is a member any more')
    assert 'cannot go on without' not in training.log.read_text(), training.log.read_text()
    wait_for(lambda: not places(etcd, 'two', 'fillers'), 'c and d have all')
    # Now either of them is enough, and neither is there.
    c.process.kill()
    d.end(signal.SIGKILL)
    training.says(r"cannot go on without 'c', 'd' yet \(no answer for \d+ s, \d+ s\): no server that answers holds 1024 of 1024 shards of job "
                  r"'two', which 'c' \(last seen at \S+\), 'd' \(last seen at \S+\) have: start one of them with its data directory")
    d.start()
    training.says("goes on without 'c'")
    assert 'ballastctl drop' not in training.log.read_text(), 'nobody said that anything is lost'
    check_bits(etcd, 'two', training)


def rot(folder, name):
    """Flips a byte of each block that a server that has ended left on its disk, but for zeros."""
    with open(folder / name / 'nvme.tier', 'r+b') as tier:
        at = 0
        while block := tier.read(4096):
            if any(block):
                tier.seek(at + 100)
                tier.write(bytes([block[100] ^ 1]))
            at += 4096
            tier.seek(at)


def damaged_chunks(server):
    metrics = re.findall(r'metrics=(\S+)', server.text())[-1]
    with urllib.request.urlopen(f'http://{metrics}/metrics') as page:
        return sum(int(count) for count in re.findall(r'^ballast_job_damaged_chunks_total\{.*\} (\d+)', page.read().decode(), re.M))


def test_a_group_at_work_outlives_damage(etcd, folder, bits):
    _, b, _ = several(etcd, 'rot', folder)
    training = Training(f'{etcd.url("rot")}?servers=3', 'rot', folder, '--replicas', '2', '--failover-after', '60', model=LONG)
    training.step(20)
    b.end(signal.SIGKILL)
    rot(folder, 'b')
    b.start()
    wait_for(lambda: 'has copied' in b.text(), 'b has copied what was damaged')
    assert re.search(r"job 'rot': this server copies chunk \d+ from another one", b.text()), b.text()
    assert damaged_chunks(b) > 0
    assert not places(etcd, 'rot', 'fillers') and members(etcd, 'rot') == ['a', 'b', 'c'], 'nobody had to change the table'
    check_bits(etcd, 'rot', training)


def test_a_group_at_work_heeds_wishes(etcd, folder, bits):
    several(etcd, 'wish', folder, 'abcd')
    training = Training(f'{etcd.url("wish")}?servers=4', 'wish', folder, '--replicas', '2', model=LONG)
    training.step(4)
    for command, words, after in (('drain', ('--server', 'd'), 'abc'), ('replace', ('--server', 'a', '--by', 'd'), 'bcd'),
                                  ('remove', ('--now', '--server', 'b'), 'bcd'), ('replicas', ('--copies', '3'), 'bcd')):
        code, text = ctl(etcd, 'wish', command, *words)
        assert code == 0, text
        if command == 'remove':
            training.says(r"goes on without 'b' \(last seen at \S+\), removed by an operator")
            training.says("server 'b' joins and copies")

        def settled():
            check_settled(etcd, 'wish', after)
            return command != 'replicas' or table_of(etcd, 'wish')['replicas'] == 3
        wait_for(settled, f'{command} is done')
    check_bits(etcd, 'wish', training)


def two_ranks(etcd, prefix, folder, *more):
    """Rank 0's output. With two ranks training has the same bits as with one."""
    meeting = folder / f'meeting{len(list(folder.glob("meeting*")))}'
    logs = [folder / f'{meeting.name}.rank{rank}.log' for rank in range(2)]
    ranks = [start(BIN / 'train_bytes_lm', *MODEL, '--servers', f'{etcd.url(prefix)}?servers=3', '--job', prefix, '--resume', 'auto',
                   '--replicas', '2', '--failover-after', '3', '--rendezvous', meeting, '--rank', rank, '--world-size', 2, *more, log=log)
             for rank, log in enumerate(logs)]
    codes = [process.wait(200) for process in ranks]
    text = logs[0].read_text()
    assert codes == [0, 0], f'{text}\n--- rank 1\n{logs[1].read_text()}'
    return text


def test_all_ranks_reach_the_servers_that_join(etcd, folder, bits):
    a, b, _ = several(etcd, 'ranks', folder)
    two_ranks(etcd, 'ranks', folder, '--stop-at', '8')
    wipe(b, folder, 'b')
    text = two_ranks(etcd, 'ranks', folder, '--stop-at', '14')
    assert "goes on without 'b'" in text, text
    b.start()
    text = two_ranks(etcd, 'ranks', folder, '--stop-at', '22')
    assert "server 'b' joins and copies" in text, text
    await_copies(etcd, 'ranks')
    two_ranks(etcd, 'ranks', folder, '--stop-at', '28')
    check_settled(etcd, 'ranks', 'abc')
    wipe(a, folder, 'a')
    assert digest_of(two_ranks(etcd, 'ranks', folder)) == bits


def test_two_operators_at_once(etcd, folder, bits):
    several(etcd, 'both', folder)
    train(etcd, 'both', '--stop-at', '4')
    for name in 'de':
        Server(etcd, 'both', name, folder)
    wait_for(lambda: len(etcd.entries('both')) == 5, 'd and e are registered')
    asked = [subprocess.Popen([str(BIN / 'ballastctl'), 'add', '--job', 'both', '--server', name, '--servers', etcd.url('both')],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for name in 'de']
    said = [process.communicate(timeout=120)[0] for process in asked]
    assert [process.returncode for process in asked] == [0, 0], said
    # Whoever came second was told of the first, and added to it.
    told = [text for text in said if 'so far: 4 server(s)' in text or 'another operator wrote meanwhile: 4 server(s)' in text]
    assert len(told) == 1 and "shall have 5 server(s)" in told[0], said
    wish = json.loads(etcd.ctl('get', '--print-value-only', '/both/jobs/both/want'))
    assert sorted(wish['servers']) == ['d', 'e'] and wish['count'] == 5, wish
    code, text = ctl(etcd, 'both', 'members')
    assert code == 0 and 'an operator wants 5 server(s)' in text and 'it wants 5 servers, and has 3' in text, text
    # A job of the same name that comes later is none of theirs.
    code, text = ctl(etcd, 'both', 'drop')
    assert code == 0, text
    assert not etcd.ctl('get', '/both/jobs/both/want'), 'the wish goes with the job'


def test_wishes_that_are_refused(etcd, folder, bits):
    several(etcd, 'no', folder)
    train(etcd, 'no', '--stop-at', '4')
    before = job_key(etcd, 'no', 'no')

    def refused(*words):
        code, text = ctl(etcd, 'no', *words)
        assert code == 1 and not etcd.ctl('get', '/no/jobs/no/want'), text
        return text
    assert "server 'x' is not registered; registered are a, b, c" in refused('add', '--server', 'x')
    assert "server 'x' is not registered" in refused('replace', '--server', 'a', '--by', 'x')
    assert "the job has server 'a' already" in refused('add', '--server', 'a')
    assert "does not have server 'x'; it has, or shall have, 'a', 'b', 'c'" in refused('drain', '--server', 'x')
    assert "--lost: server 'b' is not lost, but registered at" in refused('drain', '--lost', '--server', 'b')
    assert '2 copies of each chunk on 3 server(s), and without 2 of them there is no server' in refused('drain', '--server', 'a,b')
    assert 'got 4, and the job wants 3 server(s)' in refused('replicas', '--copies', '4')
    assert 'shards would be lost: no other server holds them' in refused('remove', '--now', '--server', 'a,b')
    code, text = ctl(etcd, 'no', 'remove', '--server', 'a')
    assert code == 2 and '--now is required' in text, text
    code, text = ctl(etcd, 'no', 'replicas', '--copies', '5')
    assert code == 2 and '--copies' in text, text
    code, text = run(BIN / 'ballastctl', 'add', '--job', 'no', '--server', 'd', '--servers', '127.0.0.1:7070')
    assert code == 2 and 'etcd://host:port/prefix' in text, text
    code, text = run(BIN / 'ballastctl', 'add', '--job', 'none', '--server', 'a', '--servers', etcd.url('no'))
    assert code == 1 and 'there is no key /no/jobs/none' in text, text
    # One copy of each chunk: such a job has no table.
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', f'{etcd.url("no")}?servers=3', '--job', 'one', '--stop-at', '2')
    assert code == 0, text
    code, text = run(BIN / 'ballastctl', 'drain', '--job', 'one', '--server', 'a', '--servers', etcd.url('no'))
    assert code == 1 and "job 'one' has one copy of each chunk and no table of them" in text, text
    assert job_key(etcd, 'no', 'no') == before
    # A server that was there when the operator asked, and is gone when the group opens the job; and a key of somebody's own.
    etcd.ctl('put', '/no/jobs/no/want', json.dumps({'servers': ['x'], 'count': 4, 'life': before['table']['life']}))
    text = go_on(etcd, 'no', '--stop-at', '8')
    assert 'joins' not in text and members(etcd, 'no') == ['a', 'b', 'c'], text
    etcd.ctl('put', '/no/jobs/no/want', 'four, please')
    text = go_on(etcd, 'no')
    assert 'the wish for its servers is not heeded' in text and '/no/jobs/no/want' in text, text
    assert digest_of(text) == bits


def test_a_spare_without_room(etcd, folder, bits):
    _, b, _ = several(etcd, 'room', folder)
    train(etcd, 'room', '--stop-at', '8')
    small = Server(etcd, 'room', 'd', folder, dram='64MiB', nvme='1MiB')
    wait_for(lambda: len(etcd.entries('room')) == 4, 'd is registered')
    wipe(b, folder, 'b')
    text = go_on(etcd, 'room', '--stop-at', '16')
    assert "server 'd' does not join: " in text and 'short' in text, text
    assert "goes on without 'b'" in text and members(etcd, 'room') == ['a', 'c'], text
    # As a wish it is refused too, and the job keeps what it has.
    table = table_of(etcd, 'room')
    code, text = ctl(etcd, 'room', 'replace', '--server', 'a', '--by', 'd')
    assert code == 0, text
    text = go_on(etcd, 'room', '--stop-at', '24')
    assert 'is not heeded, and its servers stay: ' in text and members(etcd, 'room') == ['a', 'c'], text
    assert table_of(etcd, 'room')['wanted_servers'] == table['wanted_servers'] == 3
    small.end(signal.SIGTERM)
    b.start()
    assert digest_of(go_on(etcd, 'room')) == bits


sys.exit(main({name: test for name, test in globals().items() if name.startswith('test_')}))
