"""Measure a page in a real headless browser, at the widths of a phone and of a desktop."""

import html
import json
import re
import shutil
import subprocess

import pytest
from waiting import PATIENCE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the PATH")

# A frame lays out a page as a window of its width would. Frames can be narrower than a window's minimum width.
_FRAMES = """<!doctype html><body><script>
const source = %s, widths = %s, found = {};
function ready(frame, width) {
  const own = frame.contentWindow, page = own.document;
  found[width] = (%s)(own, page);
  if (Object.keys(found).length === widths.length) {
    const told = document.createElement("pre");
    told.id = "told";
    told.textContent = JSON.stringify(found);
    document.body.append(told);
  }
}
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  frame.onload = () => ready(frame, width);
  frame.srcdoc = source;
  document.body.append(frame);
}
</script></body>"""


def measure(page, function, tmp_path, widths=(390, 1280)):
    """Run the JavaScript `function(window, document)` on the page: {width in CSS pixels: its result}."""
    outer = tmp_path / "outer.html"
    source = json.dumps(page.read_text(encoding="utf-8")).replace("</", "<\\/").replace("<!--", "<\\!--")
    outer.write_text(_FRAMES % (source, json.dumps(widths), function), encoding="utf-8")
    switches = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    switches += ["--virtual-time-budget=20000", "--dump-dom", outer.as_uri()]
    done = subprocess.run([CHROMIUM, *switches], capture_output=True, text=True, timeout=PATIENCE)
    told = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told, f"the browser says nothing: {done.stdout[:300]} {done.stderr[-500:]}"
    return {int(width): found for width, found in json.loads(html.unescape(told[1])).items()}
