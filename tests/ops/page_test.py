"""The status page of a server, in a real browser."""
import json
import os
import re
import signal
import time

import browser
import ops

HTML = '<img src=x onerror=alert(1)>'
WIDTHS = (360, 1600)


class Server:
    """A ballastd whose ports stay the same when it is started again."""

    def __init__(self, name='one', server_id='one', port=7070):
        ops.need(ops.BIN / 'ballastd')
        self.name, self.address, self.page = name, f'127.0.0.1:{port}', f'http://127.0.0.1:{port + 1000}/'
        self.command = [ops.BIN / 'ballastd', '--data_directory', name, '--server_id', server_id, '--listen', self.address,
                        '--metrics_listen', f'127.0.0.1:{port + 1000}', '--budget.dram', '64MiB', '--budget.nvme', '512MiB']
        os.makedirs(name, exist_ok=True)
        self.start()

    def start(self):
        self.process = ops.start(*self.command, log=f'{self.name}.log')
        ops.wait_for(lambda: ops.http(self.page + 'readyz')[0] == 200, 'the server is ready')

    def status(self):
        return json.loads(ops.http(self.page + 'status.json')[1])


def wait_text(page, selector, text, seconds=60):
    ops.wait_for(lambda: text in page.inner_text(selector), f'{selector} says {text!r}; it says {page.inner_text(selector)!r}', seconds)


def cells(page):
    """{job: {column: text}} of the table of jobs."""
    return page.evaluate("""() => Object.fromEntries([...document.querySelectorAll('#jobs tbody tr')].map((row) =>
        [row.firstChild.textContent, Object.fromEntries([...row.querySelectorAll('td')].map((cell) =>
            [cell.dataset.column, cell.textContent]))]))""")


def many_jobs(count):
    """Changes an answer: its only job `count` times, under names of their own."""
    def change(status):
        job = status['jobs'][0]
        status['jobs'] = [{**job, 'name': f'job-{i:03}', 'committed_min': job['committed_min'] + i,
                           'committed_max': job['committed_max'] + i} for i in range(count)]
        return status
    return change


def trained(*servers, job='page'):
    """A job with its 40 steps behind it: nothing moves any more."""
    ops.run(*ops.trainer(','.join(server.address for server in servers), '--job', job))


def endless(servers, job, *extra):
    """A trainer in the background that does not come to its end."""
    words = ops.trainer(servers, '--job', job, '--timeout', 600, *extra)
    words[words.index('--steps') + 1] = '1000000'
    return ops.start(*words, log=f'{job}-{len(os.listdir())}.log')


def test_numbers():
    """The numbers of a server at rest are those of /status.json: tiers and their parts to the byte, every cell of a job, the steps."""
    server = Server()
    trained(server)
    with browser.Browser() as chromium:
        page = chromium.open(server.page)
        wait_text(page, '#sentence', 'HEALTHY: 1 job')
        wait_text(page, '#bound', 'bound by')
        status = server.status()
        own = status['servers'][0]['status']
        shown = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll('#tiers > div')].map((tier) => [tier.dataset.tier, {
            used: tier.querySelector('.used').value, capacity: tier.querySelector('.capacity').value,
            parts: [...tier.querySelectorAll('.legend data')].map((part) => part.value),
            bar: [...tier.querySelectorAll('.bar rect')].map((rect) => parseFloat(rect.getAttribute('width')))}]))""")
        expected = {tier['tier']: tier for tier in own['tiers'] if tier['capacity_bytes'] != '0'}
        assert set(expected) == {'dram', 'nvme'} == set(shown), shown
        for name, tier in expected.items():
            got = shown[name]
            assert (got['used'], got['capacity']) == (tier['used_bytes'], tier['capacity_bytes']), (got, tier)
            assert sorted(got['parts']) == sorted(part['bytes'] for part in tier['parts'] if part['bytes'] != '0'), (got, tier)
            assert sum(map(int, got['parts'])) == int(got['used']), got
            assert abs(sum(got['bar']) - 100 * int(got['used']) / int(got['capacity'])) < 0.01, got
        job = status['jobs'][0]
        row = cells(page)['page']
        wanted = {'Version': str(job['committed_max']), 'Ranks': '1', 'Durability': 'step', 'Skipped': '0', 'Moving': '-', 'Pins': '-',
                  'Parameters': f"{job['parameters']:,}"}
        assert {column: row[column] for column in wanted} == wanted and job['committed_max'] >= 40, (row, job)
        steps = json.loads(ops.http(f'{server.page}steps.json?job=page')[1])['jobs'][0]['steps']
        assert page.locator('#steps svg.columns > g').count() == min(60, len(steps)) > 30
        assert (job['short_chunks'], job['copies']) == (0, '') and page.is_hidden('#copying')
        sums = {}
        for step in steps[-60:]:
            for stage in step['stages']:
                sums[stage['stage']] = sums.get(stage['stage'], 0) + stage['seconds']
        stage = max(sums, key=sums.get)
        share = 100 * sums[stage] / sum(sums.values())
        assert (job['bound_by']['stage'], job['bound_by']['server']) == (stage, server.address), (job['bound_by'], sums)
        assert job['bound_by']['words'] in page.inner_text('#bound'), (page.inner_text('#bound'), job['bound_by'])
        assert abs(browser.shown_number(page.inner_text('#bound')) - share) <= 0.51, (page.inner_text('#bound'), sums)


def test_killed_and_back():
    """A killed server shows, a stopped process too, and both come back without a reload."""
    server = Server()
    trained(server)
    with browser.Browser() as chromium:
        page = chromium.open(server.page, down=True)
        wait_text(page, '#sentence', 'HEALTHY')
        page.evaluate('window.sameDocument = true')  # a reload would lose it
        for end, again in ((lambda: ops.kill(server.process), server.start),
                           (lambda: os.kill(server.process.pid, signal.SIGSTOP), lambda: os.kill(server.process.pid, signal.SIGCONT))):
            began = time.monotonic()
            end()
            wait_text(page, '#sentence', 'This server does not answer')
            print(f'gone after {time.monotonic() - began:.2f} s')
            assert page.evaluate("document.querySelector('[aria-live]').textContent") == page.inner_text('#sentence')
            again()
            wait_text(page, '#sentence', 'HEALTHY')
            assert page.evaluate('window.sameDocument'), 'the page was loaded again'


def test_recovery():
    """A server that is not ready says so, and how far its recovery is."""
    server = Server()
    with browser.Browser() as chromium:
        def recovering(status):
            status['verdict'], status['problems'] = 'degraded', ['server recovers its jobs: 1.0 KiB of 4.0 KiB']
            status['servers'][0]['status'].update(state='recovering', recovery_done_bytes='1024', recovery_total_bytes='4096')
            return status
        page = chromium.open(server.page, status=recovering)
        wait_text(page, '#sentence', 'RECOVERING')
        wait_text(page, '#problems', '1.0 KiB of 4.0 KiB')
        assert page.evaluate("(bar => !bar.hidden && bar.value / bar.max)(document.getElementById('recovery'))") == 0.25


def test_names_are_text():
    """A job, a server, a peer, a problem and a wait called like HTML are text. Servers refuse such names; the page does not
    rely on that."""
    server = Server()
    trained(server)
    with browser.Browser() as chromium:
        def rename(status):
            status['jobs'][0].update(name=HTML, waits=[HTML], copies=HTML, durability=HTML)
            status['servers'][0]['status'].update(server_id=HTML, version=HTML)
            status.update(verdict='degraded', problems=[HTML], peers=[{'server_id': HTML, 'page': '10.0.0.1:9'}])
            return status
        page = chromium.open(server.page, status=rename)
        wait_text(page, '#jobs th[scope=row]', HTML)
        for selector in ('#server', '#facts', '#problems', '#waits', '#copies', '#peers', '#job', '#jobs td:nth-of-type(6)'):
            wait_text(page, selector, HTML)
        assert page.locator('img').count() == 0 and page.title() == f'✗ {HTML} Ballast'
        # The policy would stop a script even if some text became HTML.
        assert "default-src 'self'" in page.request.get(server.page).headers['content-security-policy']


def test_sizes_and_schemes():
    """360 to 1600 pixels without sideways scrolling, in light and dark with enough contrast, and no motion for who asked for none."""
    server = Server(server_id='a-server-with-a-long-name.' + 'x' * 38)
    trained(server)
    with browser.Browser() as chromium:
        for width in WIDTHS:
            for scheme in ('light', 'dark'):
                for count in (1, 30):
                    page = chromium.open(server.page, width=width, color_scheme=scheme, reduced_motion='reduce', status=many_jobs(count))
                    wait_text(page, '#sentence', 'HEALTHY')
                    wait_text(page, '#jobs', 'job-000')
                    inside = page.evaluate('[document.documentElement.scrollWidth, innerWidth]')
                    assert inside[0] <= width == inside[1], (width, inside)
                    assert page.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.getElementById('jobs'))"), width
                    ratio, text = browser.contrast(page)
                    print(f'{width} px, {scheme}, {count} jobs: least contrast {ratio:.1f} ({text!r})')
                    assert ratio >= 4.5, (scheme, ratio, text)
                    assert page.evaluate("[...document.querySelectorAll('.bar rect')]"
                                         ".every(r => getComputedStyle(r).transitionDuration === '0s')")
                    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == {
                        'light': 'rgb(255, 255, 255)', 'dark': 'rgb(17, 20, 23)'}[scheme]
                    chromium.close(page)


def test_without_colour():
    """Every part and stage has a texture of its own, and its name stands beside the key."""
    server = Server()
    trained(server)
    with browser.Browser() as chromium:
        page = chromium.open(server.page)
        wait_text(page, '#bound', 'bound by')
        looks = page.evaluate("[...document.querySelectorAll('pattern')].map((p) => [p.id, p.lastChild.getAttribute('d')])")
        assert len(looks) >= 10 == len({d for _, d in looks}), looks
        for legend in page.locator('.legend').all():
            keys = legend.evaluate("list => [...list.querySelectorAll('li')]"
                                   ".map((li) => [li.querySelector('rect').getAttribute('fill'), li.textContent])")
            assert keys and len({fill for fill, _ in keys}) == len(keys), keys
            assert all(text.strip()[0].isalpha() for _, text in keys), keys


def test_keyboard_and_names():
    """Tab reaches the job's choice and every link, in the order of the page; headings and live region are there for screen readers."""
    server = Server()
    trained(server, job='one')
    trained(server, job='two')
    with browser.Browser() as chromium:
        page = chromium.open(server.page)
        wait_text(page, '#sentence', 'HEALTHY: 2 jobs')
        reached = []
        for _ in range(5):
            page.keyboard.press('Tab')
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('href')"))
        assert reached == ['job', '/status.json', '/metrics', '/readyz', '/livez'], reached
        page.locator('#job').focus()
        page.keyboard.press('ArrowDown')
        ops.wait_for(lambda: page.input_value('#job') == 'two' and page.locator('#steps g').count() > 30, 'the steps of the other job')
        page.wait_for_timeout(2500)
        assert page.input_value('#job') == 'two', 'a refresh changed the choice'
        assert page.locator('#job option').count() == 2 == page.locator('#jobs tbody tr').count(), 'a refresh made items anew'
        assert page.get_attribute('#sentence', 'aria-live') == 'polite'
        assert page.locator('svg.bar, svg.columns').evaluate_all(
            "all => all.every((svg) => svg.getAttribute('role') === 'img' && svg.getAttribute('aria-label'))")
        assert page.locator('h1, h2').all_inner_texts()[1:] == [
            'Verdict', 'Who waits for whom', 'Copies', 'Memory tiers', 'Last steps', 'Jobs', 'Peers']


def test_many_jobs():
    """256 jobs are drawn, the first time and again; in less than 200 ms where no other test is in the way."""
    server = Server()
    trained(server)
    with browser.Browser() as chromium:
        page = chromium.open(server.page, status=many_jobs(256))
        wait_text(page, '#sentence', 'HEALTHY: 256 jobs')
        times = [float(page.get_attribute('#age', 'data-draw-ms'))]
        while len(times) < 4 or (min(times) >= 200 and len(times) < 60):  # once may be when no other test is in the way
            page.wait_for_timeout(1000)
            times.append(float(page.get_attribute('#age', 'data-draw-ms')))
        print('256 jobs drawn in ms:', times)
        assert page.locator('#jobs tbody tr').count() == 256 and cells(page)['job-255']['Version'] != cells(page)['job-000']['Version']
        assert min(times) < 200, times


def test_an_hour():
    """An hour of refreshes, in fast motion, with jobs that come and go: the heap does not grow."""
    server = Server()
    trained(server)
    with browser.Browser() as chromium:
        page = chromium.open(server.page)
        wait_text(page, '#bound', 'bound by')
        # What the server says once, told again for each second of the hour.
        heaps = page.evaluate("""async (minutes) => {
          const status = await (await fetch('/status.json')).json(), steps = stepsOf(await (await fetch('/steps.json?job=page')).json());
          const heaps = [];
          for (let second = 0; second < 60 * minutes; ++second) {
            answeredAt = 1000 * second;
            status.jobs = status.jobs.map((job, i) => ({...job, name: `job-${Math.floor(second / 100)}-${i}`, committed_max: second}));
            draw(status, steps.map((step, i) => ({...step, step: second + i})));
            if (second % 300 === 299) {
              await new Promise((done) => setTimeout(done));
              gc();
              heaps.push(performance.memory.usedJSHeapSize);
            }
          }
          return heaps;
        }""", 60)
        print('heap in KiB after each five minutes:', [heap // 1024 for heap in heaps])
        assert heaps[-1] < heaps[2] + 2**18, heaps


def test_peers():
    """Two servers of a job link to each other, and the links lead there."""
    one, two = Server('one', 'one', 7070), Server('two', 'two', 7071)
    trained(one, two)
    with browser.Browser() as chromium:
        for here, there in ((one, two), (two, one)):
            page = chromium.open(here.page)
            wait_text(page, '#peers', there.name)
            assert page.locator('#peers a').get_attribute('href') == there.page
            chromium.close(page)


def test_who_waits():
    """A rank that has stopped amid a step shows within seconds as a wait of that step, on the page and in `status`; the wait ends
    with the stop."""
    server = Server()
    ranks = [endless(server.address, 'page', '--rank', rank, '--world-size', 2, '--rendezvous', 'meeting') for rank in range(2)]
    ops.wait_for(lambda: ops.committed(server.address) >= 5, 'some steps')
    # Ranks exchange gradients among themselves before they push, and norms before they seal. A rank that stops before the first slice
    # leaves nothing to tell, so it goes on and stops again, after more and more of a step.
    waits = []
    for tries in range(40):
        os.kill(ranks[1].pid, signal.SIGSTOP)
        end = time.monotonic() + 1.5
        while not waits and time.monotonic() < end:
            waits = server.status()['jobs'][0]['waits']
            time.sleep(0.05)
        if waits:
            break
        os.kill(ranks[1].pid, signal.SIGCONT)
        done = ops.committed(server.address)
        ops.wait_for(lambda done=done: ops.committed(server.address) > done, 'the next step')
        time.sleep(0.01 * tries)
    assert waits, 'no stop was amid a step'
    with browser.Browser() as chromium:
        page = chromium.open(server.page)
        wait_text(page, '#waits', 'sealed step')
        step = server.status()['jobs'][0]['committed_max'] + 1
        wanted = rf'page: (rank 1 has not|no rank has) sealed step {step}(, whose slices have come)? for \d+ s$'
        print(page.inner_text('#waits'))
        assert re.match(wanted, page.inner_text('#waits')), page.inner_text('#waits')
        status = ops.run(ops.BIN / 'ballastctl', 'status', '--servers', server.address)
        assert re.search(r'\nWaiting\n  ' + wanted[:-1], status), status
        os.kill(ranks[1].pid, signal.SIGCONT)
        wait_text(page, '#waits', 'nobody waits')
        wait_text(page, '#sentence', 'HEALTHY')
