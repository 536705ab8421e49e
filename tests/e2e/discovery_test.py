#!/usr/bin/env python3
"""Servers found through a real etcd: registered, killed and replaced under the same id, etcd itself killed during a run.

Usage: discovery_test.py BIN [NAME,...]     BIN: folder of the programs. NAME: a part of a test's name. Exit 77: no etcd here.
Every run ends with the bits of the same training in one process.
"""
import json
import os
import shutil
import signal
import socket
import sys
import time
import types

from etcd_jobs import BIN, HOST, MODEL, Etcd, Server, Training, digest_of, job_key, jobs, main, run, start, wait_for

LEASE = 10  # seconds, of a server's entry; renewed each third of it


def issue(folder, ca, name):
    """ca.crt and ca.key, where they are not there yet, and name.crt and name.key by this CA."""
    def openssl(command):
        code, text = run('env', '-C', folder, 'openssl', *command.split())
        assert code == 0, text
    key = 'ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
    if not (folder / f'{ca}.crt').exists():
        openssl(f'req -x509 -newkey {key} -keyout {ca}.key -out {ca}.crt -days 2 -subj /CN={ca}')
    openssl(f'req -newkey {key} -keyout {name}.key -out {name}.csr -subj /CN={name}')
    (folder / 'ext').write_text(f'subjectAltName=IP:{HOST}\nextendedKeyUsage=serverAuth,clientAuth\n')
    openssl(f'x509 -req -in {name}.csr -CA {ca}.crt -CAkey {ca}.key -CAcreateserial -days 2 -extfile ext -out {name}.crt')


def test_registered_found_and_unregistered(etcd, folder, bits):
    a, b = Server(etcd, 'found', 'a', folder), Server(etcd, 'found', 'b', folder, '--advertise', 'localhost:0')
    entries = wait_for(lambda: len(etcd.entries('found')) == 2 and etcd.entries('found'), 'both are registered')
    assert entries['a'] == {'server_id': 'a', 'address': a.address, 'version': entries['a']['version'], 'state': 'SERVER_STATE_SERVING',
                            'disk': entries['a']['disk'], 'dram_bytes': str(128 << 20), 'nvme_bytes': str(256 << 20)}, entries['a']
    assert entries['b']['address'] == b.address.replace('127.0.0.1', 'localhost'), entries['b']
    assert Training(etcd.url('found') + '?servers=2', 'found', folder).digest() == bits
    code, text = run(BIN / 'ballastctl', 'status', '--servers', etcd.url('found'))
    assert code == 0 and 'found' in text and b.address.split(':')[1] in text, text
    code, text = run(BIN / 'ballastctl', 'budget', '--dram', '160MiB', '--servers', etcd.url('found'))
    assert code == 0, text
    wait_for(lambda: etcd.entries('found')['b']['dram_bytes'] == str(160 << 20), 'the new budget is registered')
    b.end(signal.SIGTERM)
    assert list(etcd.entries('found')) == ['a'], 'a server that ends takes its entry with it'
    a.end(signal.SIGKILL)
    wait_for(lambda: not etcd.entries('found'), "a killed server's lease ends")


def test_killed_and_replaced_under_the_same_id(etcd, folder, bits):
    a, b = (Server(etcd, 'replaced', name, folder) for name in ('a', 'b'))
    training = Training(etcd.url('replaced') + '?servers=2', 'replaced', folder)
    for step in (8, 20):
        training.step(step)
        before = b.address
        b.end(signal.SIGKILL)
        # Whatever else somebody writes beside the entries.
        etcd.ctl('put', '/replaced/servers/0', '{')
        b.start()
        assert b.address != before
    assert training.digest() == bits
    etcd.ctl('del', '/replaced/servers/0')
    # A server that holds nothing of the job does not keep the job from going on; a job that is new takes it in.
    Server(etcd, 'replaced', 'c', folder)
    wait_for(lambda: 'c' in etcd.entries('replaced'), 'c is registered')
    assert Training(etcd.url('replaced') + '?servers=3', 'replaced', folder, '--resume', 'must').digest() == bits
    assert Training(etcd.url('replaced') + '?servers=3', 'wider', folder).digest() == bits
    code, text = run(BIN / 'ballastctl', 'status', '--json', '--servers', etcd.url('replaced'))
    members = {job['name']: len(job['servers']) for job in json.loads(text)['jobs']}
    assert members == {'replaced': 2, 'wider': 3}, members
    # Without a member that is not registered, no job is touched.
    b.end(signal.SIGTERM)
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', etcd.url('replaced'), '--job', 'replaced', '--resume', 'must', '--timeout', 10)
    assert code == 1 and f"were not registered at {etcd.url('replaced')} within 10s: 'b' (last seen at {b.address})" in text, text
    del a


def test_etcd_killed_during_a_run(etcd, folder, bits):
    a, b = (Server(etcd, 'orphaned', name, folder, host=HOST) for name in ('a', 'b'))
    training = Training(etcd.url('orphaned') + '?servers=2', 'orphaned', folder)
    training.step(5)
    etcd.kill()
    training.step(15)
    # At its old address a server is found without etcd.
    a.command[a.command.index('--listen') + 1] = a.address
    a.end(signal.SIGKILL)
    a.start()
    training.step(25)
    # At another only once etcd is back.
    b.end(signal.SIGKILL)
    b.start()
    time.sleep(1)
    assert training.process.poll() is None, 'the trainer waits'
    etcd.start()
    assert training.digest() == bits
    assert 'cannot register' in b.text() and 'registered as' in b.text(), b.text()


def test_no_proxy_of_the_environment_stands_between(etcd, folder, bits):
    for name in ('grpc_proxy', 'https_proxy', 'http_proxy'):
        os.environ[name] = 'http://127.0.0.1:1'
    try:
        Server(etcd, 'proxy', 'a', folder)
        code, text = run(BIN / 'ballastctl', 'status', '--servers', etcd.url('proxy'))
        assert code == 0, text
    finally:
        for name in ('grpc_proxy', 'https_proxy', 'http_proxy'):
            del os.environ[name]


def test_two_servers_with_one_id(etcd, folder, bits):
    """The clone ends, whatever directory it has, and the first goes on."""
    first = Server(etcd, 'twice', 'a', folder)
    wait_for(lambda: etcd.entries('twice')['a']['address'] == first.address, 'the first is registered')
    number = f"{int(etcd.entries('twice')['a']['disk']):016x}"
    training = Training(etcd.url('twice'), 'twice', folder)
    training.step(5)
    shutil.copytree(folder / 'a', folder / 'copy')
    for directory, word in (('other', 'a server_id of its own'), ('copy', 'is a copy of the other')):
        command = list(first.command)
        command[command.index('--data_directory') + 1] = folder / directory
        code, text = run(*command)
        assert code == 2 and 'ballastd ready' not in text, text
        assert first.address in text and number in text and word in text, text
        assert etcd.entries('twice')['a']['address'] == first.address
    assert training.digest() == bits
    # The first is away from etcd for longer than its lease, and somebody takes its name. It goes on without the entry.
    first.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: not etcd.entries('twice'), 'the lease of the first ends')
    (folder / 'fresh').mkdir()
    later = Server(etcd, 'twice', 'a', folder / 'fresh')
    first.process.send_signal(signal.SIGCONT)
    wait_for(lambda: 'whose lease is valid' in first.text(), 'the first warns')
    assert etcd.entries('twice')['a']['address'] == later.address
    assert first.process.poll() is None, 'the first serves whom it has'
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', etcd.url('twice'), '--job', 'twice', '--resume', 'auto')
    assert code == 1 and 'its data directory is another one' in text and number in text, text
    later.end(signal.SIGTERM)
    wait_for(lambda: etcd.entries('twice')['a']['address'] == first.address, 'the first is registered again')


def test_one_server_again_under_its_id(etcd, folder, bits):
    """At its own address at once; wiped, once the lease of the run before has ended."""
    server = Server(etcd, 'again', 'a', folder, host=HOST)
    server.command[server.command.index('--listen') + 1] = server.address
    wait_for(lambda: 'a' in etcd.entries('again'), 'it is registered')
    number = etcd.entries('again')['a']['disk']
    began = time.monotonic()
    server.end(signal.SIGKILL)
    server.start()
    there = len(leases(etcd))
    assert there == 2 or time.monotonic() - began > LEASE / 2, 'the old lease has not ended yet'
    assert etcd.entries('again')['a']['disk'] == number
    began = time.monotonic()
    server.end(signal.SIGKILL)
    shutil.rmtree(folder / 'a')
    server.start()
    assert 'whose lease is valid' in server.text() or time.monotonic() - began > LEASE / 2, 'it waited'
    assert etcd.entries('again')['a']['disk'] != number


def marks(etcd, prefix):
    """{server id: count}, of servers with one data directory"""
    lines = etcd.ctl('get', '--prefix', f'/{prefix}/directories/').splitlines()
    return {key.split('/')[3]: int(json.loads(value)['count']) for key, value in zip(lines[::2], lines[1::2])}


def test_an_older_copy_of_a_directory(etcd, folder, bits):
    """A restored backup has its original's number. It never serves by mistake, also when its original is long away."""
    server = Server(etcd, 'backups', 'a', folder, host=HOST)
    server.command[server.command.index('--listen') + 1] = server.address
    command = [BIN / 'train_bytes_lm', *MODEL, '--servers', etcd.url('backups'), '--job', 'kept', '--resume', 'auto']

    def swap(aside, copy):
        """The data directory becomes what is in `copy`."""
        (folder / 'a').rename(folder / aside)
        shutil.copytree(folder / copy, folder / 'a')

    def refused():
        code, text = run(*server.command, seconds=60)
        assert code == 2 and 'ballastd ready' not in text, text
        for word in ("is an older copy of the one that served last as 'a'", server.address, 'expected its mark', 'Was a backup restored',
                     f'ballastctl accept-copy --server a --servers {etcd.url("backups")}'):
            assert word in text, (word, text)
        return text

    code, text = run(*command, '--stop-at', 10)
    assert code == 0, text
    shutil.copytree(folder / 'a', folder / 'backup')
    counted = marks(etcd, 'backups')['a']
    code, text = run(*command, '--stop-at', 20)
    assert code == 0 and "job 'kept' continues at version 10" in text, text
    # The backup was made while the server ran. The next start marks the directory before it is killed.
    server.end(signal.SIGTERM)
    server.start()
    wait_for(lambda: marks(etcd, 'backups')['a'] >= counted + 2, 'the directory is marked at the end and at the start')
    server.end(signal.SIGKILL)
    swap('newest', 'backup')
    refused()
    wait_for(lambda: 'a' not in etcd.entries('backups'), 'the lease of the original ends')
    assert f'found {counted}' in refused()
    assert f'found {counted}' in refused(), 'a start that is refused counts for nothing'
    # Without etcd a server starts, but is not registered once etcd is back.
    etcd.kill()
    server.start()
    etcd.start()
    wait_for(lambda: 'is an older copy of' in server.text(), 'it is found out')
    assert etcd.entries('backups') == {}
    code, text = run(*command, '--timeout', 5)
    assert code == 1 and f"'a' (last seen at {server.address})" in text, text
    server.end(signal.SIGKILL)
    swap('refused', 'newest')
    server.start()
    code, text = run(*command, '--stop-at', 30)
    assert code == 0 and "job 'kept' continues at version 20" in text, text
    # What was done until an orderly end is in no copy from before.
    shutil.copytree(folder / 'a', folder / 'orderly')
    code, text = run(BIN / 'ballastctl', 'accept-copy', '--server', 'a', '--servers', etcd.url('backups'))
    assert code == 1 and f"server 'a' is registered at {server.address}: stop it first" in text, text
    server.end(signal.SIGTERM)
    swap('ended', 'orderly')
    refused()
    # An operator wants the backup.
    code, text = run(BIN / 'ballastctl', 'accept-copy', '--server', 'a,b', '--servers', etcd.url('backups'))
    assert code == 1 and '/backups/directories/a/' in text and "etcd has no mark of server 'b'" in text, text
    swap('orderly-refused', 'backup')
    server.start()
    code, text = run(*command)
    assert code == 0 and "job 'kept' continues at version 10" in text and digest_of(text) == bits, text
    server.end(signal.SIGKILL)
    swap('restored', 'ended')
    refused()  # by now that is the older one
    # etcd lost its data: nobody can tell.
    etcd.ctl('del', '--prefix', '/backups/directories/')
    swap('ended-refused', 'restored')
    server.start()
    wait_for(lambda: 'etcd lost its data or came back from a backup' in server.text(), 'the server warns')
    wait_for(lambda: 'a' in marks(etcd, 'backups'), 'there is a mark again')
    etcd.ctl('put', etcd.ctl('get', '--prefix', '--keys-only', '/backups/directories/').split()[0], '{')
    server.end(signal.SIGTERM)
    server.start()
    assert 'holds no mark of a data directory' in server.text(), server.text()
    assert etcd.entries('backups')['a']['address'] == server.address, 'nothing says that the copy is older'


def test_a_job_knows_its_servers(etcd, folder, bits):
    """Other servers of the pool never make a second job of a name, whoever answers first."""
    e1, e2 = Server(etcd, 'pool', 'e1', folder), Server(etcd, 'pool', 'e2', folder)
    command = [BIN / 'train_bytes_lm', *MODEL, '--servers', etcd.url('pool') + '?servers=2', '--job', 'known', '--resume', 'auto']
    code, text = run(*command, '--stop-at', 10)
    assert code == 0 and "job 'known' is new" in text, text
    key = job_key(etcd, 'pool', 'known')
    assert [(one['server_id'], one['address']) for one in key['table']['members']] == [('e1', e1.address), ('e2', e2.address)], key
    claimed = int(key['claimed']['counter'])
    for server in (e1, e2):
        server.end(signal.SIGKILL)
    e3, e4 = Server(etcd, 'pool', 'e3', folder), Server(etcd, 'pool', 'e4', folder)
    wait_for(lambda: sorted(etcd.entries('pool')) == ['e3', 'e4'], 'e1 and e2 are away for longer than their leases')
    code, text = run(*command, '--timeout', 10)
    assert code == 1, text
    for word in (f"'e1' (last seen at {e1.address})", f"'e2' (last seen at {e2.address})", 'registered are: e3, e4',
                 'ballastctl drop --job known --lost e1,e2'):
        assert word in text, (word, text)
    assert jobs(etcd, 'pool') == {}
    code, text = run(BIN / 'ballastctl', 'drop', '--job', 'known', '--servers', etcd.url('pool'))
    assert code == 1 and "'e1' (last seen at" in text and 'Nothing was dropped' in text, text
    # The same command line waits for the job's own servers, and goes on.
    waiting = start(*command, '--digest', log=folder / 'known.log')
    e2.start()
    e1.start()
    assert waiting.wait(300) == 0, (folder / 'known.log').read_text()
    text = (folder / 'known.log').read_text()
    assert "job 'known' continues at version 10" in text and digest_of(text) == bits, text
    assert jobs(etcd, 'pool') == {'known': [e1.address, e2.address]}
    key = job_key(etcd, 'pool', 'known')
    assert int(key['claimed']['counter']) > claimed, 'who opens the job claims it'
    assert [one['address'] for one in key['table']['members']] == [e1.address, e2.address]
    # A wiped server is another one, whatever its name.
    e1.end(signal.SIGTERM)
    shutil.rmtree(folder / 'e1')
    e1.start()
    code, text = run(*command)
    assert code == 1 and "job 'known' lies on server 'e1'" in text and e1.address in text and '--lost e1' in text, text
    for lost, word in (('e2', f"server 'e2' is at {e2.address}"), ('e3', "no member 'e3'")):
        code, text = run(BIN / 'ballastctl', 'drop', '--job', 'known', '--servers', etcd.url('pool'), '--lost', lost)
        assert code == 1 and word in text and 'nothing was dropped' in text, text
    code, text = run(BIN / 'ballastctl', 'drop', '--job', 'known', '--servers', etcd.url('pool'), '--lost', 'e1')
    assert code == 0 and '/pool/jobs/known: erased' in text, text
    assert jobs(etcd, 'pool') == {} and job_key(etcd, 'pool', 'known') is None
    code, text = run(*command)
    assert code == 0 and "job 'known' is new" in text and digest_of(text) == bits, text
    del e3, e4


def test_a_job_older_than_its_key(etcd, folder, bits):
    """One that was made by a list of servers: its key is made when its servers answer."""
    a, b = Server(etcd, 'older', 'a', folder), Server(etcd, 'older', 'b', folder)
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', a.address, '--job', 'old', '--stop-at', 10)
    assert code == 0 and job_key(etcd, 'older', 'old') is None, text
    wait_for(lambda: len(etcd.entries('older')) == 2, 'both are registered')
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', etcd.url('older'), '--job', 'old', '--resume', 'auto')
    assert code == 0 and "job 'old' continues at version 10" in text and digest_of(text) == bits, text
    assert [one['server_id'] for one in job_key(etcd, 'older', 'old')['table']['members']] == ['a']
    etcd.ctl('put', '/older/jobs/old', '{"table": {}}')
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', etcd.url('older'), '--job', 'old', '--resume', 'auto')
    assert code == 1 and 'key /older/jobs/old does not say' in text and 'etcdctl del /older/jobs/old' in text, text
    del b


def leases(etcd):
    return etcd.ctl('lease', 'list').split()[3:]  # 'found N leases'


def test_a_member_of_etcd_that_says_nothing(etcd, folder, bits):
    """As one whose machine is gone: the other member is found in time."""
    with socket.create_server(('127.0.0.1', 0)) as silent:
        both = types.SimpleNamespace(url=lambda prefix: f'etcd://127.0.0.1:{silent.getsockname()[1]},{HOST}:{etcd.port}/{prefix}')
        server = Server(both, 'silent', 'a', folder)
        wait_for(lambda: 'a' in etcd.entries('silent'), 'it is registered')
        training = Training(both.url('silent'), 'silent', folder)
        training.step(5)
        server.end(signal.SIGKILL)
        server.start()
        assert training.digest() == bits


def test_refusals(etcd, folder, bits):
    code, text = run(BIN / 'ballastctl', 'status', '--timeout', '10', '--servers', etcd.url('nobody'))
    assert code == 1 and 'expected 1 servers' in text and 'found 0' in text, text
    for bad in ('etcd://127.0.0.1:1', 'etcd://127.0.0.1/x', 'etcd://127.0.0.1:1/x?ttl=3', f'127.0.0.1:1,{etcd.url("x")}'):
        code, text = run(BIN / 'ballastctl', 'status', '--servers', bad)
        assert code == 2 and 'expected etcd://host:port' in text, text
    code, text = run(BIN / 'ballastctl', 'status', '--timeout', '1', '--servers', 'etcd://127.0.0.1:1/x')
    assert code == 1 and 'etcd://127.0.0.1:1/x does not answer' in text, text
    for value in ('{', '{"server_id":"other","address":"127.0.0.1:1"}', '{"server_id":"a","address":"127.0.0.1"}', '[' * 5000,
                  '{"server_id":"a\\u001b[2J","address":"127.0.0.1:1"}'):
        etcd.ctl('put', '/hostile/servers/a', value)
        code, text = run(BIN / 'ballastctl', 'status', '--timeout', '20', '--servers', etcd.url('hostile'))
        assert code == 1 and 'key /hostile/servers/a holds no entry' in text and 'etcdctl del' in text and '\x1b' not in text, text
    etcd.ctl('del', '/hostile/servers/a')
    etcd.ctl('put', '/hostile/servers/\x1b[2J', '{"server_id":"\\u001b[2J","address":"127.0.0.1:1"}')
    code, text = run(BIN / 'ballastctl', 'status', '--timeout', '20', '--servers', etcd.url('hostile'))
    assert code == 1 and 'holds no entry' in text and '\x1b' not in text, text
    config = folder / 'doctor.yaml'
    config.write_text(f'listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: {folder}/doctor\ndiscovery: {etcd.url("x")}\n'
                      'budget:\n  dram: 64MiB\n')
    lines = json.loads(run(BIN / 'ballastctl', 'doctor', '--json', '--config', config)[1])['checks']
    assert [line for line in lines if line['what'] == 'registry'][0]['verdict'] == 'ok', lines
    config.write_text(config.read_text().replace(str(etcd.port), '1'))
    lines = json.loads(run(BIN / 'ballastctl', 'doctor', '--json', '--timeout', '1', '--config', config)[1])['checks']
    assert [line for line in lines if line['what'] == 'registry'][0]['verdict'] == 'note', lines


def test_by_tls_with_a_user(etcd, folder, bits):
    etcd.kill()
    issue(folder, 'ca', 'etcd')
    issue(folder, 'ca', 'us')
    secret = folder / 'password'
    secret.write_text('open sesame\n')
    tls = ['--cert-file', folder / 'etcd.crt', '--key-file', folder / 'etcd.key', '--trusted-ca-file', folder / 'ca.crt',
           '--client-cert-auth']
    (folder / 'by-tls').mkdir()
    files = f'ca={folder}/ca.crt&certificate={folder}/us.crt&key={folder}/us.key'
    etcd = Etcd(folder / 'by-tls', tls, ['--cacert', folder / 'ca.crt', '--cert', folder / 'us.crt', '--key', folder / 'us.key'],
                f'{files}&user=ballast&password_file={secret}')
    for words in ('user add root:toor', 'user grant-role root root', 'user add ballast --new-user-password=open_sesame',
                  'role add servers', 'role grant-permission servers --prefix=true readwrite /mine/', 'user grant-role ballast servers',
                  'auth enable'):
        etcd.ctl(*[word.replace('_', ' ') if 'password' in word else word for word in words.split()])
    etcd.access += ['--user', 'root:toor']
    a = Server(etcd, 'mine', 'a', folder)
    wait_for(lambda: 'a' in etcd.entries('mine'), 'registered by TLS, as a user')
    assert Training(etcd.url('mine') + '&servers=1', 'mine', folder).digest() == bits

    def status(url, seconds=10):
        return run(BIN / 'ballastctl', 'status', '--timeout', seconds, '--servers', url)
    code, text = status(etcd.url('mine'), 60)
    assert code == 0, text
    code, text = status(etcd.url('theirs'))
    assert code == 1 and 'permission denied' in text, text
    plain = f'etcd://{HOST}:{etcd.port}/mine'
    code, text = status(plain)
    assert code == 1 and 'the server shows /CN=etcd' in text and 'in the URL: ca=FILE' in text, text
    code, text = status(f'{plain}?{files}')
    assert code == 1 and 'permission denied' in text, 'the common name of our certificate is no user of etcd: ' + text
    # A user from before there were jobs' keys.
    for words in ('user add older --new-user-password=open_sesame', 'role add found',
                  'role grant-permission found --prefix=true read /mine/servers/', 'user grant-role older found'):
        etcd.ctl(*[word.replace('_', ' ') if 'password' in word else word for word in words.split()])
    code, text = run(BIN / 'train_bytes_lm', *MODEL, '--servers', etcd.url('mine').replace('user=ballast', 'user=older'), '--job', 'new')
    assert code == 1 and 'must be allowed to read and to write (/mine/jobs/new)' in text, text
    code, text = status(f'{plain}?{files.replace("us.crt", "none.crt")}')
    assert code == 1 and f'{folder}/none.crt' in text, text
    # New roles make old tokens stale, and the server's too.
    etcd.ctl('role', 'grant-permission', 'servers', '--prefix=true', 'readwrite', '/others/')
    secret.write_text('wrong')
    code, text = status(etcd.url('mine'))
    assert code == 1 and 'authentication failed' in text, text
    secret.write_text('open sesame')
    run(BIN / 'ballastctl', 'budget', '--dram', '160MiB', '--servers', a.address)
    wait_for(lambda: etcd.entries('mine')['a']['dram_bytes'] == str(160 << 20), 'the server shows itself anew')
    # Another CA, while the server runs.
    etcd.kill()
    for name in ('ca.crt', 'ca.key'):
        (folder / name).unlink()
    issue(folder, 'ca', 'etcd')
    issue(folder, 'ca', 'us')
    etcd.start()
    wait_for(lambda: 'a' in etcd.entries('mine') and status(etcd.url('mine'))[0] == 0, 'found by the new CA')
    run(BIN / 'ballastctl', 'budget', '--dram', '128MiB', '--servers', a.address)
    wait_for(lambda: etcd.entries('mine')['a']['dram_bytes'] == str(128 << 20), 'the server takes the new files')


sys.exit(main({name: test for name, test in globals().items() if name.startswith('test_')}))
