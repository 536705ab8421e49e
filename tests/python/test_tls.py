"""Named servers by TLS, with certificates and tokens."""
import hashlib
import shutil
import subprocess
import time

import pytest
import torch
from conftest import two_state_servers
from models import mlp, train

import ballast
import ballast.torch as bt

pytestmark = pytest.mark.skipif(shutil.which('openssl') is None, reason='no openssl command')


def run(folder, command, *more):
    subprocess.run(['openssl', *command.split(), *more], cwd=folder, check=True, capture_output=True)


def issue(folder, name, alternative_names):
    """name.crt and name.key, by the CA of the folder."""
    run(folder, f'req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}')
    (folder / f'{name}.ext').write_text(f'subjectAltName={alternative_names}\nextendedKeyUsage=serverAuth,clientAuth\n')
    run(folder, f'x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out {name}.crt -days 2 -extfile {name}.ext')


@pytest.fixture(scope='module')
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp('certificates')
    run(folder, 'req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=ca')
    issue(folder, 'server', 'DNS:localhost,IP:127.0.0.1')
    issue(folder, 'trainer', 'URI:spiffe://t/trainer')
    (folder / 'token').write_text('a-token-of-a-test\n')
    digest = hashlib.sha256(b'a-token-of-a-test').hexdigest()
    (folder / 'tokens.yaml').write_text(f'tokens: [{{identity: holder, sha256: {digest}}}]\n')
    (folder / 'rights.yaml').write_text(
        "rights:\n- {identity: 'spiffe://t/trainer', jobs: 'mine-*', can: [train, pin]}\n"
        "- {identity: holder, kind: token, jobs: 'held-*', can: [train]}\n")
    return folder


@pytest.fixture(scope='module')
def servers(certificates, tmp_path_factory):
    flags = {'tls.certificate': 'server.crt', 'tls.key': 'server.key', 'tls.client_ca': 'ca.crt', 'tokens': 'tokens.yaml',
             'rights': 'rights.yaml', 'audit_log': 'audit.log'}
    words = [word for key, name in flags.items() for word in (f'--{key}', str(certificates / name))]
    with two_state_servers(tmp_path_factory.mktemp('servers'), *words) as addresses:
        yield addresses


def audited(certificates, text):
    """A thread of the server writes the lines, behind the answers."""
    until = time.monotonic() + 60
    while text not in (audit := (certificates / 'audit.log').read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    return text in audit or audit


def parameters_after(steps=3, **arguments):
    torch.manual_seed(7)
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, **arguments)
    train('mlp', model, optimizer, steps=steps)
    optimizer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_certificate_trains_as_an_embedded_server_would(certificates, servers):
    tls = {'ca': certificates / 'ca.crt', 'certificate': certificates / 'trainer.crt', 'key': str(certificates / 'trainer.key')}
    assert all(map(torch.equal, parameters_after(servers=servers, name='mine-1', tls=tls), parameters_after(name='plain')))
    assert audited(certificates, 'call=Open identity="spiffe://t/trainer"') is True


def test_the_environment_says_the_same_with_a_token(certificates, servers, monkeypatch):
    monkeypatch.setenv('BALLAST_SERVERS', servers)
    monkeypatch.setenv('BALLAST_CA', str(certificates / 'ca.crt'))
    monkeypatch.setenv('BALLAST_TOKEN_FILE', str(certificates / 'token'))
    parameters_after(name='held-1')
    assert audited(certificates, 'identity="holder"') is True


@pytest.mark.parametrize('name, reason, words', [('mine-2', 'NO_RIGHT', "'holder' may not GetJob job 'mine-2'"),
                                                 ('held-2', 'NO_IDENTITY', 'requires an identity')])
def test_a_refusal_says_what_is_missing(name, reason, words, certificates, servers):
    given = {'tls': {'ca': certificates / 'ca.crt'}}
    if reason == 'NO_RIGHT':
        given['token_file'] = certificates / 'token'
    with pytest.raises(ballast.Error, match=words) as raised:
        bt.AdamW(mlp().parameters(), servers=servers, name=name, **given).resume()
    assert raised.value.reason == reason


def test_files_that_are_not_there_are_named(certificates, servers):
    with pytest.raises(ballast.Error, match='no-such.crt: expected a file') as raised:
        bt.AdamW(mlp().parameters(), servers=servers, tls={'ca': certificates / 'no-such.crt'}).resume()
    assert raised.value.reason == 'BAD_CONFIG'
