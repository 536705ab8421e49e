"""The status page in a headless Chromium: what it shows, and what it must never do."""
import pathlib
import re

import ops

CHROMIUM = pathlib.Path('/usr/bin/chromium')


class Browser:
    """One Chromium; its pages fail the test on any console message, script error, or request to another host."""

    def __init__(self):
        ops.need('chromium')
        try:
            from playwright.sync_api import sync_playwright
        except ImportError:
            raise ops.Skip('no playwright; tests/ops/requirements.txt names it') from None
        self.playwright = sync_playwright().start()
        # A test runs as root in namespaces of its own, where Chromium's sandbox does not start.
        self.chromium = self.playwright.chromium.launch(executable_path=str(CHROMIUM), args=[
            '--no-sandbox', '--disable-gpu', '--js-flags=--expose-gc', '--enable-precise-memory-info'])
        self.faults = []

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for context in self.chromium.contexts:
            for page in context.pages:
                self.close(page)
        self.chromium.close()
        self.playwright.stop()
        if kind is None:
            assert not self.faults, self.faults

    def open(self, url, width=1280, height=900, status=None, down=False, **options):
        """A page at `url`. `status`: changes the server's /status.json on its way. `down`: failing requests to this host are expected."""
        page = self.chromium.new_page(viewport={'width': width, 'height': height}, **options)
        page.set_default_timeout(60000)
        page.on('console', lambda message: None if down and 'ERR_' in message.text else self.faults.append(message.text))
        page.on('pageerror', lambda error: self.faults.append(str(error)))
        page.on('request', lambda request: None if request.url.startswith(url) else self.faults.append(f'asked {request.url}'))
        if status is not None:
            def change(route):
                answer = route.fetch()
                route.fulfill(response=answer, json=status(answer.json()))
            page.route('**/status.json', change)
        page.goto(url)
        return page

    def close(self, page):
        """Closes a page. A status that is on its way to it is dropped, where `page.close()` alone fails the test."""
        page.unroute_all(behavior='ignoreErrors')
        page.close()


# The least contrast of a text with the ground behind it, by WCAG 2: [ratio, text].
CONTRAST = """() => {
  const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((c) => c / 255).map((c) => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
      .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((parts(colour)[3] ?? 1) > 0) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  let least = [99, ''];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), node = texts.currentNode.parentElement;
    if (!text || !node.checkVisibility() || node.closest('noscript')) continue;
    const pair = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + .05) / (pair[1] + .05);
    if (ratio < least[0]) least = [ratio, text];
  }
  return least;
}"""


def contrast(page):
    return page.evaluate(CONTRAST)


def shown_number(text):
    return float(re.search(r'[0-9.]+', text).group())
